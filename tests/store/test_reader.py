"""Readers with real processes: one version a shard, no delay for the workers, deaths, and what a reader is refused.

Every push adds one to every weight, so all weights of a shard equal its version.
"""

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

import fastps
from fastps.store.reader import WeightsReader
from fastps.system.clock import SYSTEM_CLOCK
from tests.support import processes

FLOATS = 20_000
SHARDS = 3


def _store(**options: Any) -> fastps.Store:
    weights = {name: np.zeros(FLOATS, np.float32) for name in "abc"}
    return fastps.Store.create(weights, fastps.SGD(lr=1.0), **options)


def _open(job: str) -> WeightsReader:
    return WeightsReader(job, 5.0, SYSTEM_CLOCK)


def _steps(worker: fastps.Worker, steps: int) -> None:
    for _ in range(steps):
        for gradient in worker.gradients.values():
            gradient[:] = -1.0
        worker.step()


def _train(store: fastps.Store, rank: int, steps: int) -> int:
    with store.attach(rank) as worker:
        _steps(worker, steps)
    return steps


def _check(reader: WeightsReader) -> None:
    """Every weight of a shard is the shard's version, which the first parameter that lies in it tells."""
    shard_of = {parameter.name: parameter.shard for parameter in reader._memory.parameters}
    for name, values in reader.weights.items():
        expected = reader.versions[shard_of[name]]
        assert values.min() == values.max() == expected, f"{name} of version {expected}: {values.min()} to {values.max()}"


def _read_and_hold(job: str) -> processes.Child:
    """A child that reads one version and holds it until it is killed."""

    def work(ready: Callable[[], object]) -> None:
        with _open(job) as reader:
            _check(reader)
            ready()
            while True:
                time.sleep(1)
                _check(reader)

    return processes.start_ready(work)


@pytest.fixture
def killed() -> Iterator[list[processes.Child]]:
    """Children to kill at the end, stopped or not."""
    found: list[processes.Child] = []
    yield found
    processes.kill(*found)


# -- what is read --------------------------------------------------------------------------------------------------------


def test_a_version_stays_until_the_next_update() -> None:
    with _store() as store, store.attach(0) as worker, _open(store.job) as reader:
        first = reader.weights["a"]
        _steps(worker, 3 * (store.arena.buffers + store.arena.readers))
        assert reader.version == 0
        assert reader.newest == store.version
        assert not first.any()
        reader.pull()
        assert reader.version == store.version
        _check(reader)


def test_a_job_has_the_readers_buffer_only_when_a_reader_comes() -> None:
    with _store() as store, store.attach(0) as worker:

        def allocated() -> int:
            return 512 * os.fstat(store.descriptor).st_blocks

        before, buffer_bytes = allocated(), store.arena.reader_weights_range(1)[1]
        spare_bytes = sum(length for _, length in store.arena.spare_ranges())
        assert before == store.arena.reader_weights_range(0)[0] == store.arena.total_bytes - 8 * buffer_bytes - spare_bytes
        with _open(store.job), _open(store.job):
            assert allocated() == before + 2 * buffer_bytes
        with _open(store.job):
            _steps(worker, 20)
            assert before + buffer_bytes <= allocated() <= before + 2 * buffer_bytes, "the other's is given back at some time"


def test_weights_cannot_be_written() -> None:
    with _store() as store, _open(store.job) as reader, pytest.raises(ValueError, match="read-only"):
        reader.weights["a"][0] = 1.0


# -- nobody waits for a reader -------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", ["ssp:1", f"psp:1,1,shards={SHARDS}"])
def test_eight_stopped_readers_of_eight_versions_delay_nobody(sync: str, killed: list[processes.Child]) -> None:
    with _store(sync=sync, workers=2) as store, store.attach(0) as worker:
        other = processes.start(lambda: _train(store, 1, 60))
        worker.wait_for_start()
        for _ in range(8):
            killed.append(_read_and_hold(store.job))
            os.kill(killed[-1].process_id, signal.SIGSTOP)
            _steps(worker, 3)
        began = time.monotonic()
        _steps(worker, 36)
        took_s = time.monotonic() - began
        processes.finish([other], 30)
        assert other.outcome == 60
        assert took_s < 5, "36 steps take some ms"
        with pytest.raises(fastps.AttachError, match="a free place of 8 for readers, found none"):
            _open(store.job)
        for child in killed:
            os.kill(child.process_id, signal.SIGCONT)
        time.sleep(1.2)  # each looks at its version again
        assert all(processes.runs(child.process_id) for child in killed), "a reader saw two versions"


