"""A live run with stale gradients is one process of plain torch that takes the pushes in the recorded order: the same losses.

The trace says with which version each gradient was computed and which version it became part of. Replayed in that order by
torch's own optimizer, every loss that a worker saw comes out again: to the bit where each push is a version of its own, and as
near as sums in another order allow where several are one. So what stale gradients do to a run, the scheme does, not the store.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.advice import replay
from fastps.advice.advise import predicted
from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from fastps.tracing.check import check
from fastps.tracing.file import FOLDED, Lines, read
from tests.support import processes
from tests.support.scripts import program
from tests.support.torch_optimizers import alone  # noqa: F401 - a fixture

WORKERS, STEPS, BATCH = 4, 60, 8
Batch = tuple[torch.Tensor, torch.Tensor]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(13, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))


def _sgd(model: torch.nn.Module, learning_rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.5)


def _batches(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1 + rank)
    truth = torch.randn(13, 3, generator=torch.Generator().manual_seed(99))
    inputs = [torch.randn(BATCH, 13, generator=generator) for _ in range(STEPS)]
    return [(rows, (rows @ truth).argmax(1)) for rows in inputs]


def _loss(model: torch.nn.Module, batch: Batch) -> float:
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return float(loss.detach())


def _work(sync: str, rank: int) -> list[float]:
    """One worker's losses."""
    model = _model()
    losses = []
    with fastps.DistributedOptimizer(_sgd(model), sync=sync, model=model) as optimizer:
        optimizer.wait_for_start()
        for batch in _batches(rank):
            losses.append(_loss(model, batch))
            optimizer.step()
    return losses


def _replay(pushes: Lines, learning_rate: float) -> dict[tuple[int, int], float]:
    """The loss of each (worker, step) when torch takes the pushes by itself; those of one version are a mean."""
    model = _model()
    parameters = list(model.parameters())
    optimizer = _sgd(model, learning_rate)
    versions = {0: [value.detach().clone() for value in parameters]}
    batches = [_batches(rank) for rank in range(WORKERS)]
    losses = {}
    for version in range(1, int(pushes["version"].max()) + 1):
        gradients = []
        for push in np.sort(pushes[pushes["version"] == version], order="worker"):
            rank, step = int(push["worker"]), int(push["step"])
            _set(parameters, versions[int(push["read_version"])])
            losses[rank, step] = _loss(model, batches[rank][step])
            gradients.append([value.grad.clone() for value in parameters if value.grad is not None])
        _set(parameters, versions[version - 1])
        for place, value in enumerate(parameters):
            value.grad = torch.stack([gradient[place] for gradient in gradients]).sum(0) / len(gradients)
        optimizer.step()
        versions[version] = [value.detach().clone() for value in parameters]
    return losses


def _set(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


@pytest.fixture
def recorded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of real processes: each worker's losses, and what became of each push."""
    sync = request.param
    monkeypatch.setenv("FASTPS_TRACE", str(tmp_path / "run.trace"))
    losses = processes.results(processes.start_job(lambda rank: _work(sync, rank), WORKERS), 60)
    trace = read(tmp_path / "run.trace")
    assert check(trace) == []
    return losses, trace.pushes[trace.pushes["fate"] == FOLDED]


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("recorded", ["asp", "r2sp", *map(_slow, ("ssp:1", "dssp:1,4", "asp,stagger=0.8"))], indirect=True)
def test_a_run_that_folds_each_push_is_replayed_by_plain_torch_to_the_bit(recorded: Any) -> None:
    live, pushes = recorded
    assert pushes["staleness"].max() > 0, "nothing was stale, so nothing was shown"
    assert len(pushes) == WORKERS * STEPS
    replayed = _replay(pushes, 0.05)
    assert {(rank, step): loss for rank, losses in enumerate(live) for step, loss in enumerate(losses)} == replayed


@pytest.mark.parametrize(("recorded", "learning_rate"), [
    ("backup:1", 0.05), ("softsync:2", 0.025), _slow("bsp", 0.05), _slow("softsync:1", 0.05),
], indirect=["recorded"])  # fmt: skip
def test_a_run_that_folds_means_is_replayed_by_plain_torch_but_for_rounding(recorded: Any, learning_rate: float) -> None:
    live, pushes = recorded
    replayed = _replay(pushes, learning_rate)
    assert len(replayed) > WORKERS * STEPS / 2
    for (rank, step), loss in replayed.items():
        assert live[rank][step] == pytest.approx(loss, rel=1e-4, abs=1e-6), (rank, step)


SLEEPER = """
import sys, time, torch, fastps
steps, least_s = int(sys.argv[1]), float(sys.argv[2])
draw = torch.Generator().manual_seed(fastps.rank())
model = torch.nn.Linear(4, 1)
with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01)) as opt:
    opt.wait_for_start()
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(8, 4, generator=draw)).sum().backward()
        time.sleep(least_s * (1 + 0.5 * float(torch.rand(1, generator=draw))) * (1 if fastps.rank() else 3))
        opt.step()
"""


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(("sync", "steps", "least_s"), [
    ("bsp", 150, 0.012), ("asp", 150, 0.012), ("ssp:3", 150, 0.012),
    ("dssp:3,15", 600, 0.006),  # the fast workers' lead grows for the first hundreds of steps, in which the run is faster
])  # fmt: skip
def test_a_live_run_is_as_fast_and_as_stale_as_its_steps_played_again(
    sync: str, steps: int, least_s: float, tmp_path: Path
) -> None:
    """Four workers that sleep in place of computing, one of them three times as long, while all are at work."""
    file = tmp_path / "run.trace"
    options = JobOptions(variables={"FASTPS_SYNC": sync, "FASTPS_TRACE": str(file)})
    assert Launcher([*program(tmp_path, SLEEPER), str(steps), str(least_s)], 4, options=options).run().exit_code == 0
    trace = read(file)
    steady = replay.steady_part(trace)
    cores = trace.header["machine"]["cores"]
    found = predicted(replay.policy_of(trace), replay.simulation_of(trace, cores))
    assert found["steps_per_s"] > 0.95 * steady.steps_per_s
    if replay.cores_left(trace) < 0.8 * cores:
        return  # on a busy machine steps wait for a core, too, for times that no record has: the live run is slower
    assert found["steps_per_s"] == pytest.approx(steady.steps_per_s, rel=0.05)
    decided_ns = trace.pushes["decided_ns"]
    stale = trace.pushes["staleness"][(decided_ns > steady.begin_ns) & (decided_ns <= steady.end_ns)].mean()
    assert found["staleness_mean"] == pytest.approx(stale, rel=0.1)
