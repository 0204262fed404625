"""A reader never sees two versions in one shard: very many looks, while workers push without a pause.

Every push adds one to every weight, so all weights of a shard equal its version. FASTPS_LOOKS sets the number of looks of the
slow test; the same looks at memory that is written in place show that the check finds mixtures.
"""

import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import fastps
from fastps.store.reader import WeightsReader
from fastps.system.clock import SYSTEM_CLOCK
from tests.support import processes

LOOKS = int(float(os.environ.get("FASTPS_LOOKS", "1e6")))
READERS, WORKERS, SHARDS = 4, 2, 3
LENGTHS = {"a": 16, "b": 4_000, "c": 60_000}  # floats: less than a cache line, several pages, more than a core's first cache
LEAST_VERSIONS = 20  # of a reader: looks at a job that nobody trains would prove nothing
WRITTEN = 60_000
PUBLISHED = {"a": 4, "b": 700, "c": 2_000}  # 64-bit integers, which hold every version
MOST_PUSHES = 2**23  # beyond twice that, a float32 does not hold each version
_LIMIT_S = 3000.0


def _store(sync: str, server: str) -> fastps.Store:
    weights = {name: np.zeros(length, np.float32) for name, length in LENGTHS.items()}
    return fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=WORKERS, server=server)


def _push_until(store: fastps.Store, rank: int, is_over: Callable[[], bool]) -> int:
    pushes = 0
    with store.attach(rank) as worker:
        while not is_over() and pushes < MOST_PUSHES:
            for gradient in worker.gradients.values():
                gradient[:] = -1.0
            worker.step()
            pushes += 1
    return pushes


def _look(job: str, looks: int) -> tuple[int, int]:
    """Update and look, `looks` times and until some versions were seen. Returns the number of versions, and of mixtures."""
    versions, mixtures, done = 0, 0, 0
    last = -1
    with WeightsReader(job, 10.0, SYSTEM_CLOCK) as reader:
        shard_of = {parameter.name: parameter.shard for parameter in reader._memory.parameters}
        while done < looks or versions < LEAST_VERSIONS:
            reader.pull()
            now = reader.versions
            versions, last = versions + (now[0] != last), now[0]
            for name, values in reader.weights.items():
                done += 1
                mixtures += not _is_whole(values, now[shard_of[name]])
    return versions, mixtures


def _is_whole(values: npt.NDArray[np.float32], version: int) -> bool:
    return bool((values == np.float32(version)).all())


@pytest.mark.parametrize(("sync", "server", "looks"), [
    ("asp", "workers", 20_000),
    ("asp", "process", 2_000),
    pytest.param(f"asp,shards={SHARDS}", "workers", LOOKS, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
])  # fmt: skip
def test_no_look_sees_two_versions_in_one_shard(sync: str, server: str, looks: int) -> None:
    over = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
    with _store(sync, server) as store:
        workers = processes.start_each(lambda rank: _push_until(store, rank, lambda: bool(over[0])), WORKERS)
        readers = [processes.start(lambda: _look(store.job, looks // READERS)) for _ in range(READERS)]
        processes.finish(readers, _LIMIT_S)
        over[0] = 1
        processes.finish(workers, 60)
    assert all(child.exit_code == 0 for child in (*workers, *readers)), [child.outcome for child in (*workers, *readers)]
    assert [mixtures for _, mixtures in (child.outcome for child in readers)] == [0] * READERS
    assert all(versions >= LEAST_VERSIONS for versions, _ in (child.outcome for child in readers))


def _publish_until(job: str, is_over: Callable[[], bool], ready: Callable[[], object]) -> int:
    """Publish tensors that all hold the version's number. Returns the last version."""
    tensors = {name: torch.zeros(length, dtype=torch.int64) for name, length in PUBLISHED.items()}
    torch.set_num_threads(1)
    with fastps.Publisher(tensors, job) as publisher:
        ready()
        while not is_over():
            for each in tensors.values():
                each.fill_(publisher.version + 1)
            publisher.publish(tag={"version": publisher.version + 1})
        return publisher.version


def _look_at_all(job: str, looks: int) -> tuple[int, int]:
    """As `_look`, at all tensors of a publisher, and now and then at the tag."""
    versions, mixtures, last, look = 0, 0, -1, 0
    arrays: dict[int, list[Any]] = {}  # of each weights buffer
    with WeightsReader(job, 10.0, SYSTEM_CLOCK) as reader:
        while look < looks or versions < LEAST_VERSIONS:
            look += 1
            reader.pull()
            now, (buffer,) = reader.version, reader.buffers
            versions, last = versions + (now != last), now
            if buffer not in arrays:
                arrays[buffer] = list(reader.weights.values())
            is_whole = all([(values == now).all() for values in arrays[buffer]])
            mixtures += not is_whole or (look % 16 == 0 and reader.tag not in ({}, {"version": now}))
    return versions, mixtures


@pytest.mark.parametrize("looks", [10_000, pytest.param(LOOKS, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_look_sees_two_versions_of_a_publisher(looks: int) -> None:
    job, over = f"looks-{os.getpid()}", np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
    publisher = processes.start_ready(lambda ready: _publish_until(job, lambda: bool(over[0]), ready))
    began = time.monotonic()
    readers = [processes.start(lambda: _look_at_all(job, looks // 2)) for _ in range(2)]
    processes.finish(readers, _LIMIT_S)
    over[0] = 1
    (published,) = processes.results([publisher], 60)
    found = processes.results(readers, 1)
    print(
        f"{looks} looks at {sum(versions for versions, _ in found)} versions of {published}, {time.monotonic() - began:.0f} s"
    )
    assert [mixtures for _, mixtures in found] == [0, 0]
    assert min(versions for versions, _ in found) >= LEAST_VERSIONS


def test_the_same_looks_find_mixtures_where_weights_are_written_in_place() -> None:
    """Without it, looks that find nothing would prove nothing."""
    shared = np.frombuffer(mmap.mmap(-1, 4 * WRITTEN + mmap.PAGESIZE), np.float32)[:WRITTEN]
    over = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)

    def write() -> None:
        while not over[0]:
            np.add(shared, np.float32(1.0), out=shared)

    writer = processes.start(write)
    deadline = time.monotonic() + 30
    mixtures = 0
    while not mixtures and time.monotonic() < deadline:
        mixtures += not _is_whole(shared, int(shared[0]))
    over[0] = 1
    processes.finish([writer], 10)
    assert writer.exit_code == 0
    assert mixtures
