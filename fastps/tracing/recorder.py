"""Recording of a job's workers: `fastps.trace(FILE)` in a script, FASTPS_TRACE=FILE for a whole launch.

A worker's times come from its own clock. It reads the outcomes of its pushes from its lane's ring of outcomes, which the
combiner writes before the commit that makes them true (fps_push_outcome), so that the push log is right after any crash. A
recorder writes for its own worker only. A full disk ends its part of the trace, and not the job.
"""

import logging
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from fastps.job.environment import TRACE_VARIABLE
from fastps.membership.job_memory import JobMemory
from fastps.membership.peers import WORKER_PRESENT
from fastps.system.clock import unix_offset_ns
from fastps.system.machine import machine
from fastps.tracing.file import STEP_DTYPE, TraceError
from fastps.tracing.for_replay import Recorded, ReplayRecords, described, final_checksums
from fastps.tracing.node_part import node_of
from fastps.tracing.parts import FOR_REPLAY, Part, folder_of, merge_if_over, numbered, of_node, outcome_of
from fastps.version import __version__

logger = logging.getLogger("fastps.trace")

_LOAD_EVERY_NS = 100_000_000  # reading the machine's load costs about 100 us
_LOAD = ("now_ns", "machine_ns", "process_ns", "thread_ns")
_SERVER_NS = 2_000_000_000  # pushes that no version takes stay undecided


Step = dict[str, Any]
"""An unfinished step: the fields of its record, and what the records of its pushes need."""
_NO_STEP: Step = {**dict.fromkeys(STEP_DTYPE.names or (), 0), "written": 1}
"""Times that an interrupted step has not reached stay 0, which the clock never returns."""
_record_of = itemgetter(*(STEP_DTYPE.names or ()))


class Recording:
    """A trace in progress, made by `fastps.trace`. It is also a context manager that ends the recording.

    The first job that this process joins is recorded in `file`, later jobs in files with a number before the suffix.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._files: dict[str, Path] = {}
        self._recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()  # weak: ended recorders free their memory

    def next_file(self, node: int | None) -> Path:
        """Return the file of the next job of this process, which is on this node of several; None for a job of one node."""
        return numbered(self.file if node is None else of_node(self.file, node), len(self._files))

    def recorder(self, worker: Recorded) -> "Recorder":
        """Make this worker's recorder."""
        job = worker.store.job
        if job not in self._files:
            self._files[job] = self.next_file(node_of(job))
        recorder = Recorder(worker, self._files[job])
        self._recorders.add(recorder)
        return recorder

    def close(self) -> None:
        """End the recording, also of workers that still run. Idempotent."""
        global _current
        if _current is self:
            _current = None
        recorders = list(self._recorders)
        for recorder in recorders:
            recorder.finish()
        for recorder in recorders:
            recorder.merge_if_last()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_current: Recording | None = None


def trace(file: str | Path) -> Recording:
    """Record this process's workers in a trace, for `fastps trace` and `fastps advise`.

    Call it before making the optimizer (or worker), in every worker's process with the same file; or use it as a context
    manager around the training. The file is written atomically when the last of the job's workers ends; until then a folder
    beside it holds the records. Recording costs some tens of microseconds a step. In a job of several nodes each node writes a
    file of its own (`run.node1.trace`). Raises TraceError when a worker begins, if records cannot be written. If they cannot
    be written later, the worker's records end there, with a warning.

    >>> import tempfile
    >>> import numpy as np
    >>> from fastps import SGD, Store
    >>> from fastps.tracing.file import read
    >>> file = Path(tempfile.mkdtemp()) / "run.trace"
    >>> with trace(file), Store.create({"w": np.ones(3, np.float32)}, SGD(lr=0.5)) as store, store.attach(0) as worker:
    ...     worker.step({"w": np.ones(3)})
    >>> [int(version) for version in read(file).pushes["version"]]
    [1]
    """
    global _current
    _current = Recording(Path(file).resolve())
    return _current


def recorder_for(worker: Recorded) -> "Recorder | None":
    """Make the recorder of a starting worker, or return None if this process does not record."""
    recording = _recording()
    return None if recording is None else recording.recorder(worker)


def file_of_next(node: int | None) -> Path | None:
    """Return the file that will have this node's trace of the next job, or None if this process does not record."""
    recording = _recording()
    return None if recording is None else recording.next_file(node)


def folder_of_next(store: JobMemory) -> str:
    """The folder of the parts of a job that this process makes, on one node; "" if this process does not record."""
    file = file_of_next(None)
    return str(folder_of(file, store)) if file is not None else ""


def _recording() -> Recording | None:
    global _current
    file = os.environ.get(TRACE_VARIABLE)
    if _current is None and file:
        _current = Recording(Path(file).resolve())
    return _current


