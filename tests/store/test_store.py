"""The store with real processes and without torch: results, staleness bounds, deaths, bad input."""

import os
import random
import signal
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import fastps
from fastps.kernels.shm.arena import LANE_LIVE
from fastps.system import shared_memory
from tests.fuzz.places import header_of
from tests.support import descriptors, processes
from tests.support.sizes import sample_and_full

AMOUNT = np.float32(1.0 / 1024)


def _steps(store: fastps.Store, rank: int, steps: int) -> None:
    """Push `steps` gradients of one constant."""
    with store.attach(rank) as worker:
        for _ in range(steps):
            worker.gradients["w"][:] = AMOUNT
            worker.step()
            values = worker.weights["w"]
            assert values.min() == values.max(), "a pull brought two versions at once"


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:0", "ssp:3", "dssp:1,4", "dssp:1,4,release=printed"])
def test_every_push_of_every_process_is_folded_exactly_once(sync: str) -> None:
    workers, steps = 4, 200
    weights = {"w": np.ones(1000, np.float32), "b": np.ones((3, 5), np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=workers) as store:
        processes.results(processes.start_each(lambda rank: _steps(store, rank, steps), workers), 60)
        assert store.version == (steps if sync == "bsp" else workers * steps)
        _, buffer, _ = store.arena.committed()
        assert set(store.weight_views(buffer)[0].tolist()) == {1.0 - store.version / 1024}
        assert sum(store.arena.counters(rank)["folded"] for rank in range(workers)) == workers * steps


def test_a_store_can_be_joined_by_name() -> None:
    update = fastps.SGD(lr=1.0)
    with fastps.Store.create({"w": np.ones(4, np.float32)}, update, sync="bsp", workers=2) as store:

        def join() -> float:
            other = fastps.Store.connect(store.job, store.layout, [update.hyper])
            with other, other.attach(1) as worker:
                worker.step({"w": np.full(4, 2.0)})
                return float(worker.weights["w"][0])

        child = processes.start(join)
        with store.attach(0) as worker:
            worker.step({"w": np.full(4, 4.0)})
            assert worker.weights["w"].tolist() == [-2.0] * 4
        processes.finish([child], 20)
        assert child.outcome == -2.0


def test_an_observer_sees_the_counters_and_holds_nothing() -> None:
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0), workers=2, sync="asp") as store:
        with store.attach(0) as worker:
            worker.step({"w": np.zeros(4)})
            observer = fastps.observe(store.job)
            rows = observer.statistics()
            assert [(row.rank, row.state, row.steps) for row in rows] == [(0, "live", 1), (1, "not attached", 0)]
            observer.close()
        assert store.arena.pins() == [-1, -1]


def test_a_second_push_waits_for_the_grant_before_it_writes_its_hyper_parameters() -> None:
    with fastps.Store.create({"w": np.zeros(2, np.float32)}, fastps.SGD(lr=1.0), sync="bsp", workers=2) as store:
        workers = [store.attach(rank) for rank in range(2)]
        for worker in workers:
            worker.gradients["w"][:] = 1.0
        workers[0].push(store.hypers)
        with ThreadPoolExecutor(1) as threads:
            again = threads.submit(workers[0].push, [hyper._replace(learning_rate=100.0) for hyper in store.hypers])
            time.sleep(0.2)
            workers[1].push(store.hypers)
        assert again.exception() is None
        assert store.version == 1 and store.weight_views(store.committed()[0])[0].tolist() == [-1.0, -1.0]
        for worker in workers:
            worker.close()


# -- deaths ----------------------------------------------------------------------------------------


def test_an_observer_finds_a_job_of_which_only_a_high_lane_answers() -> None:
    weights = {"w": np.ones(4, np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=1.0), sync="asp", workers=100) as store:
        for listener in list(store._listeners):
            store.stop_answering(listener)
        listener = store.answer_at(99)
        observer = fastps.observe(store.job)
        assert len(observer.statistics()) == 100
        observer.close()
        store.stop_answering(listener)


