"""Put the options of each command into reference/command-line.md, from the commands themselves.

A line `<!-- options of fastps COMMAND -->` becomes the usage, the arguments and the options of that command.
"""

import re
import sys
from importlib.metadata import entry_points
from typing import Any

_PAGE = "reference/command-line.md"
_MARKER = re.compile(r"^<!-- options of fastps (\w+) -->$", re.MULTILINE)
# Several commands repeat the whole grammar of specs; the page on disciplines has it once.
_GRAMMAR = re.compile(r"Synchronization: bsp, asp,.*?as one sum\.")


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
    return _MARKER.sub(lambda match: _section(match[1], found[match[1]]), markdown)


def _section(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join(["fastps", name, "[OPTIONS]", *(_metavar(each) for each in arguments)])
    return "\n\n".join([f"```text\n{usage}\n```", *(_entry(each) for each in [*arguments, *options])])


def _metavar(parameter: Any) -> str:
    import click

    text = parameter.make_metavar(click.Context(click.Command("fastps")))
    return re.sub(r"^\{(.*)\}$|^\[\[(\w+)\]\]$", lambda match: match[1] or f"[{match[2]}]", text).replace("<list[str]>", "TEXT")


def _entry(parameter: Any) -> str:
    names = ", ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{_metavar(parameter)}`"
    elif not getattr(parameter, "is_flag", False):
        names += f" `{_metavar(parameter).strip('<>').replace('list[str]', 'TEXT').upper()}`"
    text = _GRAMMAR.sub("A synchronization spec; [Which discipline?](../which-discipline.md) has them all.", parameter.help or "")
    text = re.sub(r"([*_<>|\[])(?!Which)", r"\\\1", text) if "](" not in text else text
    default = parameter.default
    shown = default is not None and getattr(parameter, "show_default", False) and not getattr(parameter, "is_flag", False)
    return f"{names}\n:   {text}" + (f" Default: `{default}`." if shown and default not in ("", [], ()) else "")
