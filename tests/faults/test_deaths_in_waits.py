"""A death in a wait is named within 0.1 s, in each public call that waits and under each way to grant."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.kernels.shm.arena import LANE_LIVE
from tests.support import processes
from tests.support.processes import wait_until

WEIGHTS = {"a": np.ones(12, np.float32), "b": np.ones(12, np.float32)}
ONES = {name: np.ones(12, np.float32) for name in WEIGHTS}
Other = Callable[[fastps.Worker], Any]


def idle(other: fastps.Worker) -> None:
    """Stay in the job without a step."""
    time.sleep(60)


def hold(other: fastps.Worker) -> None:
    """Keep the lock of the last shard."""
    while not other.lane.hold(other.store.arena.shards - 1):
        time.sleep(0.001)
    time.sleep(60)


def step_on(worker: fastps.Worker) -> None:
    """Step until the job waits."""
    for _ in range(1000):
        worker.step(ONES)


def push_on(worker: fastps.Worker) -> None:
    """Push until the ring is full."""
    for _ in range(1000):
        worker.step(ONES)
        worker.push(worker.store.hypers, null=True)
        worker.advance()


def wait_in_another_job(worker: fastps.Worker) -> None:
    """Wait for nothing in a job of this process alone."""
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=0.1), timeout_s=20) as store, store.attach(0) as alone:
        alone.wait_until(lambda: None, 1_000_000, lambda: "no death was found", combines=True, beside=[worker])


# The discipline, what the other does, and the call that waits for it.
WAITS: dict[str, tuple[str, Other, Callable[[fastps.Worker], Any]]] = {
    "a step of bsp": ("bsp", idle, step_on),
    "a step of bsp in two shards": ("bsp,shards=2", idle, step_on),
    "a step of ssp": ("ssp:2", idle, step_on),
    "a step of dssp": ("dssp:1,3", idle, step_on),
    "a step of r2sp": ("r2sp:0.8", idle, step_on),
    "a partial pull": ("psp:1,0.5,pull_timeout=10,shards=2", hold, step_on),
    "a step of asp, whose shard is locked": ("asp", hold, push_on),
    "the locks of all shards": ("asp", hold, lambda worker: worker.lock_shards()),
    "a wait in another job": ("bsp", idle, wait_in_another_job),
    "wait_for_others": ("asp", idle, lambda worker: worker.wait_for_others()),
    "wait_for_others of bsp": ("bsp", idle, lambda worker: worker.wait_for_others()),
}


def _seconds_until_known(victim: processes.Child, call: Callable[[], Any]) -> float:
    """How long after the victim's end the call ends by an error that names it."""
    killer, gone = processes.kill_later(victim, 0.15)
    with pytest.raises(fastps.WorkerDiedError, match="worker 1"):
        call()
    known = time.monotonic()
    killer.join()
    processes.finish([victim], 10)
    return known - gone[0]


@pytest.mark.parametrize("wait", WAITS)
def test_a_death_ends_every_wait_of_a_worker_within_100_ms(wait: str) -> None:
    sync, does, call = WAITS[wait]
    taken_s: list[float] = []
    while not taken_s or (min(taken_s) >= 0.1 and len(taken_s) < 4):  # a busy machine may be late, not always
        with fastps.Store.create(WEIGHTS, fastps.SGD(lr=0.1), sync=sync, workers=2, timeout_s=20) as store:
            victim = processes.start(lambda: does(store.attach(1)))
            wait_until(lambda: store.arena.lane_state(1) == LANE_LIVE)
            worker = store.attach(0)
            wait_until(lambda: does is not hold or store.arena.shards - 1 in _held(worker))  # noqa: B023
            taken_s.append(_seconds_until_known(victim, lambda: call(worker)))  # noqa: B023
            worker.close("the other died")
    assert min(taken_s) < 0.1 and max(taken_s) < 2.0, taken_s


def _held(worker: fastps.Worker) -> list[int]:
    return [shard for shard, holder in enumerate(worker.lane.holders()) if holder is not None]


@pytest.mark.parametrize("call", ["average_buffers", "step", "wait_for_others"])
def test_a_death_ends_every_wait_of_an_optimizer_within_100_ms(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FASTPS_JOB": f"deaths-{os.getpid()}-{call}", "FASTPS_WORKERS": "2"}.items():
        monkeypatch.setenv(name, value)

    def wrapped(rank: int) -> tuple[torch.nn.Module, fastps.DistributedOptimizer]:
        os.environ["FASTPS_RANK"] = str(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, timeout_s=20)
        optimizer.wait_for_start()
        return model, optimizer

    victim = processes.start(lambda: (wrapped(1), time.sleep(60)))
    model, optimizer = wrapped(0)
    model(torch.ones(4, 3)).sum().backward()
    waits = {"step": lambda: [optimizer.step() for _ in range(3)]}.get(call, getattr(optimizer, call))
    assert _seconds_until_known(victim, waits) < 2.0
    optimizer.close()
