"""What a replay of a recorded job needs beside its steps and pushes: inputs, events, checksums, and what must be the same.

Events are those that this worker's lane gave the schedulers, in its commits. Together all workers, and the server process if
there is one, have every commit of the job.
"""

import hashlib
import json
import logging
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fastps.job import environment
from fastps.job.layout import Layout
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.membership.job_memory import JobMemory
from fastps.tracing.file import TraceError
from fastps.tracing.parts import Part

logger = logging.getLogger("fastps.trace")

CHECKSUM_EVERY = 256
"""Versions between two checksums: those of worker 0's reads, at 1 ms for 4 MB of weights."""
_SAMPLE_WORDS = 1024


class Recorded(Protocol):
    """The part of a worker that a recorder reads."""

    rank: int
    store: JobMemory
    lane: WorkerLane
    buffers: list[int]
    generation: int
    recorder: Any
    injected_transfer_ns: int
    cores: Any  # its `spins` tells whether waiting workers spin

    @property
    def posts(self) -> int:
        """Number of pushes so far."""


def reason_against(layout: Layout) -> str:
    """What of this job cannot be replayed, as the end of a sentence; "" if all can."""
    found = {
        "in virtual time already": environment.is_virtual(),
        "of several nodes": layout.is_leaf,
        "whose weights or gradients lie on devices": bool(layout.owner_lanes or layout.slot_owners),
        f"with tables (sparse=True) under {layout.policy.spec}, whose workers may read rows while they change,": bool(
            layout.tables and not (layout.policy.is_level and layout.policy.pull == 1)
        ),
        'under sync="auto"': bool(layout.policy.warm_up),
    }
    return next((reason for reason, holds in found.items() if holds), "")


def described(worker: Recorded) -> dict[str, Any]:
    """What a trace's header says for a replay."""
    layout, file = worker.store.layout, Path(sys.argv[0])
    if reason := reason_against(layout):
        return {"against": reason}
    script = {"name": file.name, "digest": digest_of(file), "arguments": sys.argv[1:]}
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {
        "against": "",
        "model": model_digest(layout),
        "nonfinite": layout.faults.nonfinite,
        "script": script,
        "threads": threads,
        "workers": layout.workers,
        "lanes": layout.lanes,
    }


def digest_of(file: Path) -> str:
    """A digest of a script's text; "" without one, in a notebook say."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def model_digest(layout: Layout) -> str:
    """A digest of what a replay must not differ in: parameters, update rule, groups, discipline, number of workers."""
    found = json.loads(layout.text())
    found["faults"] = layout.faults.nonfinite
    for name in ("abi", "server", "extra_bytes"):
        del found[name]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def gradient_sample(store: JobMemory, lane: int, slot: int) -> int:
    """CRC-32 of up to 1,024 words of the gradient in a slot, and of each table's rows: tells steps apart, in microseconds."""
    words = store.layout.buffer_floats // (1 if store.layout.gradient_type in ("float32", "float64") else 2)
    pushed = [np.frombuffer(store.memory, np.uint32, words, store.arena.gradient_offset(lane, slot))]
    if store.tables:
        present = store.slot_words(lane, slot)[1]
        pushed += [
            store.pushed_rows(lane, slot, table)[1].reshape(-1).view(np.uint32) for table in store.tables if present[table]
        ]
    found = 0
    for each in pushed:
        found = zlib.crc32(np.ascontiguousarray(each[:: -(-len(each) // _SAMPLE_WORDS) | 1]), found)
    return found


def weights_checksum(store: JobMemory, buffers: Sequence[int], shard: int) -> int:
    """CRC-32 of one shard's weights, in one buffer per shard."""
    found = 0
    for parameter, view in zip(store.parameters, store.weight_views(buffers), strict=True):
        if parameter.shard == shard:
            found = zlib.crc32(view, found)
    return found


def final_checksums(store: JobMemory) -> list[int]:
    """The checksum of each shard's published weights."""
    buffers = store.committed()[0]
    return [weights_checksum(store, buffers, shard) for shard in range(store.arena.shards)]


def log_events(lane: Lane, folder: Path, writer: str) -> None:
    """Log what a lane commits from now on, into a file for each shard. Raises OSError."""
    files = [folder / f"{writer}.{shard}.events" for shard in range(lane.arena.shards)]
    descriptors: list[int] = []
    try:
        for file in files:
            descriptors.append(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    lane.log_events(descriptors)


def log_server(lane: Lane, layout: Layout, folder: str) -> None:
    """Log what a server commits beside the parts of a job's workers; "": the job is not recorded."""
    if not folder or reason_against(layout):
        return
    try:
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        log_events(lane, Path(folder), "server")
    except OSError as error:
        logger.warning("the server's commits cannot be recorded: %s; the run cannot be replayed, and training goes on", error)


class ReplayRecords:
    """One worker's records for a replay. Methods raise TraceError if they cannot be written."""

    def __init__(self, worker: Recorded, part: Part) -> None:
        self._worker, self._tables = worker, part.more
        self._next = [0] * worker.store.arena.shards  # worker 0's next checksum, by shard
        try:
            log_events(worker.lane, part.folder, part.name)
        except OSError as error:
            raise TraceError(f"the trace's records cannot be written: {error}; choose another file") from None
        if not worker.generation:  # a worker that joins has read nothing yet
            self.collect()

    def computed(self, position: int, slot: int, timestamp: int) -> None:
        """Record what a push was computed with, and the version that it names; `slot`: -1 for one without a gradient."""
        worker, lane = self._worker, self._worker.lane
        sample = gradient_sample(worker.store, worker.rank, slot) if slot >= 0 else 0
        for shard in range(worker.store.arena.shards):
            self._tables["inputs"].append((position, lane.shard_version(shard), timestamp, sample, worker.rank, shard, 1))
        self.collect()

    def end(self) -> None:
        """Write what is due, and record no more."""
        self._worker.lane.log_events([])
        if not self._worker.store.tables:  # whose rows others may change by now
            self.collect()

    def collect(self) -> None:
        """Write the checksums that are due, as worker 0."""
        worker, lane = self._worker, self._worker.lane
        if worker.rank:
            return
        for shard, due in enumerate(self._next):
            if (version := lane.shard_version(shard)) >= due:
                checksum = weights_checksum(worker.store, worker.buffers, shard)
                self._tables["checksums"].append((version, checksum, shard, 1))
                self._next[shard] = version + CHECKSUM_EVERY
