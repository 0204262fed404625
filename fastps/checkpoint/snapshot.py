"""A consistent copy of a running job: a worker pins a published version, copies and writes it while the other workers go on.

A checkpoint is written under a temporary name, flushed to the disk, then renamed: a folder with the final name is complete, and
a full disk leaves the earlier checkpoints as they are.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors

from fastps.checkpoint.format import (
    FORMAT,
    JSON_FILE,
    PREFIX,
    TENSORS_FILE,
    Array,
    checksum_of,
    described,
    described_rule,
    has_values,
    header_sum,
    momenta,
    number_of,
    planes_of,
    sealed,
    shaped,
    whole,
    write_tensors,
)
from fastps.checkpoint.runs import Run
from fastps.errors import CheckpointError, ProtocolError, UsageError
from fastps.job import environment, limits
from fastps.job.layout import Parameter
from fastps.membership.job_memory import JobMemory, VersionCopy
from fastps.store.worker import Worker
from fastps.system.memory_limits import available_bytes
from fastps.system.time_limit import call_within, locked
from fastps.version import __version__

logger = logging.getLogger("fastps.checkpointing")

KEPT = 2  # a run's newest checkpoints to keep; its older ones are removed when a new one is complete
_UNFINISHED = ".unfinished-"


class VersionInUseError(Exception):
    """Another worker has pinned a version to copy it."""


class Pinned(Protocol):
    """A version that is pinned while it is written."""

    @property
    def description(self) -> dict[str, Any]:
        """The contents of the JSON file."""

    @property
    def holds_locks(self) -> bool:
        """Whether the other workers wait until `close`, which only the worker's own thread may call then."""

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """The name and the array of each tensor."""

    def close(self) -> None:
        """Unpin. May be called twice."""


