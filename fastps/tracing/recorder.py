"""Recording: a job's workers write down what they do. `fastps.trace(FILE)` in a script, FASTPS_TRACE=FILE for a whole launch.

A worker's own times come from its own clock; what became of its pushes it reads from its lane's ring of fates, which combiners
write before the commit that makes them true (fps_push_outcome in kernels/shm/arena.h), so that no crash makes the ledger lie.
Refuses to judge a trace, and to write for another worker.
"""

import os
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from fastps.job.environment import TRACE_VARIABLE
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.kernels.shm.arena import LANE_LEAVING, LANE_LIVE, OUTCOME_DROPPED, Arena
from fastps.membership.job_memory import JobMemory
from fastps.system.machine import machine
from fastps.tracing.file import DROPPED, FOLDED, UNDECIDED, Lines
from fastps.tracing.parts import Part, folder_of, merge, numbered
from fastps.version import __version__

_LOAD_EVERY_NS = 100_000_000  # asking for the machine's load costs about 100 us


class Spinning(Protocol):
    """Who shares the cores."""

    spins: int


class Recorded(Protocol):
    """What a recorder reads of the worker that it records."""

    rank: int
    store: JobMemory
    lane: WorkerLane
    recorder: "Recorder | None"
    injected_transfer_ns: int

    @property
    def posts(self) -> int:
        """Pushes so far."""

    @property
    def cores(self) -> Spinning:
        """Whether waiting workers spin."""


class Recording:
    """A trace that is being recorded; made by `fastps.trace`. Also a context manager that ends it.

    The first job that this process joins is recorded into `file`, further ones into files with a number before the suffix.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._files: dict[str, Path] = {}
        self._recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()  # those that ended are not kept, nor their memory

    def recorder(self, worker: Recorded) -> "Recorder":
        """What this worker shall write to."""
        job = worker.store.job
        if job not in self._files:
            self._files[job] = numbered(self.file, len(self._files))
        recorder = Recorder(worker, self._files[job])
        self._recorders.add(recorder)
        return recorder

    def close(self) -> None:
        """End the recording: workers that still run are recorded no more. May be called twice."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_current: Recording | None = None


def trace(file: str | Path) -> Recording:
    """Record what this process's workers do into a trace, for `fastps trace` and `fastps advise`.

    Call it before the optimizer (or worker) is made, in every worker's process with the same file; or use it as a context
    manager around the training. The file is written when the last of the job's workers ends, whole or not at all; until then
    lines lie in a folder beside it. Recording costs some tens of microseconds a step. Raises TraceError when a worker begins,
    or later, if the lines cannot be written.

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
    """What a worker that begins shall write to: None unless this process records."""
    global _current
    file = os.environ.get(TRACE_VARIABLE)
    if _current is None and file:
        _current = Recording(Path(file).resolve())
    return None if _current is None else _current.recorder(worker)


def keep(worker: Recorded) -> "Recorder":
    """Let the lines of a worker's steps be kept in memory, whether it is recorded or not."""
    recorder = worker.recorder = worker.recorder or Recorder(worker, None)
    recorder.kept = []
    return recorder


