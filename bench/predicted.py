"""Advice compared with live runs of every discipline: `python -m fastps.bench.predicted`.

Workers are forked and compute for real (tanh of many floats with NumPy, one thread each), so that they compete for the cores;
the straggler waits twice its processor time in each step. Disciplines alternate, `--repeats` times, and medians are shown.
"replayed" is a run's prediction from its own trace; "advised" is its prediction from the first trace, bsp's, on the cores that
other processes left to the run, because consecutive runs seldom have the same.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps.advice import replay
from fastps.advice.advise import advise, predicted, self_test
from fastps.bench.crew import Command, ForkedCrew
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.json_report import write_json
from fastps.tracing.check import check, push_log_row
from fastps.tracing.file import Trace, read

Row = dict[str, Any]
SPECS = ("bsp", "asp", "ssp:3", "dssp:3,15", "backup:1", "softsync:2", "r2sp:0.8")


@dataclass(frozen=True)
class Setting:
    """A run's settings: `straggler` is worker 0's factor; a step passes `times` times over `work` floats."""

    workers: int = 4
    straggler: float = 3.0
    seconds: float = 3.0
    work: int = 100_000
    times: int = 6
    parameters: int = 20_000


def live(spec: str, setting: Setting, crew: ForkedCrew, folder: Path) -> Trace:
    """Record one run of a discipline."""
    file = folder / "live.trace"
    file.unlink(missing_ok=True)
    crew.call((spec, asdict(setting), str(file), f"predicted-{SYSTEM_CLOCK.now_ns()}"))
    return read(file)


def member(rank: int) -> Command:
    """Return the function that answers a worker's commands: each is a recorded run."""

    def answer(command: Any) -> None:
        spec, values, file, job = command
        run_worker(rank, spec, Setting(**values), Path(file), job)

    return answer


def run_worker(rank: int, spec: str, setting: Setting, file: Path, job: str, clock: Clock = SYSTEM_CLOCK) -> None:
    """Compute and step until the time is over; worker 0 makes the store."""
    weights = {"w": np.zeros(setting.parameters, np.float32)}
    update = fastps.SGD(lr=0.01)
    policy = fastps.parse_policy(spec)
    values = np.random.default_rng(rank).standard_normal(setting.work, np.float32)
    out = np.empty_like(values)
    with fastps.trace(file), _store(rank, weights, update, policy, setting.workers, job) as store, store.attach(rank) as worker:
        worker.wait_for_start()
        end_ns = clock.now_ns() + int(setting.seconds * 1e9)
        while clock.now_ns() < end_ns:
            cpu_ns = clock.thread_cpu_ns()
            for _ in range(setting.times):
                np.tanh(values, out=out)
            worker.gradients["w"][:] = out[: setting.parameters]
            if rank == 0:
                clock.sleep_ns(int((setting.straggler - 1) * (clock.thread_cpu_ns() - cpu_ns)))
            worker.push(store.hypers, samples=16)
            worker.advance()
            worker.pull()


def _store(rank: int, weights: Any, update: Any, policy: fastps.Policy, workers: int, job: str) -> fastps.Store:
    from fastps.job.layout import Layout, place

    if rank == 0:
        return fastps.Store.create(weights, update, sync=policy, workers=workers, job=job)
    rows = [(name, array.shape, (1,), 0) for name, array in weights.items()]
    return fastps.Store.connect(job, Layout(place(rows, policy.shards), 1, update.rule, policy, workers), [update.hyper])


