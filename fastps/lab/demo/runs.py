"""Training runs from the outside: launch the workers, show progress, merge their measurements into one row, compare rows."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from sys import executable

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fastps.errors import Error
from fastps.job.policy import Policy
from fastps.lab.demo.data import Dataset
from fastps.lab.demo.metrics import Row, staleness_row
from fastps.lab.demo.options import TrainingOptions
from fastps.processes.launcher import NO_OPTIONS, Launcher
from fastps.processes.options import JobOptions
from fastps.processes.outcome import Outcome, failure_panel
from fastps.simulation.simulate import zero_gap_share
from fastps.store.observer import Observer, WorkerStatistics, observe
from fastps.system.clock import SYSTEM_CLOCK
from fastps.telemetry.tensorboard import TICK_S, written


class RunFailedError(Error):
    """Not all workers of a run finished. The report has been shown; `exit_code` is for the command line."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("the run was interrupted" if outcome.ended_by else "the run failed")
        self.exit_code = outcome.exit_code


def train(
    options: TrainingOptions,
    data: Dataset,
    console: Console,
    *,
    job: JobOptions = NO_OPTIONS,
    progress: bool = True,
    trace: Path | None = None,
    tensorboard: Path | None = None,
) -> Row:
    """Run one training job on `data`, recorded into `trace` if given, with its figures in the folder `tensorboard` if given.

    Returns its row, with the cost of injected faults. Raises RunFailedError.
    """
    results, outcome = _run(options, data, console, job, progress, trace, tensorboard)
    replaced = sum(worker.restart > 0 for worker in outcome.workers)
    row = merged(options, results, outcome.began_ns if replaced else None)
    if job.restarts:
        row["restarts"] = replaced
    if outcome.faults is not None:
        row["chaos"] = outcome.faults
    return row


def results_of(options: TrainingOptions, data: Dataset, console: Console, *, progress: bool = True) -> list[Row]:
    """Run one training job on `data` and return each worker's measurements. Raises RunFailedError."""
    return _run(options, data, console, NO_OPTIONS, progress)[0]


def _run(
    options: TrainingOptions,
    data: Dataset,
    console: Console,
    job: JobOptions,
    progress: bool,
    trace: Path | None = None,
    tensorboard: Path | None = None,
) -> tuple[list[Row], Outcome]:
    """Return the measurements of each worker that finished, worker 0 first, and the job's outcome."""
    with tempfile.TemporaryDirectory(prefix="fastps-") as folder:
        file = Path(folder) / "options.json"
        options.save(file)
        data.save(file.parent)  # read once, here; the workers map it
        command = [executable, "-m", "fastps.lab.demo.worker_main", str(file)]
        imports = ["fastps.torch.optimizer", "fastps.lab.demo.data", "fastps.lab.demo.models", "fastps.lab.demo.prefetch"]
        launcher = Launcher(command, options.workers, options=job, imports=imports, trace=trace)
        with written(tensorboard, lambda: launcher.arena) as tick:
            if progress:
                outcome = _run_watched(launcher, options, len(data.train_labels), console, tick)
            else:
                outcome = launcher.run() if tick is None else launcher.run(tick, TICK_S)
        if outcome.exit_code:
            if outcome.first_failure is not None:
                console.print(failure_panel(outcome))
            raise RunFailedError(outcome)
        files = [Path(folder) / f"worker-{rank}.json" for rank in range(options.workers)]
        return [json.loads(file.read_text()) for file in files if file.is_file()], outcome


def _run_watched(
    launcher: Launcher, options: TrainingOptions, samples: int, console: Console, on_tick: Callable[[], None] | None
) -> Outcome:
    """Run the job, and show its workers, from the job's own counters, until it ends."""
    title = f"{options.sync}, {options.workers} workers, job {launcher.job}"
    observer: Observer | None = None
    began_ns = 0

    def tick() -> None:
        nonlocal observer, began_ns
        if on_tick is not None:
            on_tick()
        if observer is None:
            try:
                observer = observe(launcher.job, timeout_s=1e-9)
            except Error:
                return  # no arena yet
        rows = observer.statistics()
        if not began_ns and any(row.steps for row in rows):
            began_ns = SYSTEM_CLOCK.now_ns()
        seconds = (SYSTEM_CLOCK.now_ns() - began_ns) / 1e9 if began_ns else 0.0
        drawn = min(1.0, sum(row.samples for row in rows) / (options.epochs * samples))
        launcher.draw(partial(live.update, _workers_table(f"{title}: {drawn:.0%} of the samples", rows, seconds), refresh=True))

    with Live(console=console, auto_refresh=False, transient=True) as live:
        outcome = launcher.run(tick)
    if observer is not None:
        observer.close()
    return outcome


def _workers_table(title: str, rows: Sequence[WorkerStatistics], seconds: float) -> Table:
    """A line for each worker; `seconds` is the time since the first step."""
    table = Table(title=title)
    for heading in ("worker", "steps", "steps/s", "loss", "staleness", "waiting", "state"):
        table.add_column(heading, justify="right")
    for row in rows:
        speed = f"{row.steps / seconds:.1f}" if seconds > 0 else "-"
        cells = f"{row.loss:.3f}", f"{row.staleness_mean:.2f}", f"{row.wait_share:.0%}", row.state
        table.add_row(str(row.rank), str(row.steps), speed, *cells)
    return table


def merged(options: TrainingOptions, results: Sequence[Row], began_ns: int | None = None) -> Row:
    """Merge the workers' results into one row: seconds from the common start to the last end, steps of all workers.

    `began_ns` gives the start for runs with replacements, which begin late and count the steps of their predecessors.
    """
    if began_ns is None:
        began_ns = min(row["began_ns"] for row in results)
    seconds = (max(row["ended_ns"] for row in results) - began_ns) / 1e9
    total = {
        key: sum(row[key] for row in results) for key in ("steps", "samples", "wait_ns", "compute_ns", "folded", "dropped")
    }
    shards = results[0]["histograms"]
    return {
        "sync": options.sync,
        "chosen": results[0]["sync"],
        "workers": options.workers,
        "push_dtype": options.push_dtype,
        "seconds": seconds,
        "steps": total["steps"],
        "steps_per_s": total["steps"] / seconds,
        "samples_per_s": total["samples"] / seconds,
        "test_accuracy": results[0]["final_accuracy"],
        "staleness_mean": sum(row["staleness_sum"] for row in results) / max(1, total["folded"]),
        "staleness_max": max(row["staleness_max"] for row in results),
        "wait_share": total["wait_ns"] / max(1, total["wait_ns"] + total["compute_ns"]),
        "dropped": total["dropped"],
        "stale_blocks": sum(row["stale_blocks"] for row in results),
        "sigma_mean": sum(shard["average_staleness"] for shard in shards) / max(1, len(shards)),
        "staleness_of_shards": [staleness_row(shard["staleness"]) for shard in shards],
        "zero_gap_share": zero_gap_share(shards, seconds * options.workers / max(1, total["steps"])),
        "seed": options.seed,
        "accuracy_over_time": results[0]["accuracy_over_time"],
    }


def compare(
    policies: Sequence[Policy], options: TrainingOptions, data: Dataset, console: Console, *, progress: bool = True
) -> list[Row]:
    """Run the same training under each policy in sequence, with the same seed and data."""
    return [train(replace(options, sync=policy.spec), data, console, progress=progress) for policy in policies]
