"""The commands about recorded runs: trace, advise."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastps.cli.commands import CHOOSE, WATCH
from fastps.cli.options import ON_LINKS, Bar, Json, Links, Wide, console_of, with_options
from fastps.errors import UsageError

if TYPE_CHECKING:
    from fastps.tracing.file import Trace

commands = typer.Typer()
ORDER = 30
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
    from dataclasses import asdict

    from fastps.cli import trace_report
    from fastps.cli.tables import show
    from fastps.system.json_report import write_json
    from fastps.tracing import check as trace_check
    from fastps.tracing import summary as trace_summary
    from fastps.tracing.file import write
    from fastps.tracing.merging import merge_nodes, nodes_of
    from fastps.tracing.parts import load

    if profiles and perfetto is None:
        raise UsageError("--with adds to the file of --perfetto: expected --perfetto OUT.json beside it")
    read = [(file, load(file)) for file in files]
    found = merge_nodes(read) if len(read) > 1 or output is not None else read[0][1]
    console = console_of(json_file)
    rows: list[dict[str, Any]] = [{"kind": "node", **asdict(node)} for node in nodes_of(found)]
    for line in trace_report.node_lines(nodes_of(found)):
        console.print(line, markup=False, highlight=False)
    if output is not None:
        write(found, output)
    if summary or not (check or perfetto or output):
        workers, whole = trace_summary.worker_rows(found), trace_summary.summary_row(found)
        show(console, trace_report.worker_table(workers, "mean ms of a step"), wide=wide)
        console.print(trace_report.summary_line(whole), markup=False, highlight=False)
        rows += [{"kind": "run", **whole}, *({"kind": "worker", **row} for row in workers)]
    if perfetto is not None:
        rows.append(_save_perfetto(found, perfetto, profiles, console))
    violations: list[trace_check.Violation] = []
    if check:
        violations, log = trace_check.check(found), trace_check.push_log_row(found)
        for line in trace_report.check_lines(violations, log):
            console.print(line, markup=False, highlight=False)
        rows.append({"kind": "check", "ok": not violations, **log})
        rows += [{"kind": "violation", **asdict(violation)} for violation in violations]
    if json_file is not None:
        write_json("trace", rows, json_file)
    if violations:
        raise typer.Exit(1)


def _save_perfetto(found: "Trace", perfetto: Path, profiles: list[Path], console: Console) -> dict[str, Any]:
    """Write the events of a trace and of torch's profiles. Returns a row about them."""
    from fastps.tracing.perfetto import save
    from fastps.tracing.torch_profile import profile_of

    added = [profile_of(file, found) for file in profiles]
    count = save(found, perfetto, added)
    for profile in added:
        console.print(profile.line, markup=False, highlight=False)
    console.print(f"{count:,} events in {perfetto}: open it at ui.perfetto.dev", markup=False, highlight=False)
    return {"kind": "perfetto", "file": str(perfetto), "events": count}


@commands.command(
    rich_help_panel=CHOOSE,
    epilog="Examples:  fastps train --sync bsp --straggler 0:3 --trace run.trace && fastps advise run.trace   |   fastps advise"
    " run.trace --sync ssp:3,dssp:3,15 --cores 8 --json -   |   fastps advise run.node0.trace run.node1.trace"
    " --links links.json --nodes 64",
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
    if links is not None:
        _advise_nodes(context)
        return
    if len(files) != 1:
        raise UsageError(f"expected one trace, or --links with one trace for each node, found {len(files)} traces")
    from fastps.advice import advise as advice
    from fastps.advice.replay import cores_left
    from fastps.cli import trace_report
    from fastps.cli.tables import show
    from fastps.job.specs import parse_policies
    from fastps.system.json_report import write_json
    from fastps.tracing.parts import load

    found = load(files[0])
    specs = [policy.spec for policy in parse_policies(sync)] if sync is not None else None
    console = console_of(json_file)
    with trace_report.bar(console, progress and console.is_terminal) as tick:
        rows = advice.advise(found, specs, cores=cores, tick=tick)
    test = advice.self_test(found, cores)
    title = f"predicted for {found.workers} workers on {cores or cores_left(found):.2f} cores"
    show(console, trace_report.advice_table(rows, title), wide=wide)
    for line in trace_report.advice_lines(rows, test):
        console.print(line, markup=False, highlight=False)
    if json_file is not None:
        write_json("advise", [*({"kind": "prediction", **row} for row in rows), {"kind": "self-test", **test}], json_file)


def _advise_nodes(context: typer.Context) -> None:
    """Predict every discipline on many nodes, from the traces of a few and measured links."""
    from fastps.advice.nodes import advise_nodes, model_of, self_test
    from fastps.cli import trace_report
    from fastps.cli.tables import show
    from fastps.job.specs import parse_policies
    from fastps.simulation.links import read_links
    from fastps.system.json_report import write_json
    from fastps.tracing.parts import load

    given = context.params
    if given["cores"]:
        raise UsageError("--cores: a node keeps the cores that the recorded run had: expected no --links beside it")
    traces, links = [load(file) for file in given["files"]], read_links(given["links"])
    model = model_of(traces, given["nodes"], given["link_dtype"], given["homes"])
    specs = [policy.spec for policy in parse_policies(given["sync"])] if given["sync"] is not None else None
    console = console_of(given["json_file"])
    with trace_report.bar(console, given["progress"] and console.is_terminal) as tick:
        rows = advise_nodes(traces, links, model, specs, tick=tick)
    test = self_test(traces, links, model)
    title = f"predicted for {model.nodes} nodes on {len(links.edges)} measured links; steps are those of nodes"
    show(console, trace_report.advice_table(rows, title), wide=given["wide"])
    for line in trace_report.advice_lines(rows, test):
        console.print(line, markup=False, highlight=False)
    if given["json_file"] is not None:
        report = [{"kind": "prediction", **row} for row in rows]
        write_json("advise", report + ([{"kind": "self-test", **test}] if test else []), given["json_file"])
