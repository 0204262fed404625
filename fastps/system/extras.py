"""How to install the packages that only some commands need: in the words of a checkout, since no registry has fastps."""


def how_to_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, and where to give it.

    >>> how_to_install("demo")
    "pip install '.[demo]' in the folder of fastps' source"
    """
    return f"pip install '.[{extra}]' in the folder of fastps' source"
