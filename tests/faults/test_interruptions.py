"""What is left by an error, Ctrl-C, a stop or a death in the middle of something: nobody waits for ever, nothing is lost."""

import contextlib
import itertools
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.checkpoint import snapshot
from fastps.checkpoint.periodic import Checkpointing
from fastps.kernels.shm.arena import LANE_DEAD, LANE_LEFT, Arena
from fastps.system.clock import Clock
from tests.support import processes
from tests.support.plain_arena import set_helping
from tests.support.torch_optimizers import steps_on

ONES = {"w": np.ones(8, np.float32)}


class Interrupting(Clock):
    """A clock at which Ctrl-C comes, once, in the n-th call that is made after `arm(n)`."""

    def __init__(self) -> None:
        self._left = 0

    def arm(self, calls: int) -> None:
        self._left = calls

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt

    def now_ns(self) -> int:  # type: ignore[override]
        self._count()
        return time.monotonic_ns()

    def sleep_ns(self, duration_ns: int) -> None:
        self._count()
        super().sleep_ns(duration_ns)


def _store(sync: str, floats: int = 8, names: str = "w", **options: Any) -> fastps.Store:
    settings = {"on_worker_loss": "continue", "timeout_s": 10.0, **options}
    weights = {name: np.ones(floats, np.float32) for name in names}
    return fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=2, **settings)


@contextlib.contextmanager
def _interrupted_worker(store: fastps.Store, rank: int, clock: Interrupting) -> Iterator[fastps.Worker]:
    """A worker with a clock of its own, in a store of its own over the same memory."""
    with fastps.Store.connect(store.job, store.layout, store.hypers, timeout_s=store.timeout_s, clock=clock) as own:
        yield own.attach(rank)


def _gradient(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.full(8, value, np.float32)}


# -- waits ---------------------------------------------------------------------------------------------------------------


def test_a_step_after_one_that_waited_in_vain_waits_on_and_then_pushes() -> None:
    with _store("bsp", timeout_s=0.2) as store, store.attach(0) as first, store.attach(1) as second:
        with pytest.raises(fastps.TimeoutExceededError):
            first.step(_gradient(1 / 2))
        with pytest.raises(fastps.TimeoutExceededError):
            first.step(_gradient(1 / 4))  # still waits for the first step, whose gradient is in the slot
        second.gradients["w"][:] = 1 / 8
        second.push(store.hypers)
        second.advance()
        second.gradients["w"][:] = 1 / 16
        second.push(store.hypers)
        first.step(_gradient(1 / 4))
        assert store.version == 2
        assert first.weights["w"].tolist() == [1 - (1 / 2 + 1 / 8) / 2 - (1 / 4 + 1 / 16) / 2] * 8
        assert (first.steps, first.posts) == (2, 2)


@pytest.mark.parametrize("push_dtype", [torch.float32, torch.bfloat16])
def test_backward_after_a_step_that_waited_in_vain_leaves_what_was_pushed_alone(
    monkeypatch: pytest.MonkeyPatch, push_dtype: torch.dtype
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FASTPS_JOB", f"interrupted-{os.getpid()}")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with fastps.DistributedOptimizer(inner, sync="bsp", push_dtype=push_dtype, timeout_s=0.2) as optimizer:

        def backward(gradient: float, set_to_none: bool) -> None:
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.full((1, 1), gradient)).sum().backward()

        other = optimizer.worker.store.attach(1)
        backward(1 / 2, True)
        with pytest.raises(fastps.TimeoutExceededError):
            optimizer.step()
        for set_to_none in (False, True):
            backward(1 / 4, set_to_none)
            with pytest.raises(fastps.TimeoutExceededError):
                optimizer.step()
        other.push(optimizer.worker.store.hypers, null=True)
        other.advance()
        other.push(optimizer.worker.store.hypers, null=True)
        optimizer.step()
        assert (optimizer.version, model.weight.item()) == (2, 1 - 1 / 2 - 1 / 4), "each of the two gradients once"
        other.close()


