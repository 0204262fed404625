"""The pull thread of Rudra-adv*: what it has received can be taken at any time, and stays whole until then."""

import threading
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.errors import Error
from fastps.store.background import Background
from fastps.system.clock import SYSTEM_CLOCK
from tests.support.processes import wait_until


class _Link:
    """Transfers that the test ends, one by one. `begun` counts those that began."""

    def __init__(self) -> None:
        self.begun = 0
        self.ends = threading.Semaphore(0)

    def make(self) -> None:
        self.begun += 1
        assert self.ends.acquire(timeout=20)


def test_received_weights_are_taken_during_the_next_fetch_and_no_fold_writes_what_is_in_use_received_or_under_way() -> None:
    weights, link = {"w": np.zeros(4, np.float32)}, _Link()
    store = fastps.Store.create(weights, fastps.SGD(lr=1.0), sync="adv*:2", workers=2)
    with store, store.attach(0) as reader, store.attach(1) as writer:

        def commit(version: int) -> None:
            writer.step({"w": np.full(4, -2.0)})  # divided by n: each version adds 1
            wait_until(lambda: store.version == version)

        def contents(buffer: int) -> list[Any]:
            return list(store.weight_views((buffer,))[0])

        background = Background(reader.lane, link.make, SYSTEM_CLOCK)
        try:
            commit(1)
            wait_until(lambda: link.begun == 1)
            commit(2)
            assert background.newest() is None, "nothing is received yet"
            link.ends.release()
            wait_until(lambda: link.begun == 2)
            for version in range(3, 12):
                commit(version)
            first = background.newest()
            assert first is not None and contents(first) == [1.0] * 4 and reader.lane.version == 1
            link.ends.release()
            wait_until(lambda: link.begun == 3)  # version 1 is in use, 2 is received, and 11 is under way
            for version in range(12, 30):
                commit(version)
            assert contents(first) == [1.0] * 4
            second = background.newest()
            assert second is not None and contents(second) == [2.0] * 4
            link.ends.release()
            wait_until(lambda: link.begun == 4)
            third = background.newest()
            assert third is not None and contents(third) == [11.0] * 4
            assert background.newest() is None
        finally:
            link.ends.release(100)
            background.close()


def test_newer_weights_replace_received_ones_that_were_not_taken() -> None:
    weights = {"w": np.zeros(4, np.float32)}
    store = fastps.Store.create(weights, fastps.SGD(lr=1.0), sync="adv*:2", workers=2)
    with store, store.attach(0) as reader, store.attach(1) as writer:
        received: list[int] = []
        background = Background(reader.lane, lambda: received.append(store.version), SYSTEM_CLOCK)
        try:
            for version in range(1, 6):
                writer.step({"w": np.full(4, -2.0)})
                wait_until(lambda version=version: version in received)
            wait_until(lambda: background._ready is not None and background._ready[1] == 5)
            buffer = background.newest()
            assert buffer is not None and store.weight_views((buffer,))[0].tolist() == [5.0] * 4
        finally:
            background.close()


def test_each_worker_may_use_keep_and_fetch_a_buffer_and_their_number_is_bounded_by_it() -> None:
    weights = {"w": np.zeros(4, np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=1.0), sync="adv*:1", workers=4) as store:
        assert store.layout.buffers == 3 * 4 + 3
    with pytest.raises(fastps.LayoutError, match="expected 1 to 41 workers"):
        fastps.Store.create(weights, fastps.SGD(lr=1.0), sync="adv*:1", workers=42)


def test_a_worker_whose_push_failed_ends_its_threads_before_the_arena_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise Error("the push thread failed")

    before = set(threading.enumerate())
    with fastps.Store.create({"w": np.zeros(4, np.float32)}, fastps.SGD(lr=1.0), sync="adv*:1", workers=2) as store:
        worker = store.attach(0)
        monkeypatch.setattr(worker.combining, "_deliver", fail)
        worker.push(store.hypers, samples=1)
        with pytest.raises(Error, match="the push thread failed"):
            worker.close()
        assert set(threading.enumerate()) == before