def compare(specs: Sequence[str], setting: Setting, repeats: int) -> list[Row]:
    """Return a row for each discipline: steps per second live, predicted from its own trace, and predicted from bsp's."""
    rates: dict[str, list[float]] = {spec: [] for spec in specs}
    own: dict[str, list[float]] = {spec: [] for spec in specs}
    useful: dict[str, list[float]] = {spec: [] for spec in specs}
    advised_rates: dict[str, list[float]] = {spec: [] for spec in specs}
    violations: dict[str, int] = dict.fromkeys(specs, 0)
    left: list[float] = []
    with tempfile.TemporaryDirectory(prefix="fastps-predicted-") as folder, ForkedCrew(setting.workers, member) as crew:
        source = live("bsp", setting, crew, Path(folder))
        advised = {row["sync"]: row for row in advise(source, list(specs))}
        for _ in range(repeats):
            for spec in specs:
                trace = live(spec, setting, crew, Path(folder))
                test = self_test(trace)
                rates[spec].append(test["measured"])
                own[spec].append(test["predicted"])
                cores = replay.cores_left(trace)
                simulation = replay.simulation_of(source, cores)
                advised_rates[spec].append(predicted(fastps.parse_policy(spec), simulation)["useful_steps_per_s"])
                left.append(cores)
                dropped = push_log_row(trace)["dropped"] / max(1, len(trace.pushes))
                useful[spec].append(test["measured"] * (1 - dropped))
                violations[spec] += len(check(trace))
    return [
        {
            "sync": spec,
            "live": statistics.median(rates[spec]),
            "live_useful": statistics.median(useful[spec]),
            "live_min": min(rates[spec]),
            "live_max": max(rates[spec]),
            "replayed": statistics.median(own[spec]),
            "replay_error": statistics.median(p / m - 1 for p, m in zip(own[spec], rates[spec], strict=True)),
            "advised": statistics.median(advised_rates[spec]),
            "advice_error": statistics.median(p / m - 1 for p, m in zip(advised_rates[spec], useful[spec], strict=True)),
            "recommended": advised[spec]["recommended"],
            "violations": violations[spec],
            "cores": statistics.median(left),
        }
        for spec in specs
    ]


def overhead(repeats: int, parameters: int, steps: int = 2000, clock: Clock = SYSTEM_CLOCK) -> tuple[float, float]:
    """Return the median us of an empty step of one worker without and with recording; the two alternate."""
    weights, update = {"w": np.zeros(parameters, np.float32)}, fastps.SGD(lr=0.01)
    found: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="fastps-predicted-") as folder:
        for turn in range(2 * repeats):
            records = turn % 2 == 1
            recording = fastps.trace(Path(folder) / f"{turn}.trace") if records else None
            with fastps.Store.create(weights, update) as store, store.attach(0) as worker:
                worker.step()
                began_ns = clock.now_ns()
                for _ in range(steps):
                    worker.step()
                found[records].append((clock.now_ns() - began_ns) / steps / 1e3)
            if recording is not None:
                recording.close()
    return statistics.median(found[0]), statistics.median(found[1])


def main() -> None:
    """Print a line for each discipline, and how far the recommended one is behind the best live one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sync", default=",".join(SPECS), help="disciplines, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--workers", "-n", type=int, default=4)
    parser.add_argument("--straggler", type=float, default=3.0, help="worker 0's factor")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    parser.add_argument("--overhead", action="store_true", help="only measure what recording costs a step")
    parser.add_argument("--parameters", type=float, default=1000, help="with --overhead: of the model")
    given = parser.parse_args()
    if given.overhead:
        without, recorded = overhead(given.repeats, int(given.parameters))
        print(f"a step of one worker that computes nothing: {without:.1f} us, recorded {recorded:.1f} us (of {given.repeats})")
        return
    setting = Setting(workers=given.workers, straggler=given.straggler, seconds=given.seconds)
    rows = compare([policy.spec for policy in fastps.parse_policies(given.sync)], setting, given.repeats)
    if given.json:
        write_json("bench predicted", rows, given.json)
    if given.json != "-":
        _show(rows)


def _show(rows: Sequence[Row]) -> None:
    print(f"{'sync':12} {'live':>8} {'replayed':>9} {'error':>7}  {'useful':>8} {'advised':>8} {'error':>7}")
    for row in rows:
        mark = "  <- recommended" if row["recommended"] else ""
        print(
            f"{row['sync']:12} {row['live']:8.1f} {row['replayed']:9.1f} {row['replay_error']:+7.1%}  {row['live_useful']:8.1f}"
            f" {row['advised']:8.1f} {row['advice_error']:+7.1%}{mark}"
        )
    chosen = next(row for row in rows if row["recommended"])
    best = max(rows, key=lambda row: row["live_useful"])
    behind = 1 - chosen["live_useful"] / best["live_useful"]
    print(
        f"steps/s, medians; {rows[0]['cores']:.2f} cores were left; the recommended {chosen['sync']} is {behind:.1%} behind"
        f" {best['sync']}, the best"
    )


if __name__ == "__main__":
    main()