@pytest.mark.slow
def test_a_job_that_was_stopped_as_a_whole_for_longer_than_its_timeout_goes_on() -> None:
    def work(store: fastps.Store, rank: int) -> None:
        with store.attach(rank) as worker:
            worker.wait_for_start()
            for _ in range(3):
                for _ in range(20 * rank):
                    time.sleep(0.05)
                worker.step(ONES)

    with _store("bsp", on_worker_loss="stop", timeout_s=1.5) as store:
        children = [processes.start(partial(work, store, rank)) for rank in range(2)]
        processes.wait_until(lambda: store.arena.counters(0)["posted"], 60)
        with contextlib.ExitStack() as stack:
            for child in children:
                stack.enter_context(processes.stopped(child.process_id))
            time.sleep(2.0)
        processes.results(children, 20)


# -- ends and holds ------------------------------------------------------------------------------------------------------


def test_an_end_that_is_interrupted_anywhere_leaves_nobody_waiting() -> None:
    for calls in itertools.count(1):
        clock = Interrupting()
        with _store("bsp") as store, store.attach(0) as steady, _interrupted_worker(store, 1, clock) as leaving:
            clock.arm(calls)
            is_interrupted = True
            with contextlib.suppress(KeyboardInterrupt):
                leaving.close()
                is_interrupted = False
            clock.arm(0)
            assert store.arena.lane_state(1) == LANE_LEFT or "KeyboardInterrupt" in store.arena.failure(1)
            steady.step(ONES)
            steady.step(ONES)
            assert store.version == 2
        if not is_interrupted:
            break
    assert calls > 2, "nothing was interrupted"


def test_a_worker_interrupted_while_it_takes_all_shard_locks_holds_none() -> None:
    clock = Interrupting()
    with _store("asp,shards=3", names="abc") as store, store.attach(0) as holder, _interrupted_worker(store, 1, clock) as other:
        assert holder.lane.hold(1)
        clock.arm(6)
        with pytest.raises(KeyboardInterrupt):
            other.lock_shards()
        assert [other.lane.owner(shard) for shard in range(3)] == [-1, 0, -1]
        holder.lane.release(False, 1)
        other.close()


def test_shard_locks_that_are_released_are_free_although_a_helper_was_away() -> None:
    with _store("asp", floats=400_000) as store, store.attach(0) as holder, store.attach(1) as other:
        holder.lane.share_folds(1)
        holder.lock_shards()
        other.gradients["w"][:] = 1.0
        other.push(store.hypers)
        set_helping(store.memory, 1, 1)
        back = threading.Timer(0.2, set_helping, (store.memory, 1, 0))
        back.start()
        holder.unlock_shards(False)
        back.join()
        assert (store.version, holder.lane.owner()) == (1, -1)


def test_a_fold_whose_wait_for_a_helper_was_interrupted_ends_before_all_locks_are_taken() -> None:
    clock = Interrupting()
    with _store("asp", floats=400_000) as store, _interrupted_worker(store, 0, clock) as owner, store.attach(1) as helper:
        owner.lane.share_folds(1)
        set_helping(store.memory, helper.rank, 1)
        owner.gradients["w"][:] = 1.0
        clock.arm(2)
        with pytest.raises(KeyboardInterrupt):
            owner.push(store.hypers)
        clock.arm(0)
        assert owner.lane.owner(0) == owner.rank
        set_helping(store.memory, helper.rank, 0)
        with owner.locked():
            assert store.version == 1
        assert owner.lane.owner(0) == -1


def test_a_served_worker_releases_a_lock_that_it_recovered_while_a_helper_was_away() -> None:
    with _store("asp", max_workers=3, server="process") as store, store.attach(0) as worker:

        def die_with_the_turn() -> None:
            other = store.attach(1)
            other.lock_shards()
            os.kill(os.getpid(), signal.SIGKILL)

        processes.ended(die_with_the_turn)
        set_helping(store.memory, 2, 1)
        back = threading.Timer(0.2, set_helping, (store.memory, 2, 0))
        back.start()
        for _ in range(4):
            worker.step(ONES)
        back.join()
        processes.wait_until(lambda: store.version == 4)  # the last push is the server's to fold


