"""The fault cases of one node, each with a test named after its number in the project's list; more of each lies where named.

Deaths and joins of every scheme are in test_membership.py, checkpoints in test_checkpoint.py. The cases that need several nodes
(7 to 10, 12) are not here.
"""

import mmap
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.kernels.shm.arena import ABI, LANE_DEAD, LANE_LIVE
from fastps.membership import rendezvous
from fastps.system.memory_limits import available_bytes
from tests.support import processes
from tests.support.processes import wait_until

W = ONES = {"w": np.ones(12, np.float32)}


def _store(workers: int, sync: str = "asp", weights: Any = W, **options: Any) -> fastps.Store:
    settings = {"on_worker_loss": "continue", "timeout_s": 20.0, **options}
    return fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=workers, **settings)


def _attached(store: fastps.Store, rank: int, then: Callable[[fastps.Worker], Any]) -> processes.Child:
    """A worker in a process of its own that attached and does `then`."""

    def work() -> Any:
        with store.attach(rank) as worker:
            return then(worker)

    child = processes.start(work)
    wait_until(lambda: store.arena.lane_state(rank) == LANE_LIVE)
    return child


def _weights(store: fastps.Store) -> list[float]:
    weights: list[float] = store.weight_views(store.committed()[0])[0].tolist()
    return weights


def test_case_01_a_worker_killed_while_idle_is_seen_within_100_ms() -> None:
    taken_s = []
    for _ in range(4):
        with _store(2, "bsp") as store, store.attach(0) as worker:
            idle = _attached(store, 1, lambda other: other.step(ONES) or time.sleep(60))
            time.sleep(0.06)  # beyond the time between two looks, so that the peers meet
            worker.step(ONES)
            killer, gone = processes.kill_later(idle, 0.1)
            worker.step(ONES)  # waits until the other is known to be dead
            seen = time.monotonic()
            killer.join()
            taken_s.append(seen - gone[0])
            processes.finish([idle], 10)
            assert store.version == 2
            assert store.arena.lane_state(1) == LANE_DEAD
    assert min(taken_s) < 0.1 and max(taken_s) < 2.0, taken_s  # a busy machine may be late, not always


def test_case_02_a_gradient_half_written_never_happened() -> None:
    with _store(2) as store, store.attach(0) as worker:

        def die(other: fastps.Worker) -> None:
            other.step({"w": np.full(12, 0.25)})
            other.gradients["w"][:6] = 1e9
            os.kill(os.getpid(), signal.SIGKILL)

        processes.ended(lambda: die(store.attach(1)))
        wait_until(lambda: worker.step(ONES) is None and store.arena.lane_state(1) == LANE_DEAD)
        assert _weights(store) == [1.0 - 0.25 - worker.steps] * 12


def test_case_03_a_push_that_was_posted_before_a_death_is_folded_once_and_the_next_owner_is_told() -> None:
    with _store(2, "bsp") as store, store.attach(0) as worker:

        def die() -> None:
            other = store.attach(1)
            other.gradients["w"][:] = 3.0
            other.push(store.hypers)
            os.kill(os.getpid(), signal.SIGKILL)

        processes.ended(die)
        worker.step(ONES)
        assert _weights(store) == [1.0 - (3.0 + 1.0) / 2] * 12, "the mean of both, once"
        assert store.arena.counters(1)["folded"] == 1

        def replace() -> tuple[int, int]:
            with store.attach(1) as other:
                return other.begun_at, other.generation

        assert processes.ended(replace).outcome == (1, 1), "its predecessor's step is done"


@pytest.mark.parametrize("sync", ["asp", "ssp:2"])
def test_case_04_a_stopped_worker_is_a_straggler_and_goes_on_afterwards(sync: str) -> None:
    enough = mmap.mmap(-1, 1)

    def steady(other: fastps.Worker) -> int:
        while not enough[0]:
            other.step({"w": np.zeros(12)})
            time.sleep(0.001)
        return other.store.arena.generation(1)

    with _store(2, sync) as store, store.attach(0) as worker:
        other = _attached(store, 1, steady)
        wait_until(lambda: worker.step({"w": np.zeros(12)}) is None and store.arena.counters(1)["posted"] >= 2)
        with processes.stopped(other.process_id, unless=lambda: worker.lane.owner() == 1):  # that is case 25
            if store.arena.version and sync == "asp":
                before = worker.steps
                until = time.monotonic() + 0.3
                while time.monotonic() < until:
                    worker.step({"w": np.zeros(12)})
                assert worker.steps > before + 20, "the others go on at full speed"
            else:
                time.sleep(0.3)
            assert store.arena.lane_state(1) == LANE_LIVE, "stopped is not dead"
            enough[0] = 1
        while store.arena.lane_state(1) == LANE_LIVE:
            worker.step({"w": np.zeros(12)})
        processes.finish([other], 10)
        assert other.outcome == 0


