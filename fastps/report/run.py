"""The page about one recorded run: what ran, what a reader should know, and the plots."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastps.advice.advise import advise
from fastps.errors import Error, UsageError
from fastps.report import plots
from fastps.report.figure import Table, listed, number_text, paired, seconds_text
from fastps.report.findings import GOOD, NOTE, Facts, Finding, facts_of, findings_of
from fastps.report.page import Fact, Page, Part
from fastps.report.timeline import timeline
from fastps.tracing.check import push_log_row
from fastps.tracing.file import MESSAGES, Trace, TraceError
from fastps.tracing.merging import nodes_of
from fastps.version import __version__

Row = Mapping[str, Any]


def page_of(trace: Trace, name: str, result: Row | None = None, tick: Callable[[int, int], None] | None = None) -> Page:
    """Return the page about a trace. Raises TraceError for a trace without steps.

    `name` is that of its file. `result` is the row that `fastps train --json` wrote of this run, for its accuracy. `tick` is
    called after each discipline that is replayed.
    """
    if not len(trace.steps):
        raise TraceError(f"expected a trace with steps, found none in {name}: record until a worker has made a step")
    advice, why_not = _advice(trace, tick)
    facts = facts_of(trace, advice)
    findings = findings_of(facts)
    header = trace.header
    workers = f"{trace.workers} worker{'s' if trace.workers > 1 else ''}"
    heading = f"{header['sync']}, {workers}, {seconds_text(facts.seconds)}"
    machine = header["machine"]
    what = [
        name,
        f"job {header.get('job', 'unknown')}",
        f"fastps {header.get('version', 'unknown')}",
        *([f"Python {machine['python']}"] if "python" in machine else []),
        f"{machine.get('cpu', 'CPU')}, {machine['cores']:g} cores",
        *([f"Linux {machine['kernel']}"] if "kernel" in machine else []),
    ]
    tables: list[Part] = [_workers(facts), *_nodes(trace), _log(trace, why_not)]
    made = f"Made by fastps {__version__} from {name}. This file holds all that it shows, and loads nothing."
    drawn = [plots.time_of_workers(facts), plots.waits(facts), plots.steps(facts), plots.store(facts)]
    drawn += [plots.staleness(facts), plots.staleness_by_worker(facts), plots.gaps(facts), plots.disciplines(facts)]
    figures = paired([timeline(facts, findings), *(each for each in drawn if each is not None)])
    first, notes = _parted(findings)
    numbers = _facts(facts, result)
    return Page(
        f"{heading}: fastps report", heading, " · ".join(what), numbers, first, figures, tables=tables, made=made, notes=notes
    )


def _parted(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """What a reader should see first, and what is worth knowing. If nothing is wrong, what would speed it up is first, too."""
    is_fine = findings[0].level == GOOD
    first = [each for each in findings if each.level != NOTE or (is_fine and each.kind in ("advice", "limit"))]
    return first, [each for each in findings if each not in first]


def _advice(trace: Trace, tick: Callable[[int, int], None] | None) -> tuple[list[dict[str, Any]], str]:
    if trace.workers == 1:
        return [], "One worker waits for no other, so no other discipline was replayed."
    try:
        return advise(trace, tick=tick), ""
    except Error as error:
        return [], f"No other discipline was replayed: {error}."


def _facts(facts: Facts, result: Row | None) -> list[Fact]:
    run, header = facts.run, facts.trace.header
    losses = [note["loss"] for note in facts.trace.notes if note.get("loss") is not None]
    made = [Fact("duration", seconds_text(facts.seconds))]
    made.append(Fact("steps", f"{run['steps']:,}", f"{number_text(run['steps'] / max(1e-9, facts.seconds))}/s"))
    if result is not None:
        accuracy = result["test_accuracy"]
        made.append(Fact("test accuracy", "unknown" if accuracy is None or np.isnan(accuracy) else f"{accuracy:.1%}"))
    if losses:
        made.append(Fact("loss", f"{float(np.mean(losses)):.3g}", "workers' last"))
    made.append(Fact("staleness", f"{run['staleness_mean']:.2f}", f"at most {run['staleness_max']}"))
    made.append(Fact("waiting", f"{run['wait_share']:.0%}", "of the time"))
    made.append(Fact("dropped", f"{run['dropped']:,}", "pushes"))
    if "rows_per_step" in run:
        made.append(Fact("rows of tables", number_text(run["rows_per_step"]), "a step"))
    if "parameters" in header:
        made.append(Fact("parameters", f"{header['parameters']:,}"))
    return made


def _workers(facts: Facts) -> Part:
    headings = ["worker", "steps", "compute", "median", "95%", "on a core", "no core", "blocked", "store"]
    headings += ["waiting", "staleness", "at most", "dropped", "ended"]
    names = ("compute_ms_mean", "compute_ms_median", "compute_ms_p95", "cpu_ms_mean", "queue_ms_mean", "blocked_ms_mean")
    rows = []
    for row, ending in zip(facts.workers, facts.endings, strict=True):
        times = ["unknown" if row[name] is None else f"{row[name]:.2f}" for name in (*names, "store_cpu_ms_mean")]
        end = [f"{row['wait_share']:.1%}", f"{row['staleness_mean']:.2f}", str(row["staleness_max"]), str(row["dropped"])]
        how = f"{ending.kind} ({ending.how})" if ending.how else ending.kind
        rows.append([str(row["worker"]), f"{row['steps']:,}", *times, *end, how])
    return Part(
        "workers", "Workers", ["Means of one step, in milliseconds; shares are of the worker's time."], Table(headings, rows)
    )


def _nodes(trace: Trace) -> list[Part]:
    nodes = nodes_of(trace)
    if len(nodes) < 2:
        return []
    rows = []
    for node in nodes:
        workers = listed([str(node.first_worker + number) for number in range(node.workers)])
        clock = ["0", "0"] if node.node == 0 else [f"{node.offset_ns / 1e6:+.3f}", f"{node.error_ns / 1e6:.3f}"]
        rows.append([f"node {node.node}", node.host, workers, *clock])
    sentence = "All times are on node 0's clock. The times of another node are wrong by at most its error."
    found = [Part("nodes", "Nodes", [sentence], Table(["node", "host", "workers", "moved by, ms", "error, ms"], rows))]
    return found + ([_messages(trace)] if len(trace.messages) else [])


def _messages(trace: Trace) -> Part:
    """How long the messages between nodes take, as one of the two nodes saw them."""
    rows = []
    for node, peer, kind in np.unique(trace.messages[["node", "peer", "kind"]]):
        is_of = (trace.messages["node"] == node) & (trace.messages["peer"] == peer) & (trace.messages["kind"] == kind)
        times = (trace.messages["end_ns"][is_of] - trace.messages["begin_ns"][is_of]) / 1e6
        shown = [f"{value:.3g} ms" for value in np.percentile(times, (5, 50, 95))]
        rows.append([f"node {node}", MESSAGES[int(kind)], f"node {peer}", f"{len(times):,}", *shown])
    sentence = "From the first byte to the last, or to the post of a push, as the node on the left saw them."
    return Part(
        "messages", "Messages between nodes", [sentence], Table(["node", "what", "peer", "number", "5%", "median", "95%"], rows)
    )


def _log(trace: Trace, why_not: str) -> Part:
    log = push_log_row(trace)
    counts = f"{log['pushes']:,} pushes: {log['folded']:,} folded, {log['dropped']:,} dropped, {log['undecided']:,} undecided."
    whole = (
        "The log is complete."
        if log["complete"]
        else "Not all workers recorded to their end, so the log may lack their last pushes."
    )
    sentences = [f"{counts} {whole}", *([why_not] if why_not else []), _bandwidth(trace)]
    return Part("log", "Push log and limits", [each for each in sentences if each])


def _bandwidth(trace: Trace) -> str:
    if not trace.header.get("model_bytes"):
        return ""
    megabytes = trace.header["model_bytes"] / 1e6
    return (
        f"The weights have {megabytes:.3g} MB, and each push as much. The trace does not know the memory's bandwidth:"
        " fastps bench kernels measures what a fold can reach on this machine."
    )


def result_of(rows: Sequence[Row], sync: str) -> Row:
    """Return the row of `fastps train --json` or `fastps compare --json` for a discipline. Raises UsageError if there is none.

    >>> result_of([{"sync": "bsp", "test_accuracy": 0.9}], "bsp")["test_accuracy"]
    0.9
    """
    for row in rows:
        if row.get("sync") == sync and "test_accuracy" in row:
            return row
    raise UsageError(f"expected the row of {sync} in what fastps train --json wrote, found {[row.get('sync') for row in rows]}")
