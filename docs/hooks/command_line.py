"""Put the options of each command into reference/command-line.md, from the commands themselves.

A line `<!-- options of fastps COMMAND -->` becomes the usage, the arguments and the options of that command.
"""

import re
import sys
from importlib.metadata import entry_points
from typing import Any

_PAGE = "reference/command-line.md"
_MARKER = re.compile(r"^<!-- options of fastps ([\w-]+) -->$", re.MULTILINE)
# Several commands repeat the grammar of specs; one page of the site has it once.
_GRAMMAR = re.compile(r"Synchronization: bsp, asp,.*?as one sum\.")
_LINK = "A spec; [Which discipline?](../which-discipline.md) has all of them."


def commands() -> dict[str, Any]:
    """Return the commands of the installed `fastps`, by name."""
    import typer

    (script,) = entry_points(group="console_scripts", name="fastps")
    application = sys.modules[script.load().__module__].app
    return dict(typer.main.get_command(application).commands)  # type: ignore[attr-defined]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the markers of the command line's page (an event of MkDocs)."""
    if page.file.src_uri != _PAGE:
        return markdown
    found = commands()
    return _MARKER.sub(lambda match: section(match[1], found[match[1]]), markdown)


def section(name: str, command: Any) -> str:
    """Return a command's usage, arguments and options as Markdown."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join(["fastps", name, "[OPTIONS]", *(each.metavar or each.name for each in arguments)])
    return "\n\n".join([f"```text\n{usage}\n```", *(_entry(each) for each in [*arguments, *options])])


def _entry(parameter: Any) -> str:
    is_flag = bool(getattr(parameter, "is_flag", False))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name}`"
    else:
        names = ", ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
        names += "" if is_flag else f" `{parameter.metavar or _value_of(parameter.default)}`"
    text = re.sub(r"([*_<>|\[\]])", r"\\\1", _GRAMMAR.sub("@", parameter.help or "")).replace("@", _LINK)
    has_default = not is_flag and parameter.default not in (None, "", [], ())
    return f"{names}\n:   {text}" + (f" Default: `{parameter.default}`." if has_default else "")


def _value_of(default: Any) -> str:
    return {int: "N", float: "X"}.get(type(default), "TEXT")