def keep(worker: Recorded) -> "Recorder":
    """Keep the records of a worker's steps in memory, also without a trace."""
    recorder = worker.recorder = worker.recorder or Recorder(worker, None)
    recorder.kept = []
    return recorder


class Recorder:
    """One worker's recorder. The worker calls its methods in a step's order: computed, posted, pushed, granted, pulled.

    The push thread may call `posted`, and late. A record is written once the step's push is decided in every shard.
    """

    def __init__(self, worker: Recorded, file: Path | None) -> None:
        self.kept: list[tuple[Any, ...]] | None = None  # records of steps kept in memory
        self._worker = worker
        self._file = file
        self._folder = folder_of(file, worker.store) if file is not None else None
        self._clock = worker.store.clock
        self._arena = worker.store.arena
        self._part: Part | None = None
        self._replay: ReplayRecords | None = None
        if self._folder is not None:
            replay = described(worker)
            note = {"job": job_note(worker) | {"replay": replay}, "began_ns": self._clock.now_ns(), "process_id": os.getpid()}
            note["unix_offset_ns"] = unix_offset_ns(self._clock)
            note["position"] = worker.lane.posts
            more = [*(["rows"] if self._arena.n_tables else []), *(FOR_REPLAY if not replay["against"] else [])]
            self._part = Part(self._folder, worker.rank, note, more, worker.generation)
            self._replay = ReplayRecords(worker, self._part) if not replay["against"] else None
        self._ended = False
        # By step, in order. The push thread reads one while the worker adds and removes others.
        self._open: dict[int, Step] = {}
        self._step: Step | None = None
        self._loads: tuple[dict[str, int], dict[str, int]] | None = None  # the first and the last, as `load` describes them
        self._arena.record()
        self._begin(self._clock.now_ns())

    def _begin(self, now_ns: int) -> None:
        self._begin_ns = now_ns
        self._begin_cpu_ns, self._begin_queue_ns = self._clock.thread_cpu_ns(), self._clock.thread_queue_ns()

    def computed(
        self, now_ns: int, position: int, step: int, read_version: int, samples: int, slot: int, rows: Sequence[int] = ()
    ) -> None:
        """Record that a push begins: of the gradient in `slot`, or -1, and of so many `rows` of tables in each shard."""
        cpu_ns, queue_ns = self._clock.thread_cpu_ns(), self._clock.thread_queue_ns()
        lost_ns = max(0, now_ns - self._begin_ns - (cpu_ns - self._begin_cpu_ns))  # it may have lost its core since `now_ns`
        self._step = self._open[step] = _NO_STEP | {
            "begin_ns": self._begin_ns,
            "computed_ns": now_ns,
            "pushed_ns": now_ns,
            "cpu_ns": cpu_ns - self._begin_cpu_ns,
            "queue_ns": min(queue_ns - self._begin_queue_ns, lost_ns) if queue_ns >= 0 else -1,
            "read_version": read_version,
            "step": step,
            "samples": samples,
            "worker": self._worker.rank,
            "null": slot < 0,
            "position": position,
            "computed_cpu_ns": cpu_ns,
            "rows": rows,
        }
        if self._loads is None or now_ns - self._loads[1]["now_ns"] > _LOAD_EVERY_NS:
            machine_ns, process_ns = self._clock.machine_cpu_ns(), self._clock.process_cpu_ns()
            load = dict(zip(_LOAD, (now_ns, machine_ns, process_ns, cpu_ns), strict=True))
            self._loads = (self._loads[0] if self._loads is not None else load, load)
        if self._replay is not None:
            self._guarded(partial(self._replay.computed, position, slot, read_version))

    def posted(self, step: int, now_ns: int, transfer_ns: int) -> None:
        """Record that the step's descriptor is about to be posted, after an injected transfer."""
        entry = self._open.get(step)
        if entry is not None:
            entry["posted_ns"], entry["push_transfer_ns"] = now_ns, transfer_ns

    def pushed(self, now_ns: int) -> None:
        """Record that the push has returned."""
        if self._step is not None:
            self._step["pushed_ns"] = now_ns

    def granted(self, now_ns: int) -> None:
        """Record the grant of the next step."""
        if self._step is not None:
            self._step["granted_ns"] = now_ns

    def pulled(self, transfer_ns: int) -> None:
        """Record the arrival of weights, after an injected transfer: the next step begins."""
        now_ns = self._clock.now_ns()
        self._begin(now_ns)
        entry = self._step
        if entry is None:
            return
        entry["end_ns"], entry["pull_transfer_ns"] = now_ns, transfer_ns
        entry["store_cpu_ns"] = self._begin_cpu_ns - entry["computed_cpu_ns"]
        self._step = None
        self._collect()

    def _collect(self) -> None:
        """Write the records of all steps whose pushes every shard has processed."""
        if not self._open:
            return
        done = self._worker.lane.done()
        for entry in list(self._open.values()):
            if entry["position"] >= done:
                break
            self._write(self._open.pop(entry["step"]))

    def _write(self, entry: Step) -> None:
        if self.kept is not None:
            self.kept.append(_record_of(entry))
        if self._part is not None:
            self._guarded(partial(self._append, self._part, entry))

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except TraceError as error:
            self._give_up(error)

    def _append(self, part: Part, entry: Step) -> None:
        rank, position, rows = self._worker.rank, entry["position"], entry["rows"]
        part.steps.append(_record_of(entry))
        for shard in range(self._arena.shards):
            version, decided_ns, staleness, fate = outcome_of(self._arena, rank, shard, position)
            pushed = position, entry["step"], entry["read_version"]
            part.pushes.append((*pushed, version, decided_ns, staleness, rank, shard, fate, 1))
            if "rows" in part.more:
                part.more["rows"].append((position, rows[shard] if rows else 0, rank, shard, 1))

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s; the trace of worker %d ends, and training goes on", error, self._worker.rank)
        assert self._part is not None
        self._part.close()
        self._part = self._replay = None
        if self.kept is None:
            self._ended = True
            self._worker.recorder = None

    def finish(self, failure: str | None = None) -> None:
        """Write the remaining records, at the end of the worker or of its recording; merge_if_last merges the parts."""
        if self._ended:
            return
        self._ended = True
        self._worker.recorder = None
        self._step = None
        for entry in self._open.values():
            self._write(entry)
        self._open.clear()
        if self._replay is not None:
            self._guarded(self._replay.end)
        if self._part is not None:
            transfer_ns = self._worker.injected_transfer_ns
            loss = self._worker.lane.loss if math.isfinite(self._worker.lane.loss) else None
            more = {"posted": self._worker.posts, "transfer_ns": transfer_ns, "failure": failure, "load": self.load()}
            try:
                self._part.finish(**more, loss=loss, unix_offset_end_ns=unix_offset_ns(self._clock))
            except OSError as error:
                self._give_up(error)

    def load(self) -> dict[str, int]:
        """Return the time that passed while this worker was at work, and the processor time spent meanwhile.

        It is that of the whole machine, of this process, and of the worker's thread, in ns.
        """
        first, last = self._loads or (dict.fromkeys(_LOAD, 0),) * 2
        return {name: last[name] - first[name] for name in _LOAD}

    def end_keeping(self) -> None:
        """Stop keeping records in memory; a recorder without a trace ends."""
        self.kept = None
        if self._part is None:
            self.finish()

    def merge_if_last(self) -> None:
        """Write the trace, after `finish`, if all workers have finished or no other worker is left to finish."""
        if self._folder is None or self._file is None:
            return
        if self._replay is not None and self._arena.is_served():
            self._await_server()
        merge_if_over(self._folder, self._file, self._arena, self._weights)

    def _await_server(self) -> None:
        """If this is the last worker, wait until the server has decided all pushes, for as long as it takes to notice them."""
        until_ns = self._clock.now_ns() + _SERVER_NS
        while self._clock.now_ns() < until_ns and not any(state in WORKER_PRESENT for state in self._arena.lane_states()):
            counts = [self._arena.counters(lane) for lane in range(self._arena.lanes)]
            if all(count["posted"] == count["done"] for count in counts):
                return
            self._clock.sleep_ns(1_000_000)

    def _weights(self) -> dict[str, list[int]]:
        return {} if self._replay is None else {"weights": final_checksums(self._worker.store)}


def job_note(worker: Recorded) -> dict[str, Any]:
    """Return the facts about the job, which all workers' notes share."""
    layout = worker.store.layout
    return {
        "version": __version__,
        "machine": machine(),
        "job": worker.store.job,
        "sync": layout.policy.spec,
        "policy": asdict(layout.policy),
        "workers": layout.workers,
        "shards": worker.store.arena.shards,
        "parameters": sum(parameter.size for parameter in layout.parameters),
        "model_bytes": 4 * layout.buffer_floats,
        "slots": layout.slots,
        "spins": worker.cores.spins,
        "optimizer": {
            "rule": layout.rule.name,
            "momentum": max((hyper.momentum or hyper.beta1 for hyper in worker.store.hypers), default=0.0),
            "is_sgd": layout.rule.planes == ("momentum_buffer",) and layout.gradient_type == "float32",
        },
    }