def test_case_05_06_whoever_runs_the_server_dies_in_an_update_and_nothing_is_torn() -> None:
    """There is no server process; the holder of the shard lock does its work. Holders are killed at random moments of folds."""
    weights = {"w": np.ones(300_000, np.float32)}
    amount = np.float32(1 / 1024)

    def work(store: fastps.Store, rank: int) -> None:
        with store.attach(rank) as worker:
            while True:
                worker.gradients["w"][:] = amount
                worker.step()

    for seed in range(3):
        with _store(3, weights=weights) as store, store.attach(0) as worker:
            children = [processes.start(lambda rank=rank, store=store: work(store, rank)) for rank in (1, 2)]
            wait_until(lambda store=store: min(store.arena.counters(lane)["posted"] for lane in (1, 2)) > 2)
            time.sleep(0.001 * np.random.default_rng(seed).random())
            processes.kill(*children)
            began = time.monotonic()
            while store.arena.lane_states()[1:] != bytes([LANE_DEAD] * 2):
                worker.step({"w": np.full(300_000, amount)})
                values = worker.weights["w"]
                assert values.min() == values.max(), "torn"
            assert time.monotonic() - began < 2.0
            worker.step({"w": np.full(300_000, amount)})
            assert worker.weights["w"][0] == np.float32(1.0) - store.version * amount, "an update was lost or made twice"


# Case 11 (what a late owner says counts no more) is in kernels/protocol/test_lane.py.


def test_case_13_a_late_joiner_has_the_current_version_and_a_generation_of_its_own() -> None:
    with _store(1, max_workers=2) as store, store.attach(0) as worker:
        for _ in range(5):
            worker.step(ONES)
        with store.attach() as late:
            assert (late.rank, late.generation, late.version, late.begun_at) == (1, 1, 5, 5)
            assert late.weights["w"].tolist() == [-4.0] * 12