class Recorder:
    """One worker's lines. Its methods are called by the worker, in a step's order: computed, posted, pushed, granted, pulled.

    `posted` may be called by the push thread, and late; a line is written when the step's push is decided in every shard.
    """

    def __init__(self, worker: Recorded, file: Path | None) -> None:
        self.kept: list[tuple[Any, ...]] | None = None  # lines of steps that are wanted in memory, too
        self._worker = worker
        self._file = file
        self._folder = folder_of(file, worker.store.job) if file is not None else None
        self._clock = worker.store.clock
        self._arena = worker.store.arena
        self._part: Part | None = None
        if self._folder is not None:
            self._part = Part(self._folder, worker.rank, {"job": job_note(worker), "began_ns": self._clock.now_ns()})
        self._ended = False
        self._open: dict[int, _Step] = {}  # by step, in order; the push thread looks one up while others come and go
        self._step: _Step | None = None
        self._load: tuple[_Load, _Load] | None = None
        self._arena.record()
        self._begin(self._clock.now_ns())

    def _begin(self, now_ns: int) -> None:
        self._begin_ns, self._begin_cpu_ns, self._begin_queue_ns = (
            now_ns,
            self._clock.thread_cpu_ns(),
            self._clock.thread_queue_ns(),
        )

    def computed(self, now_ns: int, position: int, step: int, read_version: int, samples: int, null: bool) -> None:
        """The worker begins to push the gradient of a step."""
        cpu_ns, queue_ns = self._clock.thread_cpu_ns(), self._clock.thread_queue_ns()
        entry = self._step = _Step()
        entry.begin_ns, entry.computed_ns, entry.pushed_ns = self._begin_ns, now_ns, now_ns
        entry.cpu_ns, entry.computed_cpu_ns = cpu_ns - self._begin_cpu_ns, cpu_ns
        entry.queue_ns = queue_ns - self._begin_queue_ns if queue_ns >= 0 else -1
        entry.position, entry.step, entry.read_version = position, step, read_version
        entry.samples, entry.null = samples, null
        self._open[step] = entry
        if self._load is None or now_ns - self._load[1].now_ns > _LOAD_EVERY_NS:
            load = _Load(now_ns, self._clock.machine_cpu_ns(), self._clock.process_cpu_ns(), cpu_ns)
            self._load = (self._load[0] if self._load is not None else load, load)

    def posted(self, step: int, now_ns: int, transfer_ns: int) -> None:
        """The step's descriptor is about to be posted, after a transfer that took so long."""
        entry = self._open.get(step)
        if entry is not None:
            entry.posted_ns, entry.push_transfer_ns = now_ns, transfer_ns

    def pushed(self, now_ns: int) -> None:
        """The worker's part of the push is over."""
        if self._step is not None:
            self._step.pushed_ns = now_ns

    def granted(self, now_ns: int) -> None:
        """The next step is granted."""
        if self._step is not None:
            self._step.granted_ns = now_ns

    def pulled(self, transfer_ns: int) -> None:
        """The newest weights are there, after a transfer that took so long: the next step begins."""
        now_ns = self._clock.now_ns()
        self._begin(now_ns)
        entry = self._step
        if entry is None:
            return
        entry.end_ns, entry.pull_transfer_ns = now_ns, transfer_ns
        entry.store_cpu_ns = self._begin_cpu_ns - entry.computed_cpu_ns
        self._step = None
        self._collect()

    def _collect(self) -> None:
        """Write the lines of all steps whose pushes every shard is done with."""
        if not self._open:
            return
        done = self._worker.lane.done()
        for entry in list(self._open.values()):
            if entry.position >= done:
                break
            self._write(self._open.pop(entry.step))

    def _write(self, entry: "_Step") -> None:
        rank, position = self._worker.rank, entry.position
        line = (
            entry.begin_ns,
            entry.computed_ns,
            entry.posted_ns,
            entry.pushed_ns,
            entry.granted_ns,
            entry.end_ns,
            entry.cpu_ns,
            entry.queue_ns,
            entry.store_cpu_ns,
            entry.push_transfer_ns,
            entry.pull_transfer_ns,
            entry.read_version,
            entry.step,
            entry.samples,
            rank,
            entry.null,
            1,
        )
        if self.kept is not None:
            self.kept.append(line)
        if self._part is None:
            return
        self._part.steps.append(line)
        for shard in range(self._arena.shards):
            fates = self._arena.push_outcomes(rank, shard, position, position + 1)
            kind, version, decided_ns, staleness = UNDECIDED, -1, -1, 0
            if fates and fates[0] is not None:
                kind, version, decided_ns, staleness = fates[0]
                kind = DROPPED if kind == OUTCOME_DROPPED else FOLDED
            self._part.pushes.append(
                (position, entry.step, entry.read_version, version, decided_ns, staleness, rank, shard, kind, 1)
            )

    def finish(self, failure: str | None = None) -> None:
        """The worker ends, or its recording: write what is left, and merge the trace if this was the last."""
        if self._ended:
            return
        self._ended = True
        self._worker.recorder = None
        self._step = None
        for entry in self._open.values():
            self._write(entry)
        self._open.clear()
        if self._part is not None:
            transfer_ns = self._worker.injected_transfer_ns
            self._part.finish(posted=self._worker.posts, transfer_ns=transfer_ns, failure=failure, load=self.load())

    def load(self) -> dict[str, int]:
        """What was spent on cores while this worker was at work: `_Load`, from the first to the latest look."""
        before, after = self._load or (_Load(0, 0, 0, 0), _Load(0, 0, 0, 0))
        return {name: getattr(after, name) - getattr(before, name) for name in _Load.__slots__}

    def end_keeping(self) -> None:
        """No lines are wanted in memory any more; a recorder that was made for that alone ends."""
        self.kept = None
        if self._part is None:
            self.finish()

    def merge_if_last(self) -> None:
        """After `finish`: whoever finds that all workers have, or that nobody else will, writes the trace."""
        if self._folder is None or self._file is None:
            return
        merge(self._folder, self._file, self._is_last, self._arena_says, lambda pushes: settle(self._arena, pushes))

    def _is_last(self, notes: list[dict[str, Any]]) -> bool:
        others_run = any(state in (LANE_LIVE, LANE_LEAVING) for state in self._arena.lane_states())
        return bool(notes) and all(note["finished"] for note in notes) and (len(notes) == self._arena.lanes or not others_run)

    def _arena_says(self) -> dict[str, Any]:
        """What was committed, counted by the combiners themselves: to compare the lines with."""
        counters = [self._arena.counters(lane) for lane in range(self._arena.lanes)]
        return {
            "committed": {
                "folded": [count["folded"] for count in counters],
                "dropped": [count["dropped"] for count in counters],
            },
            "versions": [self._arena.shard_version(shard) for shard in range(self._arena.shards)],
        }


