"""Injected delays of one worker; how they change a discipline's behaviour is in tests/store/test_disciplines_live.py."""

from pathlib import Path

import numpy as np

import fastps
from fastps.lab.demo.delays import Delayed, Delays, delay
from fastps.tracing.file import read

MS = 1_000_000


def test_a_transfer_of_each_push_and_of_each_new_version_is_recorded_and_counts_as_waited(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    with fastps.trace(file), fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=0.5)) as store:
        with store.attach(0) as worker:
            delay(worker, Delays(transfer_ms=3.0))
            worker.step({"w": np.ones(3)})
            worker.pull()
            assert worker.combining.pull_transfer_ns == 0, "the version is unchanged"
            assert worker.lane.wait_ns >= 6 * MS
    (step,) = read(file).steps
    assert step["push_transfer_ns"] >= 3 * MS and step["pull_transfer_ns"] >= 3 * MS


def test_the_worker_of_a_later_arena_has_the_same_delays_and_goes_on_counting() -> None:
    def create() -> fastps.Store:
        return fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=0.5))

    with create() as store, store.attach(0) as worker, create() as later_store, later_store.attach(0) as later:
        delay(worker, Delays(transfer_ms=1.0, late_share=1.0, late_s=0.002))
        worker.step({"w": np.ones(3)})
        worker.hand_on(later)
        assert isinstance(later.combining, Delayed) and later.injected_transfer_ns == MS and later.earlier_steps == 1
        waited_ns = later.lane.wait_ns
        later.step({"w": np.ones(3)})
        assert later.lane.wait_ns >= waited_ns + 4 * MS and later.weights["w"].tolist() == [0.5] * 3
