"""A job in this process with one worker, for tests of what other tools are told of it."""

import contextlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import fastps
from fastps.store.observer import Look
from fastps.store.worker import Worker


def needs(package: str, extra: str) -> None:
    """Skip a module whose tests need an extra that is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: it belongs to the extra [{extra}]", allow_module_level=True)


@contextmanager
def stepping(job: str | None = None, sync: str = "asp") -> Iterator[Worker]:
    """The one worker of a job, whose steps are made by `step`."""
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=0.1), sync=sync, job=job) as store:
        with store.attach(0) as worker:
            yield worker


def look_at(job: str) -> Look:
    """What an observer sees of a job now."""
    with contextlib.closing(fastps.observe(job)) as observer:
        return observer.look()


def step(worker: Worker, times: int = 1, loss: float = 0.5) -> None:
    """Make steps that report a loss."""
    for _ in range(times):
        worker.loss = loss
        worker.step({"w": np.ones(4)})
