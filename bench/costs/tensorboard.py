"""What `--tensorboard` costs a job of short steps: `python -m fastps.bench.costs.tensorboard`.

The same job runs with and without it, in turn: two workers whose steps each use about a millisecond of processor time. The
figures are medians of the ratios of neighbours, and the launcher's own processor time, which other programs change little. The
first line is the processor time of one point of a job in this process, the mean of many.
"""

import argparse
import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import fastps
from fastps.processes.launcher import Launcher
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.telemetry.tensorboard import TICK_S, written

_SCRIPT = """
import json, sys, time
from pathlib import Path
import torch, fastps
torch.set_num_threads(1)
model = torch.nn.Linear(64, 1)
opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), sync="asp")
inputs = torch.randn(16, 64)
opt.wait_for_start()
began, begun_cpu = time.monotonic(), time.process_time()
steps, step_s = 0, float(sys.argv[3])
while time.monotonic() - began < float(sys.argv[2]):
    until = time.thread_time() + step_s
    opt.zero_grad()
    loss = model(inputs).pow(2).mean()
    loss.backward()
    while time.thread_time() < until:
        pass
    opt.report_loss(loss.item(), 16)
    opt.step()
    steps += 1
rate, cpu_us = steps / (time.monotonic() - began), (time.process_time() - begun_cpu) / steps * 1e6
opt.close()
Path(sys.argv[1], f"{fastps.rank()}.json").write_text(json.dumps([rate, cpu_us]))
"""


@dataclass(frozen=True)
class Run:
    """One run: steps per second of all workers, processor time of a step in us, and the share of a core of the launcher."""

    steps_per_s: float
    step_cpu_us: float
    launcher_share: float


def run(folder: Path, is_written: bool, workers: int, seconds: float, step_ms: float) -> Run:
    """Run the job once."""
    script = folder / "job.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, str(script), str(folder), str(seconds), str(step_ms / 1e3)]
    launcher = Launcher(command, workers)
    with written(folder / "board" if is_written else None, lambda: launcher.arena) as tick:
        began_ns, begun_cpu_s = SYSTEM_CLOCK.now_ns(), _own_cpu_s()
        outcome = launcher.run() if tick is None else launcher.run(tick, TICK_S)
    share = (_own_cpu_s() - begun_cpu_s) * 1e9 / (SYSTEM_CLOCK.now_ns() - began_ns)
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]
    return Run(sum(rate for rate, _ in found), statistics.mean(cpu_us for _, cpu_us in found), share)


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def of_a_point(workers: int, points: int = 200) -> float:
    """Processor time of one point of a job of so many workers, in ms."""
    used_s = 0.0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastps-telemetry-")))
        weights = {"w": np.zeros(4, np.float32)}
        store = stack.enter_context(fastps.Store.create(weights, fastps.SGD(lr=0.1), sync="asp", workers=workers))
        worker = stack.enter_context(store.attach(0))
        tick = stack.enter_context(written(folder, lambda: store.job, _Hurrying()))
        assert tick is not None
        for _ in range(points):
            worker.step()
            began_s = time.process_time()
            tick()
            used_s += time.process_time() - began_s
    return used_s / points * 1e3


class _Hurrying(Clock):
    """A clock on which a minute passes between two looks, so that each tick writes a point."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        self._now_ns += 60_000_000_000
        return self._now_ns


def text_of(pairs: Sequence[tuple[Run, Run]]) -> list[str]:
    """Three lines: what runs with it did, against the run before without it."""

    def ratios(name: str) -> str:
        found = sorted(getattr(on, name) / getattr(off, name) - 1 for off, on in pairs)
        return f"{statistics.median(found):+.2%} ({found[0]:+.2%} to {found[-1]:+.2%})"

    off, on = (statistics.median(pair[side].launcher_share for pair in pairs) for side in (0, 1))
    cpu_us = statistics.median(pair[0].step_cpu_us for pair in pairs)
    return [
        f"processor time of a step, {cpu_us:.0f} us without: {ratios('step_cpu_us')} with --tensorboard",
        f"steps per second: {ratios('steps_per_s')}",
        f"the launcher's processor time: {off:.2%} of a core without, {on:.2%} with, medians of {len(pairs)} pairs",
    ]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--workers", "-n", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=1.0, help="processor time of a step")
    given = parser.parse_args()
    print(f"a point of a job of {given.workers} workers: {of_a_point(given.workers):.2f} ms of processor time", flush=True)
    pairs = []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory(prefix="fastps-telemetry-") as folder:
            off, on = (run(Path(folder), each, given.workers, given.seconds, given.step_ms) for each in (False, True))
        pairs.append((off, on))
    if pairs:
        print("\n".join(text_of(pairs)))


if __name__ == "__main__":
    main()