def _until_error(store: fastps.Store, rank: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    with store.attach(rank) as worker:
        while True:
            worker.step({"w": generator.standard_normal(20_000, np.float32)})


def _kill_one(sync: str, seed: int, after_s: float) -> None:
    """Kill one of three at a random moment; the others must name it within two seconds, and nothing may hang."""
    generator = random.Random(seed)
    weights = {"w": np.zeros(20_000, np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=1e-6, momentum=0.9), sync=sync, workers=3) as store:
        children = processes.start_each(lambda rank: _until_error(store, rank, rank), 3)
        while store.version < 3 or any(state != LANE_LIVE for state in store.arena.lane_states()):
            time.sleep(0.001)  # a worker that dies before it attached is the launcher's to report
        time.sleep(generator.random() * after_s)
        victim = generator.randrange(3)
        processes.kill_one(children, victim, f"seed {seed}: ")
        assert store.arena.committed()[0] == store.version


@sample_and_full(8, 60, "kills")
def test_kills_at_random_moments_never_hang_and_leave_nothing(kills: int) -> None:
    for seed in range(kills):
        _kill_one(["bsp", "asp", "ssp:1", "dssp:1,4"][seed % 4], 1000 + seed, after_s=0.05)


def test_a_worker_that_raises_is_named_with_its_error() -> None:
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0), workers=2) as store:

        def fail() -> None:
            with store.attach(1) as worker:
                worker.step({"w": np.zeros(4)})
                raise RuntimeError("the disk is on fire")

        child = processes.start(fail)
        with (
            pytest.raises(fastps.WorkerDiedError, match=r"worker 1 \(process \d+\) failed: RuntimeError: the disk is on fire"),
            store.attach(0) as worker,
        ):
            while True:
                worker.step({"w": np.zeros(4)})
        processes.finish([child], 10)


def test_a_wait_that_is_too_long_says_who_waits_for_whom() -> None:
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0), workers=3, timeout_s=0.2) as store:
        with store.attach(0) as worker, pytest.raises(fastps.TimeoutExceededError) as caught:
            worker.step({"w": np.zeros(4)})
        text = str(caught.value)
        assert "worker 0 waited 0.2 s at step 1 under bsp for worker 1 (at step 0, not attached), worker 2" in text


def test_gradients_that_are_written_before_the_grant_are_those_of_the_next_push() -> None:
    with fastps.Store.create({"w": np.zeros(1, np.float32)}, fastps.SGD(lr=1.0), sync="softsync:1", workers=2) as store:
        with store.attach(0) as first, store.attach(1) as second:
            first.gradients["w"][:] = 1
            first.push(store.hypers)  # kept until the other's push comes
            first.gradients["w"][:] = 100
            second.step({"w": [0.0]})
            assert second.weights["w"] == -0.5
            first.advance()
            first.push(store.hypers)
            second.step({"w": [0.0]})
            assert second.weights["w"] == -50.5


def test_ctrl_c_ends_a_wait() -> None:
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0), workers=2) as store, store.attach(0) as worker:
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            worker.step({"w": np.zeros(4)})
        assert time.monotonic() - began < 2
        timer.join()


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, -1, 100_000])
def test_a_number_of_workers_out_of_range_is_refused(workers: int) -> None:
    with pytest.raises(ValueError, match="workers"):
        fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0), workers=workers)


def test_another_dtype_is_refused_by_name() -> None:
    with pytest.raises(fastps.UnsupportedError, match="'w': expected float32 or float64, found int64"):
        fastps.Store.create({"w": np.ones(4, np.int64)}, fastps.SGD(lr=1.0))


