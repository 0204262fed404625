"""Readers that have gone give their buffers back to the machine, while others read on."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.store.reader import WeightsReader
from fastps.system.clock import SYSTEM_CLOCK
from tests.support import processes

FLOATS = 1 << 18


def _open(job: str) -> WeightsReader:
    return WeightsReader(job, 5.0, SYSTEM_CLOCK)


def _store(**options: Any) -> fastps.Store:
    return fastps.Store.create({"w": np.zeros(FLOATS, np.float32)}, fastps.SGD(lr=1.0), max_readers=6, **options)


def _allocated(store: fastps.Store) -> int:
    return 512 * os.fstat(store.descriptor).st_blocks


def _step(worker: fastps.Worker) -> None:
    """A step whose push looks at its peers, as one that comes some time after the last does."""
    worker._checked_ns = 0
    worker.gradients["w"][:] = -1.0
    worker.step()


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastps.store.freed_readers._LOOK_NS", 0)


def test_closed_and_killed_readers_give_their_buffers_back_and_others_read_on() -> None:
    with _store(sync="asp") as store, store.attach(0) as worker:

        def hold(ready: Callable[[], object]) -> None:
            with _open(store.job):
                ready()
                time.sleep(60)

        before = _allocated(store)
        first = _open(store.job)
        readers = [_open(store.job) for _ in range(3)]
        child = processes.start_ready(hold)
        for step in range(12):
            _step(worker)
            readers[step % 3].pull()
        held = first.weights["w"]
        assert _allocated(store) >= before + 5 * 4 * FLOATS
        for reader in readers:
            reader.close()
        for _ in range(6):
            _step(worker)
        assert _allocated(store) >= before + 5 * 4 * FLOATS, "the place of the child is the last"
        processes.kill(child)
        for _ in range(6):
            _step(worker)
        assert _allocated(store) == before + store.arena.reader_weights_range(1)[1], "the first reader is left"
        assert not held.any() and first.version == 0
        with _open(store.job) as reader:
            for _ in range(12):
                _step(worker)
                reader.pull()
                assert set(reader.weights["w"].tolist()) == {float(reader.version)}
        first.close()
        for _ in range(6):
            _step(worker)
        assert _allocated(store) == before


@pytest.mark.slow
def test_a_reader_that_comes_while_places_are_taken_for_a_moment_finds_one() -> None:
    with _store(sync="asp") as store, store.attach(0) as worker:
        for _ in range(3):
            children = [processes.start(lambda: _come_and_go(store.job)) for _ in range(3)]
            while any(processes.runs(child.process_id) for child in children):
                _step(worker)
                processes.finish([child for child in children if not processes.runs(child.process_id)], 10)
            processes.results(children, 30)


def _come_and_go(job: str) -> int:
    for _ in range(20):
        with _open(job) as reader:
            for _ in range(3):
                reader.pull()
                assert len(set(reader.weights["w"][::1000].tolist())) == 1
    return 20
