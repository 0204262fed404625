"""How to install the packages that only some commands need. The hint names a source checkout: no package index has fastps."""


def how_to_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, and the folder to run it in.

    >>> how_to_install("demo")
    "pip install '.[demo]' in the folder of fastps' source"
    """
    return f"pip install '.[{extra}]' in the folder of fastps' source"
