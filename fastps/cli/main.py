"""The command line. Every command parses its options, calls one function of the library, and shows or writes the result.

Errors are one sentence. Exit codes: 0 done, 1 the run failed, 2 wrong usage or a wrong file, 130 ended by Ctrl-C. A command
imports torch and numpy only when it needs them, so help and usage errors appear at once.
"""

import contextlib
import signal

_is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
with contextlib.suppress(ValueError):  # not the main thread, which alone has handlers
    if _is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends this process without a traceback

import errno
import importlib
import io
import logging
import os
import pkgutil
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler
from typer.core import TyperGroup

from fastps.cli import commands
from fastps.cli.help import Command
from fastps.cli.options import with_csv
from fastps.errors import Error, UsageError, naming_isa
from fastps.system.descriptors import occupy_standard_streams
from fastps.system.noted_signals import EndedBySignalError
from fastps.version import __version__


class GroupedCommands(TyperGroup):
    """The commands of the help in groups, each with its whole sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel, in the order of the commands; rows fold at words."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                panels.setdefault(command.rich_help_panel, []).append((name, command.get_short_help_str(limit=1000)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


app = typer.Typer(
    help="The embedded parameter server for PyTorch: run, train and compare with any synchronization scheme.",
    no_args_is_help=True,
    cls=GroupedCommands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the loggers fastps.* say.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""
    level = logging.INFO if verbose else logging.WARNING
    # A terminal gets columns; a file or a pipe gets whole lines.
    handler = RichHandler(console=Console(stderr=True)) if sys.stderr.isatty() else logging.StreamHandler()
    logging.basicConfig(level=level, format="%(name)s: %(message)s", handlers=[handler])


groups = [importlib.import_module(f"{commands.__name__}.{module.name}") for module in pkgutil.iter_modules(commands.__path__)]
for group in sorted(groups, key=lambda each: each.ORDER):  # the order that they declare
    for each in group.commands.registered_commands:
        each.cls = Command
        each.callback = with_csv(each.callback)
    app.add_typer(group.commands)


with contextlib.suppress(ValueError):
    if _is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> NoReturn:
    """End as at Ctrl-C: folders and namespaces of a command are removed."""
    raise EndedBySignalError(number)


def main() -> None:
    """Run the command line and exit with its code; an error is one sentence, or with --debug a traceback."""
    occupy_standard_streams()
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lasts
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name, or a bar of fastps top, that its encoding lacks
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, a child that has ended has no exit code
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    try:
        try:
            with naming_isa():
                app()
        finally:
            print(end="", flush=True)  # at its end Python would show what fails here
    except KeyboardInterrupt:  # before or after the command itself
        sys.exit(130)
    except Error as error:
        if "--debug" in sys.argv:
            raise
        sys.stderr.write(f"fastps: {error}\n")
        sys.exit(getattr(error, "exit_code", 2 if isinstance(error, ValueError | UsageError) else 1))
    except OSError as error:
        is_closed = error.errno == errno.EPIPE  # by its reader, such as head
        if not is_closed and (error.errno != errno.ENOSPC or "--debug" in sys.argv):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes at its end what the standard output still has
        if is_closed:
            sys.exit(1)  # as click and rich do
        sys.stderr.write(f"fastps: expected room for the output, found: {error.strerror}; make room, or choose another place\n")
        sys.exit(2)
