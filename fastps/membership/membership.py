"""Who belongs to a job, as one worker acts on it: a lost peer is marked_dead or named, a joiner waits until it is counted.

A lost worker's turn is broken first, so that no lock is left; then its lane is marked dead, and whoever holds a shard's turn
next counts it no more (kernels/protocol/combiner.pyx). All of this may be done twice, and by a process that dies in the middle
of it. Refuses to decide what a scheme does with fewer or more workers: the scheduler does.
"""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from fastps.errors import NonFiniteGradientError, WorkerDiedError, damaged
from fastps.job.layout import first_difference
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.kernels.shm.arena import LANE_FREE, LANE_JOINING, LANE_LIVE
from fastps.membership.job_memory import JobMemory
from fastps.membership.peers import Owner, Peers

logger = logging.getLogger("fastps.membership")
_WAITED_FOR = {LANE_FREE: ", not attached", LANE_JOINING: ", joining", LANE_LIVE: ""}


_Found = TypeVar("_Found")


class Participant(Protocol):
    """What membership asks of an attached worker, or of the server."""

    rank: int
    store: JobMemory
    lane: WorkerLane

    def try_combine(self) -> None:
        """Run every shard's turn that is free."""

    def take_over(self) -> None:
        """Take turns from now on: the server is gone."""

    def recover_lock(self, owner: Owner, now_ns: int) -> None:
        """Take the turns of an owner whose process has ended."""

    def recover_stale_locks(self, now_ns: int) -> None:
        """Take the turns of owners that were replaced already."""

    def wait_until(self, reached: Callable[[], _Found | None], pause_ns: int, timeout_text: Callable[[], str]) -> _Found:
        """Wait, and watch the peers meanwhile."""


class Membership:
    """The membership of one worker: its generation, its peers, and what it has told of rejected pushes."""

    def __init__(self, worker: Participant, generation: int) -> None:
        self.generation = generation
        self._worker = worker
        self._store = worker.store
        self._faults = worker.store.layout.faults
        self._peers = Peers(worker.store.arena, worker.store.descriptor, worker.store.job, worker.rank)
        self._told_foreign = False
        self._refused = ""
        self._rejections = worker.store.arena.rejections
        self._own_rejections = worker.store.arena.rejected(worker.rank)[0]

    def join(self) -> None:
        """Wait until every shard counts this worker. Raises TimeoutExceededError, saying what the lane waits for."""
        worker, arena = self._worker, self._store.arena
        worker.lane.recover_lock(worker.rank, self._store.clock.now_ns(), self.generation - 1)
        worker.wait_until(self._has_joined, 500_000, self._not_joined_text)
        arena.joined(worker.rank)
        logger.info("worker %d joined as generation %d at version %d", worker.rank, self.generation, arena.version)

    def _has_joined(self) -> bool:
        self._worker.try_combine()
        return self._store.arena.has_joined(self._worker.rank)

    def _not_joined_text(self) -> str:
        worker, arena = self._worker, self._store.arena
        counters = arena.counters(worker.rank)
        return (
            f"worker {worker.rank} waited {self._store.timeout_s:g} s to join (generation {self.generation}): of its lane"
            f" {counters['posted'] - counters['done']} pushes of an earlier worker are not folded, at version"
            f" {arena.version}; raise FASTPS_TIMEOUT if the others are only slow"
        )

    def waited_for(self) -> list[str]:
        """Who this worker may be waiting for: those expected or present that are behind it, and how far they are.

        Last what was refused meanwhile, which may have meant to be one of those that have not attached.
        """
        layout, arena, worker = self._store.layout, self._store.arena, self._worker
        found = []
        for lane, state in enumerate(arena.lane_states()[: layout.lanes]):
            if lane == worker.rank or (lane >= layout.workers and state == LANE_FREE):
                continue  # nobody is expected in a lane beyond those of the workers
            if state in _WAITED_FOR and (arena.clock(lane) < worker.lane.steps or state == LANE_FREE):
                found.append(f"worker {lane} (at step {arena.clock(lane)}{_WAITED_FOR[state]})")
        return [*found, self._refused] if found and self._refused else found

    def look(self, now_ns: int) -> None:
        """Act on every worker that died or failed, and tell of a process that described another model.

        Raises WorkerDiedError under on_worker_loss="stop"; what `report_rejections` raises.
        """
        self._worker.recover_stale_locks(now_ns)
        while (dead := self._peers.dead()) is not None:
            if dead[0] == self._store.arena.server_lane:
                self._lose_server(dead, now_ns)
                continue
            self._worker.recover_lock(dead, now_ns)
            if not self._faults.continues:
                raise self._peers.error(dead)
            error = self._peers.error(dead)
            if self._store.arena.mark_dead(*dead):
                logger.warning("%s; the job goes on without it", error)
            self._peers.forget(dead)
            self._worker.try_combine()
        self._check_layouts()
        self.report_rejections()

    def _lose_server(self, server: Owner, now_ns: int) -> None:
        """Go on without the server, whatever the job does about lost workers; on devices its memory is gone with it."""
        error = self._peers.error(server)
        if self._store.layout.homes:
            raise WorkerDiedError(
                f"{error}; the memory on devices is gone with it: restart the job (with FASTPS_PLACEMENT=host it can resume from"
                " its last checkpoint)",
                server[0],
            )
        self._worker.take_over()
        self._worker.recover_lock(server, now_ns)
        if self._store.arena.mark_dead(*server):
            logger.warning("%s; the workers take the turns from now on, and nothing is lost", error)
        self._peers.forget(server)
        self._worker.try_combine()

    def _check_layouts(self) -> None:
        theirs = self._store.foreign_layout()
        if theirs is None or self._told_foreign:
            return
        self._told_foreign = True
        self._refused = f"a process whose model differs was refused: {first_difference(self._store.layout.text(), theirs)}"
        logger.warning(
            "%s; all workers must build the same model, optimizer and discipline, and nothing else may give the name %r",
            self._refused,
            self._store.job,
        )

    def report_rejections(self) -> None:
        """Tell of pushes that were rejected since the last call: this worker's own as a warning, under "raise" as an error."""
        arena = self._store.arena
        if arena.rejections == self._rejections:
            return
        self._rejections = arena.rejections
        if self._faults.nonfinite == "raise":
            lane = next((lane for lane in range(arena.lanes) if arena.rejected(lane)[0]), -1)
            if lane < 0:
                raise damaged("the count of rejected pushes")
            raise NonFiniteGradientError(self._rejected_text(lane), lane)
        count, _ = arena.rejected(self._worker.rank)
        before, self._own_rejections = self._own_rejections, count
        if count.bit_length() > before.bit_length():  # the first, and then ever more seldom: a run that diverged rejects all
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
        """Let go of the peers."""
        self._peers.close()


__all__ = ["Membership", "Owner"]