@pytest.mark.parametrize(("free_mib", "gradient_type", "cures"), [
    (44, "float32", "at most 9 workers, gradients in half precision (push_dtype=torch.bfloat16), a smaller model"),
    (30, "float32", "at most 5 workers, a smaller model"),
    (40, "float16", "at most 11 workers, a smaller model"),
    (5, "float32", "a smaller model"),
])  # fmt: skip
def test_a_job_without_memory_is_told_what_fits(
    free_mib: int, gradient_type: Any, cures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = descriptors.opened()
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: (free_mib << 20, "limit"))
    with pytest.raises(fastps.ArenaError) as caught:
        fastps.Store.create({"w": np.zeros(1 << 19, np.float32)}, fastps.SGD(lr=1.0), workers=12, gradient_type=gradient_type)
    wanted = f"524,288 parameters and 12 workers, found {free_mib}.0 MiB free (limit): use {cures}, or raise the limit"
    assert str(caught.value).endswith(wanted)
    assert descriptors.settle(opened) == opened


def test_memory_that_others_take_while_the_arena_is_made_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers build their models meanwhile: without another look the kernel would kill one of them."""
    opened, left = descriptors.opened(), iter([16, 12, 8])
    monkeypatch.setattr(shared_memory, "_STRIDE", 1 << 20)
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: (next(left) << 20, "limit of the test"))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    with pytest.raises(fastps.ArenaError, match=r"^the arena needs 12.0 MiB for x, found 10.0 MiB free \(limit of the test\)"):
        shared_memory.create(12 << 20, "x")
    assert descriptors.settle(opened) == opened


def test_another_model_is_refused_by_name_and_the_job_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    update = fastps.SGD(lr=1.0)
    ours: dict[str, Any] = {"a": np.ones(4, np.float32), "b": np.ones((2, 3), np.float32)}
    theirs: dict[str, Any] = {"a": np.ones(4, np.float32), "b": np.ones((3, 3), np.float32)}
    with fastps.Store.create(ours, update, workers=2, timeout_s=0.5) as store, store.attach(0) as worker:
        with (
            fastps.Store.create(theirs, update, workers=2) as other,
            pytest.raises(fastps.LayoutError, match=r"parameter 1: here 'b' has shape \[3, 3\].*there 'b' has shape \[2, 3\]"),
        ):
            fastps.Store.connect(store.job, other.layout, [update.hyper], timeout_s=5)
        # The joiner met whichever place answered first: the host's thread, which holds the text for its process. Worker 1 is
        # still expected, so what was refused is told of where this one waits in vain.
        with pytest.raises(fastps.TimeoutExceededError, match=r"worker 1 .*refused: .*'b' has shape \[2, 3\].*\[3, 3\]"):
            worker.step({"a": np.zeros(4), "b": np.zeros((2, 3))})
        assert "'b' has shape [2, 3]" in caplog.text
        with store.attach(1) as right:
            right.push(store.hypers)
            worker.advance()
            assert worker.steps == 1


def test_nobody_answering_for_a_job_is_an_error_with_advice() -> None:
    update = fastps.SGD(lr=1.0)
    store = fastps.Store.create({"w": np.ones(4, np.float32)}, update)
    with store, pytest.raises(fastps.AttachError, match="FASTPS_JOB"):
        fastps.Store.connect("no-such-job", store.layout, [update.hyper], timeout_s=0.1)


def test_a_ring_that_was_written_over_is_named_and_not_waited_for() -> None:
    """More done with than posted: there would never be room for the next push."""
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0), sync="asp") as store:
        worker = store.attach(0)
        worker.step({"w": np.zeros(4)})
        header = header_of(store.memory)
        struct.pack_into("<Q", store.memory, header.lanes_offset + header.lane_shards_offset, 1 << 40)  # the seat's head
        with pytest.raises(fastps.ProtocolError, match=r"worker 0 \(1 posted, 1099511627776 done with\).*restart the job"):
            worker.step({"w": np.zeros(4)})
        with pytest.raises(fastps.ProtocolError):
            worker.close()
