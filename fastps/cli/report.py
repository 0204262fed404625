"""Tables and sentences of `fastps train`, `compare`, `stragglers`, `reproduce`, `doctor` and injected faults."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastps.cli.tables import Column, Rows
from fastps.lab.demo.repeats import text_of
from fastps.lab.stragglers import Arrival, Split

if TYPE_CHECKING:
    from fastps.lab.measuring.doctor import Finding
    from fastps.lab.measuring.links import MeasuredLink
    from fastps.lab.measuring.trial import Trial
    from fastps.lab.papers import row as paper

Row = dict[str, Any]


def _chosen(row: Row) -> Any:
    return row.get("chosen", row["sync"])


def _ranged(heading: str, name: str, form: str) -> Column:
    """A column whose cells have the least and the most of repeated runs beside the median."""
    return Column(heading, lambda row: text_of(row, name, form))


_TRAINING = (
    Column("sync", lambda row: row["sync"] if _chosen(row) == row["sync"] else f"{row['sync']} -> {_chosen(row)}"),
    Column("n", "workers", wide=True),
    _ranged("seconds", "seconds", ".2f"),
    Column("steps/s", "steps_per_s", ".1f"),
    Column("samples/s", "samples_per_s", ".0f", wide=True),
    _ranged("accuracy", "test_accuracy", ".1%"),
    Column("staleness", "staleness_mean", ".2f"),
    Column("max", "staleness_max", wide=True),
    Column("waiting", "wait_share", ".1%"),
    Column("dropped", wide=True),
)
_NOT_OF_A_SCRIPT = ("samples/s", "accuracy")


def training_table(rows: Sequence[Row], title: str, baseline: Row | None = None) -> Rows:
    """Make a table with one row per run; with a baseline, also the speed relative to it."""
    columns = [each for each in _TRAINING if "test_accuracy" in rows[0] or each.heading not in _NOT_OF_A_SCRIPT]
    if baseline is not None:
        columns.append(Column(f"speed / {baseline['sync']}", lambda row: text_of(row, "speed", ".2f")))
    return Rows.of(title, columns, rows)


def doctor_table(findings: "Sequence[Finding]", title: str) -> Rows:
    """Make a table with one row per finding; failures are marked."""
    mark = Column("", lambda row: "ok" if row["ok"] else "!!")
    columns = (mark, Column("what", "name", left=True), Column("found", "shown", left=True))
    return Rows.of(title, columns, map(vars, findings), [number for number, each in enumerate(findings) if not each.ok])


def trials_table(trials: "Sequence[Trial]") -> Rows:
    """Make a table with one row per number of workers."""
    columns = (
        Column("workers"),
        Column("steps/s", "steps_per_s", ".1f"),
        Column("of a core ms", "core_ms", ".1f"),
        Column("no core ms", "blocked_ms", ".1f"),
        Column("waiting", "wait_share", ".0%"),
        Column("MB", "memory_bytes", ",.0f", 1e6),
    )
    return Rows.of("the script's first steps under bsp", columns, map(vars, trials))


def links_table(links: "Sequence[MeasuredLink]") -> Rows:
    """Make a table with one row per link. Rates are of floats as a job sends them; MB are millions of bytes."""
    columns = (
        Column("node"),
        Column("machine", left=True),
        Column("address", left=True),
        Column("to node 0, MB/s", "up_bytes_s", ".1f", 1e6),
        Column("from node 0", "down_bytes_s", ".1f", 1e6),
        Column("both at once, each", "both_bytes_s", ".1f", 1e6),
        Column("all nodes at once", "together_bytes_s", ".1f", 1e6),
        Column("round trip, ms", "round_trip_ns", ".2f", 1e6),
        Column("95%", "round_trip_p95_ns", ".2f", 1e6),
        Column("100 kB, ms", "small_round_trip_ns", ".2f", 1e6),
    )
    return Rows.of("links to node 0", columns, [link.row() for link in links])


def straggler_rows(run: Row, arrivals: Sequence[Arrival], splits: Sequence[Split]) -> list[Row]:
    """The rows of the straggler report, told apart by "kind": the run, one a k, and one a split, the best first."""
    return [
        {"kind": "run", **run},
        *({"kind": "arrival", **asdict(row)} for row in arrivals),
        *({"kind": "split", "rank": rank, **asdict(split)} for rank, split in enumerate(splits, 1)),
    ]


def arrivals_table(arrivals: Sequence[Arrival]) -> Rows:
    """Make a table with one row per k: the arrival of a version's k-th gradient, in ms."""
    columns = (
        Column("k"),
        Column("versions", "count"),
        Column("mean ms", "mean_s", ".2f", 1e-3),
        Column("median", "median_s", ".2f", 1e-3),
        Column("80%", "p80_s", ".2f", 1e-3),
        Column("95%", "p95_s", ".2f", 1e-3),
        Column("99%", "p99_s", ".2f", 1e-3),
    )
    return Rows.of("time of the k-th gradient of a version", columns, map(vars, arrivals))


def splits_table(splits: Sequence[Split], known: str) -> Rows:
    """Make a row per split, the best first; times relative to the best. `known` says whence the iterations are."""
    columns = (
        Column("wait for N", "waited_for"),
        Column("backups b", "backups"),
        Column("mean ms", "iteration_s", ".2f", 1e-3),
        Column("iterations", lambda row: format(row["iterations"], ".3g" if row["iterations"] < 1000 else ",.0f")),
        Column("time / best", "time", ".3f", splits[0].time),
    )
    return Rows.of(f"estimated time to converge, {known}", columns, map(vars, splits))


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


def list_table(rows: "Sequence[paper.Row]") -> Rows:
    """Make a table with a line for each row of a paper: its id, the table or figure, and the paper's claim."""
    columns = [Column(heading, left=True) for heading in ("id", "source", "the paper says")]
    return Rows(f"{len(rows)} rows", columns, [(row.id, row.source, row.claim) for row in rows])


def verdict_table(verdicts: "Sequence[paper.Verdict]", effort: "paper.Effort") -> Rows:
    """Make a table with a line for each row: the paper's numbers, the measured ones, the tolerance, and the verdict."""
    from fastps.lab.papers.show import plain_cells, summary

    kind = "quick: fewer steps and seeds" if effort.quick else "in full"
    headings = ("row", "source", "the paper says", "expected", "we get", "tolerance", "ok")
    columns = [Column(heading, left=True) for heading in headings]
    failed = [number for number, verdict in enumerate(verdicts) if not (verdict.ok or verdict.skipped)]
    return Rows(f"reproduced {summary(verdicts)} ({kind})", columns, [plain_cells(verdict) for verdict in verdicts], failed)
