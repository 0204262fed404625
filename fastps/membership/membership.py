"""Membership of a job, as one worker maintains it: lost peers are marked dead or raised as errors, and joiners are counted.

A worker first recovers the shard locks of a lost peer, so that no lock stays taken, and then marks its lane dead. From then on
the next combiner of each shard no longer counts that lane. Every step is idempotent, and safe if the process that takes it dies
halfway. The scheduler decides what a discipline does with fewer or more workers.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from fastps.errors import ArenaError, AttachError, ExpelledError, NonFiniteGradientError, WorkerDiedError, damaged
from fastps.job.layout import first_difference
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import (
    DAMAGED_KIND,
    DAMAGED_RING,
    DAMAGED_SLOT,
    DAMAGED_TURN,
    LANE_EXPELLED,
    LANE_FREE,
    LANE_JOINING,
    LANE_LIVE,
    Arena,
)
from fastps.membership import discovery
from fastps.membership.job_memory import JobMemory
from fastps.membership.peers import Owner, Peers
from fastps.system import proc

logger = logging.getLogger("fastps.membership")
_ASK_S = 0.2
_WAITED_FOR = {LANE_FREE: ", not attached", LANE_JOINING: ", joining"}


_DAMAGES = {
    DAMAGED_RING: "a count of posted descriptors that its ring cannot hold",
    DAMAGED_KIND: "a descriptor of kind {found}",
    DAMAGED_SLOT: "a descriptor of slot {found}",
    DAMAGED_TURN: "a push of step {found}, which was not granted",
}


def expelled_text(arena: Arena, lane: int) -> str:
    """What is damaged in a lane that was expelled, as a sentence."""
    what, found = arena.damage(lane)
    return (
        f"worker {lane} (process {arena.process_id(lane)}) was expelled: expected pushes in its lane that a worker can have"
        f" posted, found {_DAMAGES.get(what, 'other words').format(found=found)}: a process of the job has overwritten its"
        " memory; its pushes that were not decided are dropped; end it and start another worker in its place"
    )


def expel(store: JobMemory, lane: int, damage: int) -> bool:
    """Expel a worker whose words a combiner found damaged, if the job goes on without lost workers. Returns whether it does."""
    if not store.layout.faults.continues:
        return False
    store.arena.expel(lane, damage)
    return True


class Survivor(Protocol):
    """What `lose` needs of an attached worker or of a server."""

    combine_lock: threading.RLock  # guards the lane, which several threads of a process may drive

    @property
    def store(self) -> JobMemory:
        """The job's memory."""

    @property
    def lane(self) -> Lane:
        """Its lane."""


def lose(
    by: Survivor, peers: Peers, dead: Owner, now_ns: int, then: str = "the job goes on without it", *, always: bool = False
) -> WorkerDiedError | None:
    """Handle the death of an owner of a lane: recover its locks, mark it dead, and log what happens `then`.

    Where the job ends with a lost worker, unless `always`, its lane stays as it is for all to see: returns the error.
    """
    error, (lane, generation) = peers.error(dead), dead
    ends = not (always or by.store.layout.faults.continues)
    with by.combine_lock:
        if ends:
            by.lane.recover_lock(lane, now_ns, generation)
            return error
        is_first = by.lane.lose(lane, generation, now_ns)
    if is_first:
        logger.warning("%s; %s", error, then)
    peers.forget(dead)
    return None


def waiting(arena: Arena) -> dict[int, int]:
    """The processes of an arena's workers that wait for a grant, each with the steps that it has made."""
    found = {}
    for lane, state in enumerate(arena.lane_states()[: arena.lanes]):
        counters = arena.counters(lane)
        made = arena.clock(lane) + counters["posted"] - counters["done"]  # with what a version still waits for
        if state == LANE_LIVE and made >= counters["granted"]:
            found[arena.process_id(lane)] = made
    return found


