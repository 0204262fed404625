"""A reader's sleep on plain memory: which commits wake it, that no wake is missed, and what a killed reader leaves behind."""

import struct
import threading
import time

import numpy as np
import pytest

from fastps.kernels.protocol import lane as codes
from fastps.kernels.protocol.reader_pins import ReaderPins
from fastps.kernels.shm.offsets import OFFSETS, header_of
from tests.support import plain_arena

LONG_NS = 60_000_000_000  # a missed wake would last so long
LIMIT_S = 30.0


class Job(plain_arena.Job):
    """An arena of this process with one worker, some readers, and a parameter in each shard."""

    def __init__(self, readers: int = 2, shards: int = 1) -> None:
        super().__init__(1, plain_arena.ASP, shards=shards, readers=readers)
        self.lane = self.lanes[0]
        self.readers = [ReaderPins(self.arena, index) for index in range(readers)]
        self.words = header_of(self.memory)["reader_words_offset"]
        for reader in self.readers:
            reader.begin()

    def push(self) -> None:
        """Post a push."""
        self.post(0, 1.0, self.posts[0])

    def step(self) -> None:
        """Make a version of each shard."""
        self.push()
        assert self.lane.try_combine() == codes.DONE

    @property
    def wanted(self) -> int:
        return int(struct.unpack_from("<Q", self.memory, self.words + OFFSETS["readers.wanted"])[0])

    @property
    def event(self) -> int:
        return int(struct.unpack_from("<I", self.memory, self.words + OFFSETS["readers.event"])[0])


class Sleeper(threading.Thread):
    """A thread that waits for versions; `seen` has, after its end, whether each came before a slice ended."""

    def __init__(self, reader: ReaderPins, versions: list[int]) -> None:
        super().__init__(daemon=True)
        self._reader, self._versions = reader, versions
        self.seen: list[bool] = []
        self.start()

    def run(self) -> None:
        for version in self._versions:
            began = time.monotonic()
            while not (reached := self._reader.wait(version, LONG_NS)):  # woken for another's version
                if time.monotonic() - began > LONG_NS / 1e9:
                    break
            self.seen.append(reached)

    def end(self) -> None:
        """Wait until all versions have come."""
        self.join(LIMIT_S)
        assert not self.is_alive() and all(self.seen), "a wake was missed"


def _await(job: Job, wanted: int) -> None:
    """Wait until a reader says that it sleeps for the version; it sleeps a moment later."""
    deadline = time.monotonic() + LIMIT_S
    while job.wanted != wanted:
        assert time.monotonic() < deadline, f"expected version {wanted} to be wanted, found {job.wanted}"
        time.sleep(0.0005)
    time.sleep(0.005)


def test_a_version_that_is_there_needs_no_sleep_and_no_word_and_a_commit_wakes_nobody_where_nobody_sleeps() -> None:
    job = Job()
    for _ in range(5):
        job.step()
    assert job.readers[0].wait(1, LONG_NS)
    assert (job.wanted, job.event) == (0, 0)


def test_a_slice_that_ends_before_the_version_returns_false() -> None:
    job = Job()
    assert not job.readers[0].wait(1, 1_000_000)
    assert job.wanted == 1


def test_the_commit_of_the_version_wakes_the_sleeper_and_earlier_ones_do_not() -> None:
    job = Job()
    sleeper = Sleeper(job.readers[0], [4])
    _await(job, 4)
    for _ in range(3):
        job.step()
    assert (job.wanted, job.event) == (4, 0)
    job.step()
    sleeper.end()
    assert (job.wanted, job.event) == (0, 1)


def test_all_readers_wake_for_the_first_and_those_that_need_more_sleep_again() -> None:
    job = Job()
    early, late = Sleeper(job.readers[0], [1]), Sleeper(job.readers[1], [3])
    _await(job, 1)
    job.step()
    early.end()
    _await(job, 3)
    assert late.is_alive()
    job.step()
    job.step()
    late.end()


def test_a_reader_waits_for_the_last_shard() -> None:
    job = Job(shards=3)
    assert job.lane.hold(1)
    sleeper = Sleeper(job.readers[0], [1])
    _await(job, 1)
    job.push()
    assert job.lane.try_combine() == codes.BUSY  # shards 0 and 2 commit, and this lane holds the lock of shard 1
    assert [job.arena.shard_version(shard) for shard in range(3)] == [1, 0, 1]
    _await(job, 1)
    assert sleeper.is_alive()
    assert job.lane.release(False, 1) == codes.DONE
    sleeper.end()


def test_a_reader_that_was_killed_in_its_sleep_costs_one_call() -> None:
    job = Job()
    assert not job.readers[0].wait(2, 1)  # nobody takes its wish back
    job.step()
    assert (job.wanted, job.event) == (2, 0)
    for _ in range(3):
        job.step()
    assert (job.wanted, job.event) == (0, 1)


def test_the_recovery_of_a_lock_wakes_readers_whose_wish_the_dead_combiner_took() -> None:
    job = Job()
    assert job.lane.hold()
    sleeper = Sleeper(job.readers[0], [1])
    _await(job, 1)
    struct.pack_into("<Q", job.memory, job.words + OFFSETS["readers.wanted"], 0)  # as one that died before it moved the event
    event = job.event
    assert job.lane.recover_lock(0) == codes.DONE
    assert job.event == event + 1
    _await(job, 1)
    job.step()
    sleeper.end()


@pytest.mark.parametrize("shards", [1, 3])
def test_threads_that_sleep_for_each_version_miss_no_wake(shards: int) -> None:
    """Readers fall asleep while the version is made, again and again: a missed wake would last a minute."""
    versions, job = 1_500, Job(readers=3, shards=shards)
    rng = np.random.default_rng(1)
    sleepers = [
        Sleeper(job.readers[0], list(range(1, versions + 1))),
        Sleeper(job.readers[1], list(range(2, versions + 1, 2))),
        Sleeper(job.readers[2], [versions]),
    ]
    for pause in rng.integers(0, 3, versions).tolist():
        if pause == 0:
            _nap(job, sleepers[0])
        job.step()
    for sleeper in sleepers:
        sleeper.end()


def _nap(job: Job, sleeper: Sleeper) -> None:
    """Let the first reader come as far as the last version."""
    deadline = time.monotonic() + LIMIT_S
    while len(sleeper.seen) < job.posts[0]:
        assert time.monotonic() < deadline, "a wake was missed"
        time.sleep(0)
