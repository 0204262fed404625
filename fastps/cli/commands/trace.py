"""The commands about recorded runs: trace, replay, advise, report."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastps.cli import trace_report
from fastps.cli.commands import CHOOSE, WATCH
from fastps.cli.options import ON_LINKS, Bar, Json, Links, Wide, check_beside, checked_page, console_of, save_rows, with_options
from fastps.cli.tables import say, show
from fastps.errors import UsageError
from fastps.job.specs import parse_policies

if TYPE_CHECKING:
    from fastps.tracing.file import Trace

commands = typer.Typer()
ORDER = 30
Row = dict[str, Any]
Profiles = Annotated[
    list[Path],
    typer.Option(
        "--with",
        metavar="TORCH.json",
        help="Add what torch.profiler exported in a worker of this run, on the same clock, to --perfetto; may be repeated.",
    ),
]
Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help="A trace that --trace, or fastps.trace in a script, has recorded; or one of each node."
    ),
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace that --trace, or fastps.trace in a script, has recorded.")]


def _trace_of(files: list[Path], *, merges: bool = False) -> "Trace":
    """The trace of one file, or that of several nodes. `merges`: one node's is moved to node 0's clock, too."""
    from fastps.tracing.merging import merge_nodes
    from fastps.tracing.parts import load

    read = [(file, load(file)) for file in files]
    return merge_nodes(read) if len(read) > 1 or merges else read[0][1]


def _check_targets(files: list[Path], *targets: Path | str | None) -> None:
    """Raise UsageError for a file to write that is one of those that are read."""
    for target in targets:
        if target is not None and Path(target).resolve() in [file.resolve() for file in files]:
            raise UsageError(f"{target}: expected another file to write than the trace, found the trace itself")


@commands.command(
    rich_help_panel=WATCH,
    epilog="Examples:  fastps train --trace run.trace && fastps trace run.trace --check   |   fastps trace run.trace"
    " --perfetto run.json   |   fastps trace run.trace --perfetto all.json --with torch.json"
    "   |   fastps trace run.node*.trace -o all.trace --perfetto all.json",
)
def trace(
    files: Files,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="Merge the traces of the nodes of one job into this file, on node 0's clock."
        ),
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Show a row a worker; the default.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check the push log: each push folded once, versions in order; exit code 1 if not.")
    ] = False,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Write Chrome trace events, for ui.perfetto.dev.")
    ] = None,
    profiles: Profiles = [],  # noqa: B006 - typer copies it
    wide: Wide = False,
    json_file: Json = None,
) -> None:
    """Look into a recorded run: where its time went, whether its push log is right, or all of it in Perfetto.

    Several files are those of the nodes of one job, which are merged on node 0's clock.
    """
    from fastps.tracing import check as trace_check
    from fastps.tracing import summary as trace_summary
    from fastps.tracing.file import write
    from fastps.tracing.merging import nodes_of

    if profiles and perfetto is None:
        raise UsageError("--with adds to the file of --perfetto: expected --perfetto OUT.json beside it")
    _check_targets(files, output, perfetto, json_file)
    found = _trace_of(files, merges=output is not None)
    console = console_of(json_file)
    rows: list[Row] = [{"kind": "node", **asdict(node)} for node in nodes_of(found)]
    say(console, *trace_report.node_lines(nodes_of(found)))
    if output is not None:
        write(found, output)
    if summary or not (check or perfetto or output):
        workers, whole = trace_summary.worker_rows(found), trace_summary.summary_row(found)
        show(console, trace_report.worker_table(workers, "mean ms of a step"), wide=wide)
        say(console, trace_report.summary_line(whole))
        rows += [{"kind": "run", **whole}, *({"kind": "worker", **row} for row in workers)]
    if perfetto is not None:
        rows.append(_save_perfetto(found, perfetto, profiles, console))
    violations: list[trace_check.Violation] = []
    if check:
        violations, log = trace_check.check(found), trace_check.push_log_row(found)
        say(console, *trace_report.check_lines(violations, log))
        rows.append({"kind": "check", "ok": not violations, **log})
        rows += [{"kind": "violation", **asdict(violation)} for violation in violations]
    save_rows("trace", rows, json_file)
    if violations:
        raise typer.Exit(1)


@commands.command(
    rich_help_panel=WATCH,
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  fastps run -n 4 --sync asp --trace run.trace train.py --epochs 3 && fastps replay run.trace train.py"
    " --epochs 3   |   fastps replay --until 500 --checkpoint DIR run.trace train.py   |   fastps replay --find-nonfinite"
    " run.trace train.py",
)
def replay(
    file: File,
    arguments: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script of that run, with the same arguments.")
    ],
    until: Annotated[
        int | None,
        typer.Option(metavar="VERSION", min=0, help="Stop at the last version that each shard published up to this one."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the last weights into this folder.")] = None,
    find_nonfinite: Annotated[
        bool, typer.Option("--find-nonfinite", help="Stop at the first push or update that is not finite, and name it.")
    ] = False,
    without: Annotated[
        list[str],
        typer.Option(
            metavar="W[:STEP]", help="Leave out a worker's push of a step, or all of its pushes. May be given several times."
        ),
    ] = [],  # noqa: B006
    fresh: Annotated[
        list[str], typer.Option(metavar="W:STEP", help="Compute this push with the newest weights. May be given several times.")
    ] = [],  # noqa: B006
    pause: Annotated[
        str, typer.Option(metavar="W:STEP", help="Run this step of a worker under pdb, from the end of the step before.")
    ] = "",
    json_file: Json = None,
    progress: Bar = True,
) -> None:
    """Play a recorded run again: same reads, same order of updates, same weights; name the first step that differs."""
    from fastps.lab.virtual import replay as replaying
    from fastps.lab.virtual.counterfactual import counterfactual_of
    from fastps.lab.virtual.recorded import recorded_of
    from fastps.lab.virtual.script import command_of
    from fastps.tracing.parts import load

    _check_targets([file], json_file)
    command = command_of(arguments, "replay")
    if pause and not sys.stdin.isatty():
        raise UsageError("--pause: expected a terminal, at which pdb asks, found none")
    run = counterfactual_of(recorded_of(load(file), file), without, fresh, pause)
    console = console_of(json_file)
    with trace_report.bar(console, progress and console.is_terminal and not pause, "replaying") as tick:
        row = replaying.replay(
            run, command, tick, until=until, checkpoint=checkpoint, find_nonfinite=find_nonfinite, silent=json_file is not None
        )
    say(console, trace_report.replay_line(row, file, finds=find_nonfinite))
    save_rows("replay", [row], json_file)


def _save_perfetto(found: "Trace", perfetto: Path, profiles: list[Path], console: Console) -> Row:
    from fastps.tracing.perfetto import save
    from fastps.tracing.torch_profile import profile_of

    added = [profile_of(file, found) for file in profiles]
    count = save(found, perfetto, added)
    say(console, *(profile.line for profile in added), f"{count:,} events in {perfetto}: open it at ui.perfetto.dev")
    return {"kind": "perfetto", "file": str(perfetto), "events": count}


@commands.command(
    rich_help_panel=CHOOSE,
    epilog="Examples:  fastps train --sync bsp --straggler 0:3 --trace run.trace && fastps advise run.trace   |   fastps advise"
    " run.trace --sync ssp:3,dssp:3,15 --cores 8 --json -   |   fastps advise run.node0.trace run.node1.trace"
    " --links links.json --nodes 64   |   fastps advise run.trace --train 'train.py --epochs 3'",
)
@with_options(ON_LINKS)
def advise(
    context: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="A trace that --trace has recorded; with --links, one for each recorded node."),
    ],
    sync: Annotated[
        str | None, typer.Option(help="Compare these specs, separated by commas; default: every discipline, over a range.")
    ] = None,
    cores: Annotated[
        float,
        typer.Option(
            metavar="C", help="Cores that the workers share; 0: those that the recorded run had, others' use left out."
        ),
    ] = 0.0,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="SCRIPT ARGS",
            help="Run the recorded script, with its arguments (in quotes), in virtual time, too, and add what it learns in"
            " equal time under the fastest of each discipline, or under each of --sync.",
        ),
    ] = None,
    links: Links = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="With --links: predict so many nodes.")] = 2,
    wide: Wide = False,
    json_file: Json = None,
    progress: Bar = True,
    **given: Any,
) -> None:
    """Play a recorded run's steps under other disciplines in virtual time, rank them, and recommend one.

    With --links, predict a run of many nodes from the traces of a few and the links between them.
    """
    if links is None and len(files) != 1:
        raise UsageError(f"expected one trace, or --links with one trace for each node, found {len(files)} traces")
    if links is None:
        check_beside(context, "--links", "nodes", "link_dtype")
    elif train is not None:
        raise UsageError("--train: expected the trace of one node, found --links beside it")

    _check_targets(files, json_file)
    specs = [policy.spec for policy in parse_policies(sync)] if sync is not None else None
    console = console_of(json_file)
    predict, self_test, title = _of_run(files[0], cores) if links is None else _of_nodes(context)
    with trace_report.bar(console, progress and console.is_terminal) as tick:
        rows = predict(specs, tick=tick)
    if train is not None:
        from fastps.lab.virtual.learning import add_losses
        from fastps.tracing.parts import load

        with trace_report.bar(console, progress and console.is_terminal, "training") as tick:
            rows = add_losses(rows, load(files[0]), train, cores=cores, all_rows=specs is not None, tick=tick)
    test = self_test()
    show(console, trace_report.advice_table(rows, title), wide=wide)
    say(console, *trace_report.advice_lines(rows, test))
    predictions = [{"kind": "prediction", **row} for row in rows]
    save_rows("advise", predictions + ([{"kind": "self-test", **test}] if test else []), json_file)


Advice = tuple[Callable[..., list[Row]], Callable[[], Row | None], str]
"""What predicts a list of specs; what predicts the recorded run; and the title of the predictions."""


def _of_run(file: Path, cores: float) -> Advice:
    from fastps.advice.advise import advise, self_test
    from fastps.advice.replay import cores_left
    from fastps.tracing.parts import load

    found = load(file)
    left, there = cores or cores_left(found), found.header["machine"]["cores"]
    title = f"predicted for {found.workers} workers on {left:.2f} cores"
    if not cores and left < 0.8 * there:
        title += f", because other programs used the rest of {there:g}; --cores {there:g} predicts a machine without them"
    return partial(advise, found, cores=cores), partial(self_test, found, cores), title


def _of_nodes(context: typer.Context) -> Advice:
    from fastps.lab.measuring.advised_nodes import advise_nodes, model_of, self_test
    from fastps.lab.measuring.simulated_links import read_links
    from fastps.tracing.parts import load

    given = context.params
    if given["cores"]:
        raise UsageError("--cores: a node keeps the cores that the recorded run had: expected no --links beside it")
    traces, links = [load(file) for file in given["files"]], read_links(given["links"])
    model = model_of(traces, given["nodes"], given["link_dtype"])
    title = f"predicted for {model.nodes} nodes on {len(links.edges)} measured links; steps are those of nodes"
    return partial(advise_nodes, traces, links, model), partial(self_test, traces, links, model), title


@commands.command(
    rich_help_panel=WATCH,
    epilog="Examples:  fastps train --sync ssp:3 --straggler 1:3 --trace run.trace && fastps report run.trace   |"
    "   fastps report run.trace -o report.html --result run.json   |   fastps report run.node*.trace -o report.html",
)
def report(
    files: Files,
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
    from fastps.report import page, run
    from fastps.report.findings import NOTE

    target = output or files[0].with_suffix(".html")
    _check_targets(files, target, json_file)
    found = _trace_of(files)
    page.check_installed()
    row = run.result_of(_rows_of(result), found.header["sync"]) if result is not None else None
    console = console_of(json_file)
    with trace_report.bar(console, progress and console.is_terminal) as tick:
        made = run.page_of(found, files[0].name, row, tick)
    page.write(made, target)
    say(console, *(f"{finding.level}: {finding.title}" for finding in made.findings if finding.level != NOTE))
    say(console, f"{target}: {target.stat().st_size / 1e6:.1f} MB; open it in a browser")
    save_rows("report", [asdict(finding) for finding in made.findings], json_file)


def _rows_of(file: Path) -> list[dict[str, object]]:
    try:
        rows = json.loads(file.read_text())["rows"]
        if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
            raise ValueError("no rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--result {file}: expected what fastps train --json wrote, found another file ({error})") from None
    return rows