def settle(arena: Arena, pushes: Lines) -> None:
    """Look again for what became of pushes that were undecided when their worker ended: another one decided later."""
    for index in (pushes["fate"] == UNDECIDED).nonzero()[0]:
        line = pushes[index]
        position = int(line["position"])
        fates = arena.push_outcomes(int(line["worker"]), int(line["shard"]), position, position + 1)
        if fates and fates[0] is not None:
            kind, line["version"], line["decided_ns"], line["staleness"] = fates[0]
            line["fate"] = DROPPED if kind == OUTCOME_DROPPED else FOLDED


@dataclass(frozen=True, slots=True)
class _Load:
    """Processor time that was spent by a moment, in ns: by everybody on the machine, this process, the worker's thread."""

    now_ns: int
    machine_ns: int
    process_ns: int
    thread_ns: int


class _Step:
    """A step in the making; the names are STEP_DTYPE's."""

    __slots__ = (
        "begin_ns",
        "computed_cpu_ns",
        "computed_ns",
        "cpu_ns",
        "end_ns",
        "granted_ns",
        "null",
        "position",
        "posted_ns",
        "pull_transfer_ns",
        "push_transfer_ns",
        "pushed_ns",
        "queue_ns",
        "read_version",
        "samples",
        "step",
        "store_cpu_ns",
    )
    begin_ns: int
    computed_ns: int
    computed_cpu_ns: int
    cpu_ns: int
    null: bool
    position: int
    pushed_ns: int
    queue_ns: int
    read_version: int
    samples: int
    step: int

    def __init__(self) -> None:
        # A step that was cut short keeps these: 0 is no time of this clock's.
        self.posted_ns = self.granted_ns = self.end_ns = 0
        self.store_cpu_ns = self.push_transfer_ns = self.pull_transfer_ns = 0


def job_note(worker: Recorded) -> dict[str, Any]:
    """What all workers of a job say alike."""
    layout = worker.store.layout
    return {
        "version": __version__,
        "machine": machine(),
        "job": worker.store.job,
        "sync": layout.policy.spec,
        "policy": asdict(layout.policy),
        "workers": layout.workers,
        "shards": worker.store.arena.shards,
        "parameters": sum(parameter.length for parameter in layout.parameters),
        "model_bytes": 4 * layout.buffer_floats,
        "slots": layout.slots,
        "spins": worker.cores.spins,
    }