class PinnedVersion:
    """A whole version of a job, pinned while it is copied. The workers go on. Close it soon.

    A worker creates it between two steps. Only one worker at a time has one: with `waits` this worker waits for the other, else
    VersionInUseError is raised. Under disciplines that keep all workers at the same step, all shards have the same version;
    under others each shard has its own, as in a pull. `home` is given to pin another arena's version, a home's: that arena, and
    the lane for which it is pinned. `more` is saved beside it: fields of the JSON file, and arrays.

    A table lies in memory once, so only the shard locks keep its rows at one version: the worker copies the tables in memory,
    and then releases the locks. Without room for that it holds them until `close`, which its own thread has to call then.
    """

    def __init__(
        self,
        worker: Worker,
        param_groups: list[dict[str, Any]],
        extra: Mapping[str, Any],
        *,
        waits: bool = True,
        home: tuple[JobMemory, int] | None = None,
        more: tuple[Mapping[str, Any], Mapping[str, Array]] = ({}, {}),
    ) -> None:
        store, self._rank = home or (worker.store, worker.rank)
        self._store, self._generation = store, 0 if home else worker.generation
        self._shards = 0
        self._copy: VersionCopy | None = None
        self._locking: Worker | None = None  # its shard locks are held
        self._tables: dict[str, Array] = {}  # copies
        pinned = []
        try:
            if store.tables:
                worker.lock_shards()
                self._locking = worker
            for shard in range(store.arena.shards):
                pinned.append(self._pin(worker, shard, waits))
                self._shards += 1
            state = [found[2] for found in pinned]
            self._copy = store.copy_version([found[1] for found in pinned], state)
            self.description = {**self._described(pinned, param_groups, extra), **more[0]}
            self._more = more[1]
            if home is None and self.description["clocks"][worker.rank : worker.rank + 1] == [-1]:
                self.description["clocks"][worker.rank] = worker.steps  # it has left
            if store.tables:
                self._copy_tables()
        except BaseException:
            self.close()
            raise

    def _pin(self, worker: Worker, shard: int, waits: bool) -> tuple[int, int, int, list[int]]:
        """Pin a shard's published weights and optimizer state: (version, weights buffer, state buffer, clocks)."""

        def pinned() -> tuple[int, int, int, list[int]] | None:
            try:
                return self._store.arena.pin_version(self._rank, shard)
            except ValueError as error:
                raise ProtocolError(f"shard {shard}: {error}; restart the job") from error

        worker.check_open()
        if waits:
            text = f"worker {worker.rank} waited to copy version {self._store.version}, because another one still copies one"
            return worker.wait_until(pinned, 1_000_000, lambda: text)
        found = pinned()
        if found is None:
            raise VersionInUseError
        return found

    def _described(
        self, pinned: list[tuple[int, int, int, list[int]]], param_groups: list[dict[str, Any]], extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        layout, arena = self._store.layout, self._store.arena
        steps = self._store.rule_steps([found[2] for found in pinned])
        return {
            "format": FORMAT,
            "fastps": __version__,
            "version": min(found[0] for found in pinned),
            "versions": [found[0] for found in pinned],
            "clocks": pinned[0][3][: layout.workers],
            "drawn": arena.drawn,
            "workers": layout.workers,
            "sync": layout.policy.spec,
            "rule": described_rule(layout),
            "parameters": [
                {**described(parameter), "steps": int(count[0])}
                for parameter, count in zip(layout.parameters, steps, strict=True)
            ],
            "param_groups": param_groups,
            "extra": dict(extra),
        }

    @property
    def holds_locks(self) -> bool:
        """See Pinned."""
        return self._locking is not None

    def _copy_tables(self) -> None:
        tables = {name: array for name, parameter, array in self._tensors() if parameter.is_table}
        needed, free = sum(array.nbytes for array in tables.values()), available_bytes()[0]
        if 2 * needed > free:
            logger.warning(
                "the other workers wait while a checkpoint is written: a copy of its tables needs %d MB, found %d MB free",
                needed >> 20, free >> 20,
            )  # fmt: skip
            return
        self._tables = {name: array.copy() for name, array in tables.items()}
        self._unlock()

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """The name and the array of each tensor. The arrays are valid until `close`."""
        for name, _, array in self._tensors():
            yield name, self._tables.get(name, array)
        for name, parameter, view in momenta(self._store):
            yield name, shaped(view, parameter).copy()  # its worker goes on writing it
        yield from self._more.items()

    def _tensors(self) -> Iterator[tuple[str, Parameter, Array]]:
        layout, copy = self._store.layout, self._copy
        assert copy is not None
        for prefix, number in planes_of(layout):
            for parameter, view in zip(layout.parameters, copy.views(number), strict=True):
                if has_values(view, parameter):
                    yield prefix + parameter.name, parameter, shaped(view, parameter)

    def close(self) -> None:
        """Unpin the buffers, once nothing reads them, and release the shard locks if they are held. May be called twice."""
        if self._copy is not None and self._shards:
            self._copy.end()
        while self._shards:
            self._shards -= 1
            self._store.arena.unpin_version(self._rank, self._shards, self._generation)
        self._unlock()

    def _unlock(self) -> None:
        worker, self._locking = self._locking, None
        if worker is not None:
            worker.unlock_shards(False)


class Source(Protocol):
    """The interface that `save` needs of an optimizer."""

    @property
    def worker(self) -> Worker:
        """The optimizer's worker."""

    def pin_whole_version(self, extra: Mapping[str, Any], *, waits: bool = True) -> Pinned:
        """Pin the published version, with the optimizer's own description of it."""

    def adopt_first(self) -> None:
        """Make what a script has written before its first step the job's weights."""

    def model_buffers(self) -> Mapping[str, Array]:
        """Name to array of the model's buffers."""

    @property
    def run(self) -> Run:
        """The run to which the job belongs."""


def pin(source: Source | Worker, extra: Mapping[str, Any], *, waits: bool = True) -> Pinned:
    """Pin the published version of a job. For a plain Worker the param_groups are its store's hyper-parameters."""
    if not isinstance(source, Worker):
        return source.pin_whole_version(extra, waits=waits)
    groups = [dict(hyper._asdict()) for hyper in source.store.hypers]
    return PinnedVersion(source, groups, extra, waits=waits)


def save(
    source: Source | Worker, directory: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None, keep: int = KEPT
) -> Path:
    """Write a checkpoint of the job of `source`, a DistributedOptimizer or a Worker between two steps. Return its folder.

    This worker waits until the checkpoint is written; the others go on. `extra` is saved with it and may hold anything that
    JSON can. Of this run's checkpoints in the directory the newest `keep` stay and the one that it resumed, of other runs' all.

    Raises CheckpointError if the checkpoint cannot be written (a full disk, for example), or not within the job's timeout, and
    then leaves the earlier ones as they were; UsageError after close or in a forked child.

    >>> import tempfile
    >>> import fastps
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=0.5)) as store,
    ...     store.attach(0) as worker,
    ... ):
    ...     worker.step({"w": np.ones(3)})
    ...     found = fastps.load(fastps.save(worker, folder, extra={"seed": 7}))
    >>> found.version, found.weights()["w"].tolist(), found.extra["seed"]
    (1, [0.5, 0.5, 0.5], 7)
    """
    buffers: Mapping[str, Array] = {}
    if isinstance(source, Worker):
        worker, run = source, Run.of(source.store)
    elif not hasattr(source, "adopt_first"):
        raise UsageError(f"expected a DistributedOptimizer or a Worker, found {type(source).__name__}")
    else:
        source.adopt_first()
        worker, buffers, run = source.worker, source.model_buffers(), source.run
    limit_s, pinned = worker.store.timeout_s, pin(source, extra or {})
    copied = {name: array.copy() for name, array in buffers.items()}  # a late write must not see later values
    call = partial(write, pinned, copied, folder := environment.checkpoints_of(directory), run, keep, limit_s / 2)
    if environment.is_virtual():
        logger.warning("in virtual time this checkpoint is kept until the run ends, in %s; --checkpoint keeps the last", folder)
    if pinned.holds_locks:  # which this thread alone gives back
        return call()
    what = f"the checkpoint of version {pinned.description['version']} is written to {directory}"
    try:
        return call_within(limit_s, call, what)
    except TimeoutError:
        raise CheckpointError(
            f"checkpoint in {directory}: cannot be written within {limit_s:g} s: the disk hangs, or is slow"
        ) from None


def write(
    pinned: Pinned, buffers: Mapping[str, Array], directory: Path, run: Run, keep: int = KEPT, limit_s: float | None = None
) -> Path:
    """Write a pinned version as the newest checkpoint of a directory, unpin it, and delete old ones that its run may delete.

    Waits for another writer of the directory for at most `limit_s`, by default FASTPS_TIMEOUT. Raises CheckpointError.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory, limits.timeout_s(limit_s)) as descriptor:
            for left in directory.glob(_UNFINISHED + "*"):
                shutil.rmtree(left, ignore_errors=True)  # from a process that died: only the lock's holder writes
            number = 1 + max((number_of(folder) for folder in whole(directory)), default=0)
            unfinished, folder = directory / f"{_UNFINISHED}{number}", directory / f"{PREFIX}{number:06d}"
            try:
                unfinished.mkdir()
                _write_files(unfinished, pinned, buffers, run)
                unfinished.rename(folder)
                os.fsync(descriptor)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            for old in [found for found in whole(directory) if run.may_delete(found)][: -max(1, keep)]:
                shutil.rmtree(old, ignore_errors=True)
            return folder
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint in {directory}: cannot be written ({error}); the earlier checkpoints are unchanged"
        ) from error
    finally:
        pinned.close()


def _write_files(folder: Path, pinned: Pinned, buffers: Mapping[str, Array], run: Run) -> None:
    tensors = {name: np.asarray(array, order="C") for name, array in pinned.arrays()}
    tensors.update({f"buffers/{name}": np.asarray(array, order="C") for name, array in buffers.items()})
    checksums = {name: checksum_of(array) for name, array in tensors.items()}
    write_tensors(tensors, folder / TENSORS_FILE)
    del tensors
    pinned.close()
    header = header_sum(folder / TENSORS_FILE)
    description = {**pinned.description, **run.described(), "checksums": checksums, "header": header}
    (folder / JSON_FILE).write_bytes(sealed(description))
    for name in (TENSORS_FILE, JSON_FILE, "."):
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