class Participant(Survivor, Protocol):
    """The interface that membership needs of an attached worker."""

    rank: int

    def try_combine(self) -> None:
        """Combine on every shard whose lock is free."""

    def take_over(self) -> None:
        """Combine from now on, because the server is gone."""

    def wait_to_join(self, timeout_text: Callable[[], str]) -> None:
        """Wait until every shard counts the worker."""


class Membership:
    """The membership of one worker: its generation, its peers, and the rejected pushes that it has reported."""

    def __init__(self, worker: Participant, generation: int) -> None:
        self.generation = generation
        self._worker = worker
        self._store = worker.store
        self._faults = worker.store.layout.faults
        self._looking = threading.RLock()
        self._peers = Peers(worker.store.arena, worker.store.descriptor, worker.store.job, worker.rank)
        self._refused = ""  # what the log said of a joiner that was refused
        self._told_expelled: set[Owner] = set()
        self.rejections = worker.store.arena.rejections
        self._own_rejections = worker.store.arena.rejected(worker.rank)[0]

    def join(self) -> None:
        """Wait until every shard counts this worker. Raises TimeoutExceededError that says what the lane waits for."""
        worker, arena = self._worker, self._store.arena
        worker.lane.recover_lock(worker.rank, self._store.clock.now_ns(), self.generation - 1)
        worker.wait_to_join(self._not_joined_text)
        arena.joined(worker.rank)
        logger.info("worker %d joined as generation %d at version %d", worker.rank, self.generation, arena.version)

    def _not_joined_text(self) -> str:
        worker, arena = self._worker, self._store.arena
        counters = arena.counters(worker.rank)
        return (
            f"worker {worker.rank} waited {self._store.timeout_s:g} s to join (generation {self.generation}):"
            f" {counters['posted'] - counters['done']} pushes of the lane's earlier worker are not folded yet, at version"
            f" {arena.version}; raise FASTPS_TIMEOUT if the others are only slow"
        )

    def waited_for(self) -> list[str]:
        """The workers that this worker may be waiting for: expected or present workers behind it, each with its step.

        The last item names a joiner that was refused meanwhile: it may be one of the workers that have not attached.
        """
        arena, found = self._store.arena, []
        for lane in self._behind():
            stopped = ", stopped" if proc.is_stopped(arena.process_id(lane)) else ""
            found.append(f"worker {lane} (at step {arena.clock(lane)}{_WAITED_FOR.get(arena.lane_state(lane), '')}{stopped})")
        return [*found, self._refused] if found and self._refused else found

    def _behind(self) -> list[int]:
        """The lanes of expected or present workers that have made fewer steps."""
        arena, steps = self._store.arena, self._worker.lane.steps
        others = self._store.others(self._worker.rank)
        return [lane for lane in others if arena.clock(lane) < steps or arena.lane_state(lane) == LANE_FREE]

    def are_busy(self) -> bool:
        """Whether all that this worker may be waiting for are workers of other processes, and live, as far as it can tell."""
        arena, behind = self._store.arena, self._behind()
        processes = {arena.process_id(lane) for lane in behind}
        are_live = all(arena.lane_state(lane) == LANE_LIVE for lane in behind)
        return bool(behind) and are_live and os.getpid() not in processes and not any(map(proc.is_stopped, processes))

    def where_they_wait(self) -> str:
        """What to say of a worker that this one waits for, and that waits for this one in another job; "" without any."""
        of_process = {self._store.arena.process_id(lane): lane for lane in self._behind()}
        for job in discovery.running_jobs(self._store.clock) if of_process else ():
            try:
                there = discovery.arena_of(job, _ASK_S, self._store.clock)
            except (AttachError, ArenaError):  # it has ended
                continue
            own = [lane for lane in range(there.lanes) if there.process_id(lane) == os.getpid()]
            steps = there.clock(own[0]) if own and job != self._store.job else -1
            for process_id, made in waiting(there).items() if steps >= 0 else ():
                if process_id in of_process and made > steps:
                    return (
                        f"; worker {of_process[process_id]} has made step {made} in job {job!r}, where it waits"
                        f" for this one, at step {steps} there: let all workers make the same number of steps in each job"
                    )
        return ""

    def check(self, now_ns: int) -> None:
        """Handle every worker that died or failed, and log a process whose layout was refused.

        Raises WorkerDiedError under on_worker_loss="stop", ExpelledError, and the errors of `report_rejections`.
        """
        if not self._looking.acquire(blocking=False):
            return  # another thread of this worker, which waits for another part, looks now
        try:
            self._check(now_ns)
        finally:
            self._looking.release()

    def _check(self, now_ns: int) -> None:
        with self._worker.combine_lock:
            self._worker.lane.recover_stale_locks(now_ns)
        if LANE_EXPELLED in self._store.arena.lane_states():
            self.tell_expelled()
        while (dead := self._peers.dead()) is not None:
            if dead[0] == self._store.arena.server_lane:
                self._lose_server(dead, now_ns)
                continue
            if (error := lose(self._worker, self._peers, dead, now_ns)) is not None:
                self.report_rejections()  # under nonfinite="raise" it is why that worker failed
                raise error
            self._worker.try_combine()
        self._check_layouts()
        self.report_rejections()

    def tell_expelled(self) -> None:
        """Log every worker that was expelled, once. Raises ExpelledError if this worker was."""
        arena = self._store.arena
        for lane, (generation, state) in enumerate(arena.members()):
            if state != LANE_EXPELLED or (lane, generation) in self._told_expelled:
                continue
            if lane == self._worker.rank:
                raise ExpelledError(expelled_text(arena, lane), lane)
            self._told_expelled.add((lane, generation))
            logger.warning("%s; the job goes on without it", expelled_text(arena, lane))

    def _lose_server(self, server: Owner, now_ns: int) -> None:
        """Go on without the server under any fault policy. Raises WorkerDiedError if it owned the memory on devices."""
        if self._store.layout.owner_lanes:
            raise WorkerDiedError(
                f"{self._peers.error(server)}; the memory on devices is gone with it: restart the job (with"
                " FASTPS_PLACEMENT=host it can resume from its last checkpoint)",
                server[0],
            )
        self._worker.take_over()
        lose(self._worker, self._peers, server, now_ns, "the workers combine from now on, and nothing is lost", always=True)
        self._worker.try_combine()

    def _check_layouts(self) -> None:
        theirs = self._store.foreign_layout()
        if theirs is None or self._refused:
            return
        self._refused = f"a process whose model differs was refused: {first_difference(self._store.layout.text(), theirs)}"
        logger.warning(
            "%s; all workers must build the same model, optimizer and discipline, and nothing else may give the name %r",
            self._refused,
            self._store.job,
        )

    def report_rejections(self) -> None:
        """Report the pushes that were rejected since the last call.

        Log this worker's own as a warning. Under nonfinite="raise", raise NonFiniteGradientError for those of any worker.
        """
        arena = self._store.arena
        if arena.rejections == self.rejections:
            return
        self.rejections = arena.rejections
        if self._faults.nonfinite == "raise":
            lane = next((lane for lane in range(arena.lanes) if arena.rejected(lane)[0]), -1)
            if lane < 0:
                raise damaged("the count of rejected pushes")
            raise NonFiniteGradientError(self._rejected_text(lane), lane)
        count, _ = arena.rejected(self._worker.rank)
        before, self._own_rejections = self._own_rejections, count
        if count.bit_length() > before.bit_length():  # at counts 1, 2, 4, ...: a run that diverged rejects every push
            logger.warning("%s; %d so far", self._rejected_text(self._worker.rank), count)

    def _rejected_text(self, lane: int) -> str:
        _, last = self._store.arena.rejected(lane)
        step, parameter = last if last is not None else (0, 0)
        names = [parameter.name for parameter in self._store.layout.parameters]
        name = names[parameter] if 0 <= parameter < len(names) else "?"
        return (
            f"worker {lane}'s push of step {step} was rejected: expected a finite gradient and finite weights after it, found"
            f" Inf or NaN in parameter {name!r}; look at its loss, the learning rate and the data of that step"
        )

    def close(self) -> None:
        """Close the peers' pidfds."""
        self._peers.close()