def test_who_finds_no_place_is_told_how_many_its_own_process_has() -> None:
    with _store(max_readers=1) as store, store.attach(0), _open(store.job):
        with pytest.raises(fastps.AttachError, match=r"max_readers \(this process has 1: a reader that is dropped"):
            _open(store.job)


def test_the_place_of_a_killed_reader_is_free() -> None:
    with _store(max_readers=1) as store, store.attach(0) as worker:
        for _ in range(5):
            child = _read_and_hold(store.job)
            _steps(worker, 2)
            with pytest.raises(fastps.AttachError, match="a free place of 1 for readers, found none; close a reader"):
                _open(store.job)
            processes.kill(child)
            _steps(worker, 2 * store.arena.buffers)
        with _open(store.job) as reader:
            _check(reader)
            assert reader.version == store.version


def test_a_readers_child_does_not_keep_its_place(killed: list[processes.Child]) -> None:
    with _store(max_readers=1) as store, store.attach(0):
        reader = _open(store.job)
        killed.append(processes.start_ready(lambda ready: (ready(), time.sleep(60))))
        reader.close()
        with _open(store.job):
            pass


def test_a_forked_child_is_told_to_open_its_own() -> None:
    with _store() as store, store.attach(0), _open(store.job) as reader:
        child = processes.ended(lambda: reader.pull())
        assert child.outcome[0] == "UsageError"
        assert "was made in the parent of this process" in child.outcome[1]
        reader.pull()


# -- waiting, and the end of a job ---------------------------------------------------------------------------------------


def test_wait_returns_at_the_version_and_at_the_end_of_the_job() -> None:
    with _store(workers=1) as store, _open(store.job) as reader:
        child = processes.start(lambda: _train(store, 0, 40))
        assert reader.wait(25)
        reader.pull()
        assert reader.version >= 25
        assert not reader.wait(1000, timeout_s=30)
        assert reader.over
        reader.pull()
        assert reader.version == 40
        _check(reader)
        processes.finish([child], 10)


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_weights_outlive_the_job(is_killed: bool) -> None:
    """All processes of the job end while the reader has its memory."""
    job, told = f"outlived-{os.getpid()}", mmap.mmap(-1, 1)

    def work(ready: Callable[[], object]) -> None:
        with _store(job=job) as store, store.attach(0) as worker:
            _steps(worker, 5)
            ready()
            processes.wait_until(lambda: told[0], 60)

    child = processes.start_ready(work)
    with _open(job) as reader:
        assert not reader.over
        told[0] = not is_killed
        processes.kill(child) if is_killed else processes.results([child], 20)
        assert not reader.wait(6, timeout_s=30)
        reader.pull()
        _check(reader)
        assert reader.version == 5
    with pytest.raises(fastps.AttachError, match="found nobody"):
        WeightsReader(job, 0.1, SYSTEM_CLOCK)


def test_a_job_that_is_killed_and_begun_anew_under_its_name_is_over_for_those_who_look_at_the_first() -> None:
    job = f"anew-{os.getpid()}"

    def first(ready: Callable[[], object]) -> None:
        with _store(job=job) as store, store.attach(0) as worker:
            _steps(worker, 5)
            ready()
            time.sleep(60)

    child = processes.start_ready(first)
    with _open(job) as reader, contextlib.closing(fastps.observe(job)) as observer:
        assert not reader.over and not observer.look().over
        processes.kill(child)
        with _store(job=job) as store, store.attach(0) as worker:
            look = observer.look()
            assert look.over and [row.state for row in look.workers] == ["died"]
            assert not reader.wait(6, timeout_s=30)
            _steps(worker, 9)
            with _open(job) as second:
                assert (reader.newest, second.version, second.over) == (5, 9, False)


def _waits_for_each(job: str, last: int) -> processes.Child:
    """A child that waits for every version until `last`, as a process that sleeps."""

    def work(ready: Callable[[], object]) -> None:
        with _open(job) as reader:
            ready()
            while reader.version < last:
                assert reader.wait(timeout_s=60)
                reader.pull()
                _check(reader)

    return processes.start_ready(work)


