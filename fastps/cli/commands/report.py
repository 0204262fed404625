"""The command that makes a page about a recorded run: report."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fastps.cli.commands import WATCH
from fastps.cli.options import Bar, Json, checked_page, console_of
from fastps.errors import UsageError

commands = typer.Typer()
ORDER = 31


@commands.command(
    rich_help_panel=WATCH,
    epilog="Examples:  fastps train --sync ssp:3 --straggler 1:3 --trace run.trace && fastps report run.trace   |"
    "   fastps report run.trace -o report.html --result run.json   |   fastps report run.node*.trace -o report.html",
)
def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="A trace that --trace, or fastps.trace in a script, has recorded; or one of each node."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT.html", callback=checked_page, help="The page. Default: the trace's name with .html."
        ),
    ] = None,
    result: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="What fastps train --json wrote of this run, for its accuracy.")
    ] = None,
    json_file: Json = None,
    progress: Bar = True,
) -> None:
    """Write one HTML page about a recorded run: what went wrong in plain sentences, and plots to look into.

    The page opens in any browser without a network.
    """
    from dataclasses import asdict

    from fastps.cli.trace_report import bar
    from fastps.report import page, run
    from fastps.report.findings import NOTE
    from fastps.system.json_report import write_json
    from fastps.tracing.merging import merge_nodes
    from fastps.tracing.parts import load

    page.check_installed()
    read = [(file, load(file)) for file in files]
    found = merge_nodes(read) if len(read) > 1 else read[0][1]
    row = run.result_of(_rows_of(result), found.header["sync"]) if result is not None else None
    console = console_of(json_file)
    with bar(console, progress and console.is_terminal) as tick:
        made = run.page_of(found, files[0].name, row, tick)
    target = output or files[0].with_suffix(".html")
    page.write(made, target)
    for finding in made.findings:
        if finding.level != NOTE:
            console.print(f"{finding.level}: {finding.title}", markup=False, highlight=False)
    console.print(f"{target}: {target.stat().st_size / 1e6:.1f} MB; open it in a browser", markup=False, highlight=False)
    if json_file is not None:
        write_json("report", [asdict(finding) for finding in made.findings], json_file)


def _rows_of(file: Path) -> list[dict[str, object]]:
    """The rows of a JSON report of another command."""
    try:
        rows = json.loads(file.read_text())["rows"]
        if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
            raise ValueError("no rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--result {file}: expected what fastps train --json wrote, found another file ({error})") from None
    return rows
