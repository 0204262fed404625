"""A recorded run played again: every worker reads the versions that it read, and every commit has the events that it had.

The order of each shard's commits is that of the trace. Between them, what is played next follows from what is there: a worker
reads a version while it is the newest, once it has handed its last push over; a commit waits for its pushes, and for all that
read the version before it. So the replay needs no times, and workers compute at once on the cores that are there. A worker that
died ends once it has handed over what it had posted, and one that joined is started when the first commit waits for it.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastps.errors import Error, UsageError
from fastps.kernels.protocol.lane import KIND_LEAVE, KIND_NULL
from fastps.lab.virtual.counterfactual import Counterfactual
from fastps.lab.virtual.driver import BEGIN, CHANGES, DEATH, GRANT, JOIN, LEAVE, PULL, RECEIVE, Driver, Event, WorkerLostError
from fastps.lab.virtual.hosting import Hosting, job_options
from fastps.lab.virtual.recorded import Owner
from fastps.membership.job_memory import JobMemory
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.tracing.for_replay import CHECKSUM_BYTES, GradientChecksum, model_digest, weights_checksum

Row = dict[str, Any]


class ReplayDiffersError(Error):
    """The script does not do what it did when the run was recorded."""


def replay(
    run: Counterfactual,
    command: Sequence[str],  # the script with its arguments, as for `Launcher`
    tick: Callable[[int, int], None] = lambda commits, of: None,
    *,
    until: int | None = None,
    checkpoint: Path | None = None,  # a folder for the last weights
    find_nonfinite: bool = False,
    silent: bool = False,  # whether the script's output is left out
    clock: Clock = SYSTEM_CLOCK,
) -> Row:
    """Play a recorded run again, with its changes, up to version `until` of each shard.

    `tick(commits, of all)` is called from time to time.

    Returns a row: `pushes`, `updates`, `checksums` and `gradients` compared, `weights`, a digest of the last ones, `seconds`,
    `joined` workers; `changed`, sentences on what was other than recorded, behind which nothing is compared; and `nonfinite`, a
    sentence about the first push or version that is not finite, with which the replay ends, or None.

    Raises ReplayDiffersError at the first difference; UsageError for another script or model; RunFailedError, after it has
    shown the failure, if a worker fails; ProtocolError.
    """
    recorded = run.recorded
    hint = recorded.check_command(command)
    if late := [worker for worker, steps in enumerate(recorded.steps) if steps.joins and steps.owners]:
        raise UsageError(
            f"worker {late[0]} joined beside the {recorded.workers} of the beginning, and no command starts such a one"
        )
    player = Player(run, hint, until, find_nonfinite)
    if checkpoint is not None and until is not None and not player.of and any(recorded.commits):
        first = min(commits[0][0].version for commits in recorded.commits if commits)
        raise UsageError(
            f"--checkpoint: expected --until {first} or more, the first version that the run published, found {until}"
        )
    changes = bool(recorded.joined) or any(owner.died for each in recorded.steps for owner in each.owners)
    options = job_options(checkpoint, str(recorded.about["threads"]), recorded.about["nonfinite"], changes, run.pause)
    began_ns = clock.now_ns()
    threads = int(recorded.about.get("fold_threads", 1))
    hosting = Hosting(command, recorded.workers, recorded.sync, options, player.play, clock, threads)
    player.start = hosting.join
    hosting.run(lambda: tick(player.played, player.of), silent=silent)
    return player.row | {"seconds": (clock.now_ns() - began_ns) / 1e9}


@dataclass
class _Worker:
    """Where one lane's present worker is; before it joins, where it will begin. Position p is begun, then handed over."""

    owner: Owner
    number: int  # of the lane's owners
    reads: list[int]  # the version of each shard that its present step reads; -1: none yet
    begun: int = 0
    handed: int = 0
    pulled: set[int] = field(default_factory=set)  # shards whose weights for the next step are pinned
    free_at: dict[int, int] = field(default_factory=dict)  # by slot: descriptors to be done with before it is written again
    admitted: set[int] = field(default_factory=set)  # shards that count it
    is_started: bool = True
    is_here: bool = True
    has_left: bool = False
    is_lost: bool = False  # its process ends, or has

    def __post_init__(self) -> None:
        self.begun = self.handed = self.owner.first

    @property
    def computes(self) -> bool:
        return self.begun > self.handed