def test_case_14_too_little_memory_is_refused_before_training_with_what_is_needed_and_free() -> None:
    free, _ = available_bytes()
    weights = {"w": np.broadcast_to(np.float32(0), (free // 8,))}
    with pytest.raises(fastps.ArenaError, match=r"needs [\d.]+ GiB for .* 4 workers, found [\d.]+ GiB free .*: use a smaller"):
        fastps.Store.create(weights, fastps.SGD(lr=1.0), workers=4)


# Case 15 (deaths for want of memory) is in test_memory_limits.py.
# Case 16 (a full disk during a checkpoint) is in test_checkpoint.py.


@pytest.mark.parametrize(("sync", "floats", "value"), [("asp", 12, np.nan), ("bsp", 400_000, np.inf), ("ssp:2", 12, -np.inf)])
def test_case_17_a_gradient_that_is_not_finite_is_rejected_by_worker_parameter_and_step(
    sync: str, floats: int, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"a": np.ones(floats, np.float32), "b": np.ones(floats, np.float32)}
    bad = {"a": np.full(floats, 0.5, np.float32), "b": np.full(floats, 0.5, np.float32)}
    bad["b"][floats // 2] = value
    good = {name: np.full(floats, 0.25, np.float32) for name in weights}
    with fastps.Store.create(weights, fastps.SGD(lr=1.0, momentum=0.9), sync=sync, workers=2) as store:

        def other() -> None:
            with store.attach(1) as worker:
                worker.step(bad)

        child = processes.start(other)
        with store.attach(0) as worker:
            worker.step(good)
            processes.results([child], 20)
            worker.try_combine()
            assert store.arena.rejected(1) == (1, (0, 1)), "step 0, the second parameter"
            assert store.arena.rejected(0) == (0, None)
            assert store.arena.counters(1)["dropped"] == 1
            worker.step({name: np.full(floats, -0.25 * 1.9, np.float32) for name in weights})
            for values in worker.weights.values():
                assert np.abs(values - (1.0 - 0.25 * 1.9 + 0.25 * 1.9)).max() < 1e-6, "as if it had never been pushed"
    with fastps.Store.create(W, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        worker.step({"w": np.full(12, value)})
    assert "worker 0's push of step 0 was rejected" in caplog.text
    assert "parameter 'w'" in caplog.text


def test_case_17_raise_stops_everyone_and_allow_folds_it() -> None:
    told = mmap.mmap(-1, 1)

    def other(store: fastps.Store) -> None:
        with store.attach(1) as worker:
            worker.gradients["w"][...] = np.nan
            worker.push(store.hypers, samples=1)
            wait_until(lambda: told[0], 60)  # worker 0 has failed: the reason is told, not that it is gone
            worker.check_peers()

    with _store(2, "bsp", nonfinite="raise", on_worker_loss="stop") as store:
        child = processes.start(lambda: other(store))
        with pytest.raises(fastps.NonFiniteGradientError, match=r"worker 1's push of step 0 was rejected.*parameter 'w'"):
            with store.attach(0) as worker:
                for _ in range(3):
                    worker.step(ONES)
        told[0] = 1
        processes.finish([child], 10)
        assert child.outcome[0] == "NonFiniteGradientError", child.outcome
        assert np.isfinite(_weights(store)).all()
    with _store(1, nonfinite="allow") as store, store.attach(0) as worker:
        worker.step({"w": np.full(12, np.nan)})
        assert np.isnan(_weights(store)).all()


@pytest.mark.parametrize("update", [
    *(fastps.SGD(lr=1.0, momentum=0.9), fastps.Adagrad(), fastps.RMSProp(momentum=0.5), fastps.RMSProp(centered=True)),
    *(fastps.Adam(), fastps.Adam(amsgrad=True), fastps.NAdam(), fastps.Adamax(), fastps.Adadelta()),
    *(fastps.RAdam(betas=(0.9, 0.5)), fastps.RAdam(betas=(0.5, 0.9))),
])  # fmt: skip
@pytest.mark.parametrize("size", [1e30, 3e38])
def test_case_18_a_huge_gradient_never_makes_weights_or_state_infinite(update: Any, size: float) -> None:
    with fastps.Store.create(W, update, sync="bsp", workers=1) as store, store.attach(0) as worker:
        for step in range(4):
            worker.step({"w": np.full(12, size if step % 2 else 1e-3)})
            _, state = store.committed()
            for plane in range(store.layout.planes):
                assert np.isfinite(store.plane_views(state, plane)[0]).all()
            assert np.isfinite(_weights(store)).all()


def test_case_18_of_several_finite_pushes_whose_sum_overflows_the_largest_goes() -> None:
    with fastps.Store.create(W, fastps.SGD(lr=1.0), sync="bsp", workers=2) as store:

        def other() -> None:
            with store.attach(1) as worker:
                worker.step({"w": np.full(12, 3e38)})

        child = processes.start(other)
        with store.attach(0) as worker:
            worker.step({"w": np.full(12, 2e38)})
            processes.finish([child], 10)
            assert _weights(store) == [float(np.float32(1.0) - np.float32(2e38))] * 12
            assert [store.arena.rejected(lane)[0] for lane in range(2)] == [0, 1]


def test_case_19_another_model_is_refused_before_a_byte_is_written_and_the_job_goes_on() -> None:
    update = fastps.SGD(lr=1.0)
    with _store(2) as store, fastps.Store.create({"w": np.ones(13, np.float32)}, update, workers=2) as other:
        before = bytes(memoryview(store.memory)[: store.arena.weights_offset(0)])
        with pytest.raises(fastps.LayoutError, match=r"here .*, there"):
            fastps.Store.connect(store.job, other.layout, [update.hyper], timeout_s=5)
        assert bytes(memoryview(store.memory)[: store.arena.weights_offset(0)]) == before
        with store.attach(0) as worker:
            time.sleep(0.06)  # beyond the time between two looks
            worker.step(ONES)
            assert worker.steps == 1


def test_case_20_another_format_and_a_second_job_of_the_same_name_are_refused() -> None:
    job = f"case-20-{os.getpid()}"
    with _store(1, job=job) as store:
        with pytest.raises(rendezvous.AbiDiffers, match=f"expected the job's arena format to be {ABI + 1}.*found {ABI}"):
            rendezvous.connect(job, "host", 5, abi=ABI + 1)
        with pytest.raises((OSError, fastps.Error), match="case-20"):
            _store(1, job=job)
        assert store.version == 0


@pytest.mark.parametrize(("make", "refusal"), [
    (lambda: torch.zeros(3, dtype=torch.complex64), "expected float32, float64, bfloat16 or float16, found complex64"),
    (lambda: torch.zeros(3, device="meta"), "expected a tensor on the CPU or a CUDA GPU, found one on meta"),
    (lambda: torch.zeros(8)[::2], "expected a tensor without gaps"),
    (lambda: torch.zeros(2, 2).to_sparse(), "expected a dense tensor"),
])  # fmt: skip
def test_case_21_a_tensor_that_cannot_be_shared_is_refused_by_name(make: Callable[[], torch.Tensor], refusal: str) -> None:
    parameter = torch.nn.Parameter(make())
    with pytest.raises(fastps.UnsupportedError, match=refusal):
        fastps.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))


def test_case_21_zero_sizes_frozen_parameters_and_missing_gradients_are_taken() -> None:
    empty, frozen, used = (torch.nn.Parameter(torch.ones(size)) for size in (0, 3, 3))
    with fastps.DistributedOptimizer(torch.optim.SGD([empty, frozen, used], lr=0.5)) as optimizer:
        (used * 2).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        frozen.requires_grad_(False)
        optimizer.zero_grad()
        optimizer.step()
        assert (frozen.tolist(), used.tolist()) == ([1.0] * 3, [0.0] * 3)


# Case 22 (garbage at a worker's name changes nothing) is in kernels/memory/test_rendezvous.py and fuzz/test_attach_messages.py.


# Case 23 (an index out of bounds is named and never followed) is in test_expelled_workers.py.


class _Images(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose loader's workers are forked from the worker, and look at fastps there."""

    def __init__(self, optimizer: fastps.DistributedOptimizer, parameter: torch.Tensor) -> None:
        self._optimizer = optimizer
        self._parameter = parameter

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            self._optimizer.step()
            refused = 0.0
        except fastps.UsageError as error:
            refused = float("was forked from worker 0 and may only read" in str(error))
        return torch.stack([torch.tensor(refused), self._parameter.detach().sum()])


def test_case_24_a_forked_loader_may_read_and_is_refused_to_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with fastps.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), sync="asp") as optimizer:
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loader = torch.utils.data.DataLoader(_Images(optimizer, parameter), num_workers=2, batch_size=2)
        assert torch.cat(list(loader)).tolist() == [[1.0, 1.5]] * 4
        optimizer.zero_grad()
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert optimizer.version == 2, "the children that ended did not leave in the worker's name"


def test_case_24_every_call_in_a_forked_child_is_refused() -> None:
    with _store(2) as store, store.attach(0) as worker:
        others = lambda: worker.push(store.hypers), lambda: worker.step(ONES), lambda: fastps.save(worker, "/nonexistent")
        for call in (worker.pull, worker.advance, worker.wait_for_start, *others):
            child = processes.ended(call)
            assert child.outcome[0] == "UsageError", child.outcome
            assert "forked from worker 0" in child.outcome[1]
        worker.step(ONES)


def test_case_25_a_wait_for_a_stopped_holder_sleeps_and_says_who_waits_for_whom() -> None:
    with _store(2, "bsp", timeout_s=1.0) as store, store.attach(0) as worker:
        other = _attached(store, 1, lambda other: other.lane.hold() and time.sleep(60))
        wait_until(lambda: worker.lane.owner() == 1)
        with processes.stopped(other.process_id):
            began_cpu, began = time.process_time(), time.monotonic()
            with pytest.raises(fastps.TimeoutExceededError, match=r"worker 0 waited 1 s at step 1 under bsp for worker 1 \(at"):
                worker.step(ONES)
            assert time.process_time() - began_cpu < 0.5 * (time.monotonic() - began), "it spun"
        processes.kill(other)


def test_case_25_many_more_workers_than_cores() -> None:
    with _store(40) as store:
        workers = [store.attach(rank) for rank in range(40)]
        for worker in workers:
            worker.push(store.hypers, null=True)
        assert store.version == 40
        for worker in workers:
            worker.close()


@pytest.mark.slow
def test_case_25_uneven_data_ends_hang_nobody() -> None:
    def work(store: fastps.Store, rank: int) -> int:
        with store.attach(rank) as worker:
            for _ in range(5 + 20 * rank):
                worker.step(ONES)
            return worker.steps

    for sync in ("bsp", "ssp:1", "dssp:1,3", "backup:1", "r2sp:0.5", "softsync:1"):
        with fastps.Store.create(W, fastps.SGD(lr=1e-3), sync=sync, workers=3, timeout_s=20) as store:
            children = [processes.start(lambda rank=rank, store=store: work(store, rank)) for rank in range(3)]
            assert processes.results(children, 30) == [5, 25, 45], sync