@pytest.mark.timing
def test_a_commit_wakes_a_sleeping_process_at_once() -> None:
    """Without the wake each version would be seen at the end of a slice of 200 ms."""
    versions = 40
    with _store() as store, store.attach(0) as worker:
        child = _waits_for_each(store.job, versions)
        began = time.monotonic()
        for _ in range(versions):
            time.sleep(0.01)  # the reader has seen the last version, and sleeps
            _steps(worker, 1)
        processes.results([child], 30)
        assert child.ended_at - began < 0.1 * versions


@pytest.mark.slow
def test_a_sleeping_reader_survives_the_kill_of_combiners() -> None:
    """Workers are killed at any moment of their pushes; the reader still sees the versions of the one that is left."""
    with _store(sync="asp", workers=4, on_worker_loss="continue") as store, store.attach(0) as worker:
        others = [processes.start(lambda rank=rank: _train(store, rank, 1_000_000)) for rank in range(1, 4)]
        with _open(store.job) as reader:
            for other in others:
                assert reader.wait(reader.newest + 50, timeout_s=30)
                os.kill(other.process_id, signal.SIGKILL)
                reader.pull()
            processes.finish(others, 10)
            _steps(worker, 20)  # recovers the locks
            wanted = reader.newest + 30
            with ThreadPoolExecutor(1) as threads:
                seen = threads.submit(reader.wait, wanted, timeout_s=30)
                _steps(worker, 40)
            assert seen.result()
            reader.pull()
            _check(reader)


@pytest.mark.slow
def test_a_reader_that_is_stopped_in_its_sleep_delays_nobody_and_goes_on() -> None:
    with _store() as store, store.attach(0) as worker:
        child = _waits_for_each(store.job, 500)
        _steps(worker, 10)
        processes.stop(child.process_id)
        began = time.monotonic()
        _steps(worker, 490)
        assert time.monotonic() - began < 10, "490 steps take some ms"
        os.kill(child.process_id, signal.SIGCONT)
        processes.results([child], 30)


def test_a_wait_without_a_new_version_ends_with_the_timeout() -> None:
    with _store() as store, store.attach(0), _open(store.job) as reader:
        with pytest.raises(fastps.TimeoutExceededError, match="expected version 1, found version 0 and no newer one for"):
            reader.wait(timeout_s=0.2)


def test_a_closed_reader_says_so() -> None:
    with _store() as store, store.attach(0):
        reader = _open(store.job)
        reader.close()
        reader.close()
        for call in (reader.pull, reader.wait, lambda: reader.weights):
            with pytest.raises(fastps.UsageError, match="is closed: open another"):
                call()


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_a_job_without_places_refuses_readers() -> None:
    with _store(max_readers=0) as store, store.attach(0):
        with pytest.raises(fastps.AttachError, match="a free place of 0 for readers, found none"):
            _open(store.job)


def test_the_environment_says_how_many_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_MAX_READERS", "3")
    with _store() as store:
        assert store.arena.readers == 3
    with _store(max_readers=1) as store:
        assert store.arena.readers == 1
    with pytest.raises(fastps.UsageError, match=r"expected max_readers to be a whole number of 0 \(none\) to [0-9]+, found -1"):
        _store(max_readers=-1)


def test_many_workers_leave_fewer_buffers_for_readers() -> None:
    with fastps.Store.create({"w": np.zeros(4, np.float32)}, fastps.SGD(lr=1.0), workers=120) as store:
        assert (store.arena.buffers, store.arena.readers) == (123, 4)


def test_a_reader_without_memory_for_its_buffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with _store() as store, store.attach(0) as worker:
        memory = psutil.virtual_memory()
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1000))
        with pytest.raises(fastps.ArenaError, match=r"reader 0 of job .* needs .* of the arena, found 0.0 MiB free"):
            _open(store.job)
        monkeypatch.undo()
        _steps(worker, 3)
        with _open(store.job) as reader:
            _check(reader)


def test_another_users_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    with _store() as store, store.attach(0):
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(fastps.AttachError, match=f"answers for another user: expected user {user + 1}, found {user}"):
            _open(store.job)