class Player:
    """Plays one recorded run on a driver.

    Attributes:
        played, of: commits so far, and all.
        row: the report's row, in the end.
    """

    def __init__(self, run: Counterfactual, hint: str = "", until: int | None = None, find_nonfinite: bool = False) -> None:
        self._recorded, self._change, self._hint, self._finds = run.recorded, run, hint, find_nonfinite
        recorded, self._has_changed = run.recorded, False
        self._until = until if until is not None else max(recorded.versions)
        self._stops_early = until is not None
        self.played = self._checksums = 0
        self.of = sum(commit[0].version <= self._until for commits in recorded.commits for commit in commits)
        self.row: Row = {}
        self._next = [0] * recorded.shards  # the next commit of each shard
        self._versions = [0] * recorded.shards
        shards = range(recorded.shards)
        self._workers = {
            worker: self._next_owner(worker, 0)
            if steps.joins
            else _Worker(steps.owners[0], 0, [0 for _ in shards], admitted=set(shards))
            for worker, steps in enumerate(recorded.steps)
            if steps.owners
        }
        # The number of the owner that each shard counts, by lane; -1: none yet.
        self._counted = [[-steps.joins] * recorded.shards for steps in recorded.steps]
        self._pushes = self._gradients = 0
        self._slots: dict[tuple[int, int], int] = {}  # of each push handed over, -1 without a gradient
        self.start: Callable[[int], None] = lambda worker: None  # starts the process of a worker that joins
        self._nonfinite: str | None = None
        self._driver: Driver
        self._checksum: GradientChecksum

    def play(self, driver: Driver) -> None:
        """Play until every worker has left, or the version is reached. Raises as `replay`."""
        self._driver, self._checksum = driver, GradientChecksum(driver.store)
        try:
            self._play()
        except Error:
            with contextlib.suppress(WorkerLostError):
                self._stop()
            raise
        self.row |= {"pushes": self._pushes, "updates": max(self._versions), "checksums": self._checksums}
        self.row |= {"workers": self._recorded.workers, "sync": self._recorded.sync, "nonfinite": self._nonfinite}
        self.row |= {"joined": self._recorded.joined, "gradients": self._gradients, "changed": list(self._change.sentences)}

    def _play(self) -> None:
        self._check_beginning(self._driver.store)
        while self._nonfinite is None:
            if not (self._begin_steps() or self._commit_all()):
                computing = [worker for worker, at in self._workers.items() if at.computes]
                joins = any(at.is_started and not at.is_here for at in self._workers.values())
                if not (computing or joins) or self._is_at_the_end():
                    break
                if (worker := self._driver.await_any(computing, joins=joins)) >= 0:
                    self._take(worker)
                else:
                    self._workers[self._driver.meet()].is_here = True
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
        for worker, at in self._workers.items():
            if at.computes:
                self._take(worker, compares=compares)

    def _stop(self) -> None:
        """End the workers where they are, once each waits in a step, or has left."""
        shards = self._recorded.shards
        while any(at.is_started and not at.is_here for at in self._workers.values()):
            self._workers[self._driver.meet()].is_here = True
        for worker, at in self._workers.items():
            if at.begun == at.owner.first and len(at.admitted) == shards and not at.is_lost:
                # A worker that could not begin would be a failure to the others.
                self._driver.play([Event(0, 0, 0, worker, 0, BEGIN)])
                at.begun += 1
        self._await_all(compares=False)
        self._driver.stop({worker for worker, at in self._workers.items() if at.has_left})

    def _end(self) -> None:
        """Compare the last weights, and let the workers end."""
        buffers = self._driver.store.committed()[0]
        for shard, (version, checksum) in enumerate(zip(self._recorded.versions, self._recorded.weights, strict=True)):
            self._compare(shard, version, buffers, "the last weights", checksum)
        self.row["weights"] = self._driver.end()

    # -- what workers do ---------------------------------------------------------------------------

    def _begin_steps(self) -> bool:
        """Let each worker's next step begin, if what it reads is there. Returns whether anything was done."""
        free = [worker for worker, at in self._workers.items() if not (at.has_left or at.is_lost)]
        return any([self._begin(worker) for worker in free if len(self._workers[worker].admitted) == self._recorded.shards])

    def _begin(self, worker: int) -> bool:
        at, steps = self._workers[worker], self._recorded.steps[worker]
        is_last = at.begun >= at.owner.end  # in which it leaves
        may_begin = not at.computes and (not at.owner.died if is_last else self._is_let_go(worker))
        if not (may_begin or self._driver.store.layout.policy.overlap):  # there weights are received while a step computes
            return False
        wanted = steps.reads[at.begun].tolist() if not is_last else self._last_reads(worker)
        pinned = False
        for shard, version in enumerate(wanted):
            if shard not in at.pulled and version in (at.reads[shard], self._versions[shard]):
                if version != at.reads[shard]:
                    newest = self._driver.store.arena.shard_version(shard)
                    self._driver.play([Event(0, newest, 0, worker, shard, kind) for kind in (GRANT, PULL)])
                at.pulled.add(shard)
                pinned = True
        if not may_begin or len(at.pulled) < self._recorded.shards:
            return pinned
        self._driver.play([Event(0, 0, 0, worker, 0, BEGIN)])
        at.begun, at.reads, at.pulled = at.begun + 1, wanted, set()
        return True

    def _last_reads(self, worker: int) -> list[int]:
        """The versions that the step reads in which a worker leaves, which nobody recorded; none while they are not there.

        Workers that make the same steps have waited for the commit of their last push. Any other reads what it read before, so
        that a script does the same in every replay.
        """
        at, is_level = self._workers[worker], self._driver.store.layout.policy.is_level
        if is_level and self.played < self.of and not self._driver.is_free(worker, at.handed):
            return []
        return list(self._versions) if is_level or at.reads[0] < 0 else at.reads

    def _is_let_go(self, worker: int) -> bool:
        """Whether a worker's next step may begin here: a slot is free for its push, and its batch is tuned."""
        at, layout = self._workers[worker], self._driver.store.layout
        free_at = min(at.free_at.get(slot, 0) for slot in range(layout.slots))
        number = int(self._recorded.steps[worker].numbers[at.begun])
        is_granted = layout.policy.grant != "round-robin" or self._driver.is_granted(worker, number + 1)
        return is_granted and self._driver.is_free(worker, free_at)

    def _take(self, worker: int, *, compares: bool = True) -> None:
        """Take what a worker has computed, and compare it. Raises ReplayDiffersError."""
        at, steps = self._workers[worker], self._recorded.steps[worker]
        position, count = at.handed, at.owner.end
        place = worker, position
        timestamp, is_left_out = int(steps.timestamps[position]) if position < count else -1, place in self._change.left_out
        push = self._driver.await_push(worker, 0, timestamp, null=is_left_out)
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
        sample = self._checksum.of(worker, push.slot) if push.kind != KIND_NULL else 0
        is_compared = not (self._has_changed or place in self._change.fresh)
        if is_compared and sample != steps.samples[position]:
            raise self._differs(worker, int(steps.numbers[position]), "it pushes another gradient than the recorded worker")
        self._gradients += is_compared
        self._slots[place] = -1 if push.kind == KIND_NULL or is_left_out else push.slot
        self._pushes += 1
        if push.kind != KIND_NULL:
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
            event.detail >= self._workers[event.worker].handed for event in commit if event.kind in (RECEIVE, LEAVE)
        ):
            return False
        if version != self._versions[shard] and any(self._reads_later(worker, shard) for worker in self._workers):
            return False
        return all([self._is_changed(event) for event in commit if event.kind in CHANGES])

    # -- workers that die and join -------------------------------------------------------------------

    def _next_owner(self, worker: int, number: int) -> _Worker:
        owner = self._recorded.steps[worker].owners[number]
        return _Worker(owner, number, [-1] * self._recorded.shards, is_started=False, is_here=False)

    def _is_changed(self, event: Event) -> bool:
        """Whether a worker has died, or is here to join; if it is time, see to it."""
        worker, shard = event.worker, event.shard
        at, gone = self._workers[worker], self._counted[worker][shard]
        if at.number == gone:
            if not self._lose(worker):
                return False
            if gone + 1 < len(self._recorded.steps[worker].owners):
                at = self._workers[worker] = self._next_owner(worker, gone + 1)
        if event.kind == DEATH:
            return True
        if not at.is_started:
            at.is_started = True
            self.start(worker)
        return at.is_here and (event.kind != JOIN or shard == 0 or 0 in at.admitted)

    def _lose(self, worker: int) -> bool:
        """End a worker that died or left once it has handed over all that it posted. Returns whether it ends."""
        at = self._workers[worker]
        if not at.is_lost and at.handed >= at.owner.end and (at.owner.died or at.has_left):
            self._driver.lose(worker, dies=at.owner.died)
            at.is_lost = True
        return at.is_lost

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
        self._has_changed |= any(
            (event.worker, event.detail) in self._change.changed for event in commit if event.kind == RECEIVE
        )
        for event in commit:
            if event.kind == JOIN:
                self._counted[event.worker][shard] += 1
                self._workers[event.worker].admitted.add(shard)
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
        if expected is None or self._has_changed:
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
            if event.kind != RECEIVE or (slot := self._slots[event.worker, event.detail]) < 0:
                continue
            present, views = store.slot_words(event.worker, slot)[1], store.gradient_views(event.worker, slot)
            for table in store.tables:
                views[table] = store.pushed_rows(event.worker, slot, table)[1]
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
        parts = (
            f" (of a gradient {CHECKSUM_BYTES >> 20} MiB are compared: an earlier one may have differed in the rest)"
            if self._checksum.is_partial
            else ""
        )
        return ReplayDiffersError(
            f"worker {worker}, step {step}: {how}, although it has read the same versions{parts}: the script is not"
            f" deterministic{self._hint}; see docs/how-to/playing-a-run-again.md"
        )

    def _stuck(self) -> str:
        why = ": with these changes the recorded order is not possible" if self._change.fresh else self._hint
        return f"the replay ends after {self.played} of {self.of} commits, for which no worker has the pushes{why}"


def _is_finite(view: np.ndarray) -> bool:
    """Whether a gradient is finite; bfloat16 is given as its bits."""
    if view.dtype == np.uint16:
        return not (view & 0x7F80 == 0x7F80).any()
    return bool(np.isfinite(view).all())
