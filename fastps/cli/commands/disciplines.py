"""The command `fastps disciplines`: every spec of --sync, with its paper, what it does and when to use it."""

import typer

from fastps.cli.commands import CHOOSE
from fastps.cli.options import Json, Wide, console_of, save_rows
from fastps.cli.tables import Column, Rows, show
from fastps.job.disciplines import DISCIPLINES
from fastps.job.specs import MODIFIERS

commands = typer.Typer()
ORDER = 50


@commands.command(rich_help_panel=CHOOSE, epilog="Examples:  fastps disciplines   |   fastps disciplines --json -")
def disciplines(wide: Wide = False, json_file: Json = None) -> None:
    """Show every synchronization discipline: its spec for --sync, its paper, what it does, and when to use it."""
    told = ("paper", "does", "use", "staleness")
    rows = [
        {"kind": "discipline", "spec": row.usage, **{name: getattr(row, name) for name in told}} for row in DISCIPLINES.values()
    ]
    modifiers = [{"kind": "modifier", "option": f"{name}={usage}"} for name, usage in MODIFIERS.items()]
    console = console_of(json_file)
    columns = [Column("spec"), *(Column(heading, left=True) for heading in ("what it does", "when to use it"))]
    columns += [Column(heading, wide=True, left=True) for heading in ("staleness", "paper")]
    cells = [(row["spec"], row["does"], row["use"], row["staleness"], row["paper"]) for row in rows]
    show(console, Rows("disciplines", columns, cells), wide=wide)
    options = [(row["option"],) for row in modifiers]
    show(console, Rows("options of every spec, as in backup:1,pull=0.75", [Column("option")], options), wide=wide)
    save_rows("disciplines", [*rows, *modifiers], json_file)
