"""How to install the packages that only some commands need. The hint names no package index, because none has fastps."""


def how_to_install(extra: str) -> str:
    """The commands that install an extra of pyproject.toml, from the source or from a wheel.

    >>> how_to_install("demo")
    "pip install '.[demo]' in the folder of fastps' source, or with its wheel 'fastps-….whl[demo]'"
    """
    return f"pip install '.[{extra}]' in the folder of fastps' source, or with its wheel 'fastps-….whl[{extra}]'"