def test_a_checkpoint_is_left_out_while_another_worker_copies_a_version(tmp_path: Path) -> None:
    with _store("asp") as store, store.attach(0) as writer, store.attach(1) as other:
        pin = partial(snapshot.pin, writer, {}, waits=False)
        checkpointing = Checkpointing(writer, tmp_path, 1, pin, dict)
        with contextlib.closing(snapshot.pin(other, {})):
            writer.step(ONES)
            checkpointing.after_step()
            assert not list(tmp_path.iterdir())
        checkpointing.close()
        assert checkpointing.written == 1


# -- deaths --------------------------------------------------------------------------------------------------------------


class DiesAtClaim:
    """An arena whose next claim is the end of the process."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arena, name)

    def claim(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("have_met", [True, False])
def test_a_lock_is_recovered_whose_owners_successor_died_before_it_could(have_met: bool) -> None:
    with _store("asp", timeout_s=5.0) as store:
        told = mmap.mmap(-1, 1)

        def die_with_the_turn() -> None:
            owner = store.attach(1)
            processes.wait_until(lambda: told[0], 60)
            owner.lock_shards()
            os.kill(os.getpid(), signal.SIGKILL)

        def die_before_the_claim() -> None:
            store.arena = DiesAtClaim(store.arena)  # type: ignore[assignment]
            store.attach(1)

        owner = processes.start(die_with_the_turn)
        with store.attach(0) as steady:
            steady.wait_for_start()
            if have_met:
                steady.check_peers()
            told[0] = 1
            processes.finish([owner], 10)
            processes.ended(die_before_the_claim)
            assert (store.arena.lane_state(1), steady.lane.owner()) == (LANE_DEAD, 1)
            for _ in range(3):
                steady.step(ONES)
            assert (store.version, steady.lane.owner()) == (3, -1)


def test_a_process_of_another_job_of_the_name_is_not_taken_for_a_peer() -> None:
    """As where the launcher begins a job again whose first worker died while the others found it."""
    with _store("bsp", on_worker_loss="stop") as store:
        first = processes.start(lambda: store.attach(0) and time.sleep(60))
        with store.attach(1) as left:
            left.wait_for_start()
            processes.kill(first)
            for listener in store._listeners[:1]:
                store.stop_answering(listener)  # "host", as where the creator was that worker
            with _store("bsp", job=store.job) as again, again.attach(0):
                with pytest.raises(fastps.WorkerDiedError, match="worker 0"):
                    left.step(ONES)


def test_the_arena_is_in_no_core_of_a_process_that_crashes() -> None:
    with _store("asp"):
        entries = Path("/proc/self/smaps").read_text().split("memfd:fastps-arena")[1:]
        flags = [entry.partition("VmFlags:")[2].splitlines()[0].split() for entry in entries]
        assert flags and all("dd" in found for found in flags)


# -- latecomers ----------------------------------------------------------------------------------------------------------


def test_weights_that_a_latecomer_of_the_start_loads_are_not_those_of_the_others() -> None:
    """Under asp the others need not wait for it: what it is shown when it comes is theirs already."""
    said, eighth = mmap.mmap(-1, 3), torch.full((1, 1), 1 / 8)

    def work(rank: int) -> Any:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        processes.wait_until(lambda: rank == 0 or said[0], 60)
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), sync="asp", timeout_s=20) as optimizer:
            if rank == 1:
                model.load_state_dict({"weight": torch.full((1, 1), 100.0)})
            else:
                steps_on(model, optimizer, eighth, 3)
                said[0] = 1
                processes.wait_until(lambda: said[1], 60)
            before = optimizer.version, model.weight.item()
            steps_on(model, optimizer, eighth, 1 + rank)
            found = *before, optimizer.version, model.weight.item()
            said[1 + (rank == 0)] = 1
            processes.wait_until(lambda: said[2], 60)  # close() takes the shard locks, and asp does not wait for a fold
            return found

    first, late = processes.results(processes.start_job(work, 2), 60)
    assert late == (3, 100.0, 5, 1 - 4 / 8), "its first gradient, of what it loaded, is not used"
    assert first == (5, 1 - 3 / 8, 6, 1 - 5 / 8)
