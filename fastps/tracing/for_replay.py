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
from fastps.job.limits import fold_threads
from fastps.kernels.protocol.lane import Lane
from fastps.membership.job_memory import JobMemory
from fastps.tracing.file import TraceError
from fastps.tracing.parts import Part

logger = logging.getLogger("fastps.trace")

CHECKSUM_EVERY = 256
"""Versions between two checksums: those of worker 0's reads, at 1 ms for 4 MB of weights."""
CHECKSUM_BYTES = 1 << 22  # of a gradient, in a checksum
CHECKSUM_OF_GRADIENTS = 2  # how it is made
_MOST_RUNS = 256  # lists of them that are kept
_WIDTH = 509  # prime, so that values that change places change it


class Recorded(Protocol):
    """The part of a worker that a recorder reads."""

    rank: int
    store: JobMemory
    lane: Lane
    buffers: list[int]
    generation: int
    recorder: Any
    cores: Any  # its `spins` tells whether waiting workers spin

    @property
    def injected_transfer_ns(self) -> int:
        """What each transfer takes, in ns; 0 but in measurements with injected delays."""

    @property
    def posts(self) -> int:
        """Number of pushes so far."""


def reason_against(layout: Layout) -> str:
    """What of this job cannot be replayed, as the end of a sentence; "" if all can."""
    found = {
        "in virtual time already": environment.is_virtual(),
        "of several nodes": layout.has_agent,
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
    torch = sys.modules.get("torch")
    threads = str(torch.get_num_threads()) if torch is not None else os.environ.get("OMP_NUM_THREADS", "1")
    return {
        "against": "",
        "model": model_digest(layout),
        "nonfinite": layout.faults.nonfinite,
        "script": script,
        "threads": threads,
        "fold_threads": fold_threads(layout, int(threads)) if layout.rule.runs_in_python else 1,
        "gradients": CHECKSUM_OF_GRADIENTS,
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


class GradientChecksum:
    """Checksums of what pushes have in their slots: of all up to `CHECKSUM_BYTES`, and of more of every n-th part of 4 KB."""

    def __init__(self, store: JobMemory) -> None:
        self._store, self._words = store, 8 * -(-len(store.parameters) // 64)
        self._dtype = np.dtype(np.uint32 if store.layout.gradient_type in ("float32", "float64") else np.uint16)
        self._runs: dict[bytes, list[tuple[int, int]]] = {}  # by presence bits

    @property
    def is_partial(self) -> bool:
        """Whether a gradient of this job is so large that a part of it does not count."""
        return self._store.layout.buffer_floats * self._dtype.itemsize > CHECKSUM_BYTES

    def of(self, lane: int, slot: int) -> int:
        """The checksum of the push in a lane's slot."""
        store, begin = self._store, self._store.arena.gradient_offset(lane, slot)
        presence = np.frombuffer(store.memory, np.uint8, self._words, store.arena.presence_offset(lane, slot))
        if (runs := self._runs.get(bits := presence.tobytes())) is None:
            if len(self._runs) > _MOST_RUNS:
                self._runs.clear()
            present = np.unpackbits(presence, count=len(store.parameters), bitorder="little")
            runs = self._runs[bits] = store.layout.runs(np.flatnonzero(present).tolist())
        kind, memory = self._dtype, store.memory
        pushed = [np.frombuffer(memory, kind, count, begin + first * kind.itemsize) for first, count in runs]
        for table in store.tables:
            if presence[table // 8] >> table % 8 & 1:
                pushed += [part.reshape(-1) for part in store.pushed_rows(lane, slot, table)]
        every, found = max(1, -(-sum(each.nbytes for each in pushed) // CHECKSUM_BYTES)), 0
        for each in pushed:
            rows = each.nbytes // (8 * _WIDTH)
            if rows:
                part, each = np.split(each, [rows * 8 * _WIDTH // each.itemsize])
                found = zlib.crc32(np.add.reduce(part.view(np.uint64).reshape(rows, _WIDTH)[::every]), found)  # wraps around
            found = zlib.crc32(each, found)
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
        self._gradients = GradientChecksum(worker.store)
        try:
            log_events(worker.lane, part.folder, part.name)
        except OSError as error:
            raise TraceError(f"the trace's records cannot be written: {error}; choose another file") from None
        if not worker.generation:  # a worker that joins has read nothing yet
            self.collect()

    def computed(self, position: int, slot: int, timestamp: int) -> None:
        """Record what a push was computed with, and the version that it names; `slot`: -1 for one without a gradient."""
        worker, lane = self._worker, self._worker.lane
        sample = self._gradients.of(worker.rank, slot) if slot >= 0 else 0
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
