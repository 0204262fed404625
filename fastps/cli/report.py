"""Tables and sentences of `fastps train`, `compare`, `stragglers`, `doctor` and injected faults."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastps.advice.stragglers import Arrival, Split
from fastps.cli.tables import Column, Rows

if TYPE_CHECKING:
    from fastps.diagnostics.finding import Finding

Row = dict[str, Any]


def training_table(rows: Sequence[Row], title: str, baseline: Row | None = None) -> Rows:
    """Make a table with one row per run; with a baseline, also the speed relative to it."""
    headings = ["sync", "n", "seconds", "steps/s", "samples/s", "accuracy", "staleness", "max", "waiting", "dropped"]
    headings += [f"speed / {baseline['sync']}"] if baseline is not None else []
    cells = []
    for row in rows:
        chosen = row.get("chosen", row["sync"])
        line = [
            row["sync"] if chosen == row["sync"] else f"{row['sync']} -> {chosen}",
            str(row["workers"]),
            f"{row['seconds']:.2f}",
            f"{row['steps_per_s']:.1f}",
            f"{row['samples_per_s']:.0f}",
            f"{row['test_accuracy']:.1%}",
            f"{row['staleness_mean']:.2f}",
            str(row["staleness_max"]),
            f"{row['wait_share']:.1%}",
            str(row["dropped"]),
        ]
        cells.append(line if baseline is None else [*line, f"{row['steps_per_s'] / baseline['steps_per_s']:.2f}x"])
    return Rows(title, [Column(heading, wide=heading in ("n", "samples/s", "max", "dropped")) for heading in headings], cells)


def doctor_table(findings: "Sequence[Finding]", title: str) -> Rows:
    """Make a table with one row per finding; failures are marked."""
    columns = [Column(""), Column("what", left=True), Column("found", left=True)]
    cells = [("ok" if finding.ok else "!!", finding.name, finding.shown) for finding in findings]
    return Rows(title, columns, cells, [number for number, finding in enumerate(findings) if not finding.ok])


def straggler_rows(run: Row, arrivals: Sequence[Arrival], splits: Sequence[Split]) -> list[Row]:
    """The rows of the straggler report, told apart by "kind": the run, one a k, and one a split, the best first."""
    return [
        {"kind": "run", **run},
        *({"kind": "arrival", **asdict(row)} for row in arrivals),
        *({"kind": "split", "rank": rank, **asdict(split)} for rank, split in enumerate(splits, 1)),
    ]


def arrivals_table(arrivals: Sequence[Arrival]) -> Rows:
    """Make a table with one row per k: the arrival of a version's k-th gradient, in ms."""
    cells = []
    for row in arrivals:
        times = (row.mean_s, row.median_s, row.p80_s, row.p95_s, row.p99_s)
        cells.append([str(row.k), str(row.count), *(f"{1e3 * time:.2f}" for time in times)])
    headings = ("k", "versions", "mean ms", "median", "80%", "95%", "99%")
    return Rows("time of the k-th gradient of a version", [Column(heading) for heading in headings], cells)


def splits_table(splits: Sequence[Split], known: str) -> Rows:
    """Make a table with one row per split of the workers, the best first; times relative to the best.

    `known` says whence the iterations are.
    """
    cells = []
    for row in splits:
        iterations = f"{row.iterations:.3g}" if row.iterations < 1000 else f"{row.iterations:,.0f}"
        counts = (str(row.waited_for), str(row.backups), f"{1e3 * row.iteration_s:.2f}", iterations)
        cells.append([*counts, f"{row.time / splits[0].time:.3f}"])
    headings = ("wait for N", "backups b", "mean ms", "iterations", "time / best")
    return Rows(f"estimated time to converge, {known}", [Column(heading) for heading in headings], cells)


def straggler_verdict(arrivals: Sequence[Arrival], splits: Sequence[Split], known: str) -> str:
    """Say in a sentence which split is best, or that there is no estimate."""
    if not splits:
        return f"no estimate: {known} say nothing about {', '.join(str(row.k) for row in arrivals)} gradients"
    best = splits[0]
    verdict = f"estimated to converge first: wait for {best.waited_for}, {best.backups} backups"
    verdict += f" (backup:{best.backups})" if best.backups else " (bsp)"
    cores = len(os.sched_getaffinity(0))
    if len(arrivals) > cores:
        verdict += f"; but {len(arrivals)} workers shared {cores} cores here, which makes the first gradients look early"
    return verdict


def faults_text(row: Mapping[str, Any]) -> str:
    """One sentence on what injected faults did; `row` is FaultReport's."""
    faults = row["faults"]
    return (
        f"{faults['kill']} workers killed and {faults['stop']} stopped in {row['seconds']:.0f} s: {row['updates']:,} updates,"
        f" {row['updates_per_live_worker_s']:.1f} a second and live worker; the slowest replacement took"
        f" {row['worst_recovery_s']:.2f} s"
    )
