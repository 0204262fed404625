"""A recorded run played again: every worker reads the versions that it read, and every commit has the events that it had.

The order of each shard's commits is that of the trace. Between them, what is played next follows from what is there: a worker
reads a version while it is the newest, once it has handed its last push over; a commit waits for its pushes, and for all that
read the version before it. So the replay needs no times, and workers compute at once on the cores that are there.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastps.errors import Error, UsageError
from fastps.kernels.protocol.lane import KIND_LEAVE, KIND_NULL
from fastps.lab.virtual.driver import BEGIN, GRANT, PULL, RECEIVE, Driver, Event, WorkerLostError
from fastps.lab.virtual.hosting import Hosting, job_options
from fastps.lab.virtual.recorded import Recorded
from fastps.membership.job_memory import JobMemory
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.tracing.for_replay import gradient_sample, model_digest, sampled_words, weights_checksum

Row = dict[str, Any]


class ReplayDiffersError(Error):
    """The script does not do what it did when the run was recorded."""


def replay(
    recorded: Recorded,
    command: Sequence[str],  # the script with its arguments, as for `Launcher`
    tick: Callable[[int, int], None] = lambda commits, of: None,
    *,
    until: int | None = None,
    checkpoint: Path | None = None,  # a folder for the last weights
    find_nonfinite: bool = False,
    silent: bool = False,  # whether the script's output is left out
    clock: Clock = SYSTEM_CLOCK,
) -> Row:
    """Play a recorded run again, up to version `until` of each shard; `tick(commits, of all)` is called from time to time.

    Returns a row: `pushes`, `updates`, `checksums` compared, `weights`, a digest of the last ones, `seconds`; and `nonfinite`,
    a sentence about the first push or version that is not finite, with which the replay ends, or None.

    Raises ReplayDiffersError at the first difference; UsageError for another script or model; RunFailedError, after it has
    shown the failure, if a worker fails; ProtocolError.
    """
    hint = recorded.check_command(command)
    player = Player(recorded, hint, until, find_nonfinite)
    options = job_options(checkpoint, str(recorded.about["threads"]), recorded.about["nonfinite"])
    began_ns = clock.now_ns()
    hosting = Hosting(command, len(recorded.steps), recorded.sync, options, player.play, clock)
    hosting.run(lambda: tick(player.played, player.of), silent=silent)
    return player.row | {"seconds": (clock.now_ns() - began_ns) / 1e9}


@dataclass
class _Worker:
    """Where one worker is. Position p of its pushes is begun, then handed over."""

    begun: int = 0
    handed: int = 0
    reads: list[int] = field(default_factory=list)  # the version of each shard that its present step reads
    pulled: set[int] = field(default_factory=set)  # shards whose weights for the next step are pinned
    slots: list[int] = field(default_factory=list)  # of each push handed over, -1 without a gradient
    free_at: dict[int, int] = field(default_factory=dict)  # by slot: descriptors to be done with before it is written again
    gradients: int = 0  # of those pushes
    has_left: bool = False

    @property
    def computes(self) -> bool:
        return self.begun > self.handed


class Player:
    """Plays one recorded run on a driver.

    Attributes:
        played, of: commits so far, and all.
        row: the report's row, in the end.
    """

    def __init__(self, recorded: Recorded, hint: str = "", until: int | None = None, find_nonfinite: bool = False) -> None:
        self._recorded, self._hint, self._finds = recorded, hint, find_nonfinite
        self._until = until if until is not None else max(recorded.versions)
        self._stops_early = until is not None
        self.played = self._checksums = 0
        self.of = sum(commit[0].version <= self._until for commits in recorded.commits for commit in commits)
        self.row: Row = {}
        self._next = [0] * recorded.shards  # the next commit of each shard
        self._versions = [0] * recorded.shards
        self._workers = [_Worker(reads=[0] * recorded.shards) for _ in recorded.steps]
        self._nonfinite: str | None = None
        self._driver: Driver

    def play(self, driver: Driver) -> None:
        """Play until every worker has left, or the version is reached. Raises as `replay`."""
        self._driver = driver
        try:
            self._play()
        except Error:
            with contextlib.suppress(WorkerLostError):
                self._stop()
            raise
        pushes = sum(len(at.slots) for at in self._workers)
        self.row |= {"pushes": pushes, "updates": max(self._versions), "checksums": self._checksums}
        self.row |= {"workers": len(self._workers), "sync": self._recorded.sync, "nonfinite": self._nonfinite}

    def _play(self) -> None:
        self._check_beginning(self._driver.store)
        while self._nonfinite is None:
            if not (self._begin_steps() or self._commit_all()):
                computing = [worker for worker, at in enumerate(self._workers) if at.computes]
                if not computing or self._is_at_the_end():
                    break
                self._take(self._driver.await_any(computing))
        if self._stops_early or self._nonfinite is not None:
            self.row["weights"] = self._driver.digest()
            self._stop()
        elif self.played < self.of:
            raise ReplayDiffersError(self._stuck())
        else:
            self._await_all()  # what no combiner had taken when the recorded run ended
            self._end()

    # -- begin and end -----------------------------------------------------------------------------

    def _check_beginning(self, store: JobMemory) -> None:
        if model_digest(store.layout) != self._recorded.about["model"]:
            raise UsageError("the trace is of another script: expected its model, update rule and groups, found others")
        buffers = store.committed()[0]
        for shard in range(self._recorded.shards):
            self._compare(shard, 0, buffers, "the first weights")

    def _is_at_the_end(self) -> bool:
        return self._stops_early and min(self._versions) >= min(self._until, min(self._recorded.versions))

    def _await_all(self, *, compares: bool = True) -> None:
        """Wait until no worker computes."""
        for worker, at in enumerate(self._workers):
            if at.computes:
                self._take(worker, compares=compares)

    def _stop(self) -> None:
        """End the workers where they are, once each waits in a step, or has left."""
        for worker, at in enumerate(self._workers):
            if not at.begun:  # a worker that could not join would be a failure to the others
                self._driver.play([Event(0, 0, 0, worker, 0, BEGIN)])
                at.begun = 1
        self._await_all(compares=False)
        self._driver.stop({worker for worker, at in enumerate(self._workers) if at.has_left})

    def _end(self) -> None:
        """Compare the last weights, and let the workers end."""
        buffers = self._driver.store.committed()[0]
        for shard, (version, checksum) in enumerate(zip(self._recorded.versions, self._recorded.weights, strict=True)):
            self._compare(shard, version, buffers, "the last weights", checksum)
        self.row["weights"] = self._driver.end()

    # -- what workers do ---------------------------------------------------------------------------

    def _begin_steps(self) -> bool:
        """Let each worker's next step begin, if what it reads is there. Returns whether anything was done."""
        return any([self._begin(worker) for worker, at in enumerate(self._workers) if not (at.computes or at.has_left)])

    def _begin(self, worker: int) -> bool:
        at, steps = self._workers[worker], self._recorded.steps[worker]
        is_last = at.begun >= len(steps.reads)  # in which it leaves: nobody recorded what it read
        wanted = at.reads if is_last else steps.reads[at.begun].tolist()
        if not is_last and not self._is_let_go(worker):
            return False
        pinned = False
        for shard, version in enumerate(wanted):
            if shard not in at.pulled and version in (at.reads[shard], self._versions[shard]):
                if version != at.reads[shard]:
                    self._driver.play([Event(0, version, 0, worker, shard, kind) for kind in (GRANT, PULL)])
                at.pulled.add(shard)
                pinned = True
        if len(at.pulled) < len(wanted):
            return pinned
        self._driver.play([Event(0, 0, 0, worker, 0, BEGIN)])
        at.begun, at.reads, at.pulled = at.begun + 1, wanted, set()
        return True

    def _is_let_go(self, worker: int) -> bool:
        """Whether a worker's next step may begin here: the slot of its push is free, and its batch is tuned."""
        at, layout = self._workers[worker], self._driver.store.layout
        slot = at.gradients % layout.slots
        is_granted = layout.policy.grant != "round-robin" or self._driver.is_granted(worker, at.begun + 1)
        return is_granted and self._driver.is_free(worker, at.free_at.get(slot, 0))

    def _take(self, worker: int, *, compares: bool = True) -> None:
        """Take what a worker has computed, and compare it. Raises ReplayDiffersError."""
        at, steps = self._workers[worker], self._recorded.steps[worker]
        position, count = at.handed, len(steps.reads)
        push = self._driver.await_push(worker, 0, int(steps.timestamps[position]) if position < count else -1)
        at.handed += 1
        at.has_left = push.kind == KIND_LEAVE
        if not compares:
            return
        if at.has_left:
            if position < count:
                raise self._differs(
                    worker, push.step, f"it leaves, and the recorded worker pushed {count - position} more times"
                )
            return
        if position >= count:
            raise self._differs(worker, push.step, "it pushes, and the recorded worker left")
        store = self._driver.store
        sample = gradient_sample(sampled_words(store, worker, push.slot)) if push.kind != KIND_NULL else 0
        if sample != steps.samples[position]:
            raise self._differs(worker, int(steps.numbers[position]), "it pushes another gradient than the recorded worker")
        at.slots.append(-1 if push.kind == KIND_NULL else push.slot)
        if push.kind != KIND_NULL:
            at.gradients += 1
            at.free_at[push.slot] = at.handed

    # -- commits -----------------------------------------------------------------------------------

    def _commit_all(self) -> bool:
        """Make every commit that is ready. Returns whether there was one."""
        found = False
        for shard, commits in enumerate(self._recorded.commits):
            while self._next[shard] < len(commits) and self._nonfinite is None and self._is_ready(commits[self._next[shard]]):
                self._commit(shard, commits[self._next[shard]])
                found = True
        return found

    def _is_ready(self, commit: list[Event]) -> bool:
        shard, version = commit[0].shard, commit[0].version
        if version > self._until or any(
            event.detail >= self._workers[event.worker].handed for event in commit if event.worker >= 0
        ):
            return False
        return version == self._versions[shard] or not any(
            self._reads_later(worker, shard) for worker in range(len(self._workers))
        )

    def _reads_later(self, worker: int, shard: int) -> bool:
        """Whether a worker has still to read the shard's present version."""
        at, reads = self._workers[worker], self._recorded.steps[worker].reads[:, shard]
        first = at.begun + (shard in at.pulled)
        if first >= len(reads):
            return False
        last = reads[at.begun] if shard in at.pulled else at.reads[shard]
        later = first + int(np.searchsorted(reads[first:], last, "right"))
        return later < len(reads) and int(reads[later]) <= self._versions[shard]

    def _commit(self, shard: int, commit: list[Event]) -> None:
        if self._finds:
            self._look_at_gradients(commit)
        self._driver.commit(commit)
        self.played += 1
        self._next[shard] += 1
        store, version = self._driver.store, commit[0].version
        if store.arena.shard_version(shard) != version:
            raise ReplayDiffersError(
                f"commit {self._next[shard]} of shard {shard} made version {store.arena.shard_version(shard)}, and the recorded"
                f" one {version}: another number of samples or of steps without a gradient{self._hint}"
            )
        is_new, self._versions[shard] = version != self._versions[shard], version
        if is_new:
            self._compare(shard, version, store.committed()[0], f"the weights of version {version}")
        if is_new and self._finds and self._nonfinite is None:
            self._look_at_weights(shard, version, commit)

    def _compare(self, shard: int, version: int, buffers: Sequence[int], what: str, expected: int | None = None) -> None:
        """Compare the weights of a version with the checksum that was recorded, if one was."""
        expected = self._recorded.checksums.get((shard, version), expected)
        if expected is None:
            return
        self._checksums += 1
        if weights_checksum(self._driver.store, buffers, shard) != expected:
            raise ReplayDiffersError(
                f"{what} differ from the recorded ones, in shard {shard}: the script is not deterministic{self._hint}; see"
                " docs/how-to/playing-a-run-again.md"
            )

    # -- numbers that are not finite ---------------------------------------------------------------

    def _look_at_gradients(self, commit: list[Event]) -> None:
        store = self._driver.store
        for event in commit:
            at = self._workers[event.worker]
            if event.kind != RECEIVE or (slot := at.slots[event.detail]) < 0:
                continue
            present = store.slot_words(event.worker, slot)[1]
            views = store.gradient_views(event.worker, slot)
            for parameter, is_there, view in zip(store.parameters, present, views, strict=True):
                if parameter.shard == event.shard and is_there and not _is_finite(view) and self._nonfinite is None:
                    step = int(self._recorded.steps[event.worker].numbers[event.detail])
                    self._nonfinite = (
                        f"worker {event.worker}, step {step}: the gradient of {parameter.name} is not finite; it was pushed for"
                        f" version {event.version}"
                    )

    def _look_at_weights(self, shard: int, version: int, commit: list[Event]) -> None:
        store = self._driver.store
        for parameter, view in zip(store.parameters, store.weight_views(store.committed()[0]), strict=True):
            if parameter.shard == shard and not np.isfinite(view).all():
                pushes = [event for event in commit if event.kind == RECEIVE]
                made = " and ".join(
                    f"step {self._recorded.steps[event.worker].numbers[event.detail]} of worker {event.worker}"
                    for event in pushes
                )
                self._nonfinite = (
                    f"version {version} has weights of {parameter.name} that are not finite; made by {made or 'a timer'}"
                )
                return

    # -- sentences ---------------------------------------------------------------------------------

    def _differs(self, worker: int, step: int, how: str) -> ReplayDiffersError:
        return ReplayDiffersError(
            f"worker {worker}, step {step}: {how}, although it has read the same weights: the script is not"
            f" deterministic{self._hint}; see docs/how-to/playing-a-run-again.md"
        )

    def _stuck(self) -> str:
        return f"the replay ends after {self.played} of {self.of} commits, for which no worker has the pushes{self._hint}"


def _is_finite(view: np.ndarray) -> bool:
    """Whether a gradient is finite; bfloat16 is given as its bits."""
    if view.dtype == np.uint16:
        return not (view & 0x7F80 == 0x7F80).any()
    return bool(np.isfinite(view).all())
