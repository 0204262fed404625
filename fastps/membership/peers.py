"""The peers of a process: pidfds tell which workers of the job have died, and whether its server has.

Each process opens its own pidfd, and its listener offers it to every process that connects. If a lane is live in the arena and
no process listens at its name, its owner died before this process connected to it. A lane may have one owner after another; the
generation tells them apart. This module reports a death and does not act on it.
"""

import errno
import logging
import os
import select

from fastps.errors import WorkerDiedError
from fastps.kernels.shm.arena import (
    LANE_DEAD,
    LANE_EXPELLED,
    LANE_FAILED,
    LANE_JOINING,
    LANE_LEAVING,
    LANE_LIVE,
    LANE_SERVING,
    Arena,
)
from fastps.membership import rendezvous

logger = logging.getLogger("fastps.membership")

_ASK_TIMEOUT_S = 0.05
_MOST_SKIPPED_LOOKS = 20  # the backoff for a peer that does not answer (a stopped process), because each try costs time
WORKER_PRESENT = (LANE_LIVE, LANE_LEAVING, LANE_JOINING)
WORKER_LOST = (LANE_DEAD, LANE_FAILED, LANE_EXPELLED)
_PRESENT = (*WORKER_PRESENT, LANE_SERVING, LANE_EXPELLED)  # an expelled one may hold a lock

Owner = tuple[int, int]
"""A lane, and the generation of its owner."""


class Peers:
    """The peers of the worker in lane `own` of `job`. `descriptor` is the memfd of the job's arena."""

    def __init__(self, arena: Arena, descriptor: int, job: str, own: int) -> None:
        self._arena = arena
        self._descriptor = descriptor
        self._job = job
        self._own = own
        self._poll = select.poll()
        self._owner_of: dict[int, Owner] = {}  # by pidfd
        self._known: set[Owner] = set()
        self._dismissed: set[Owner] = set()
        self._looks_to_skip: dict[Owner, int] = {}
        self._silences: dict[Owner, int] = {}
        self._is_told = False  # whether a lack of descriptors was warned of

    def dead(self) -> Owner | None:
        """A worker that failed, or died without leaving; None if there is none. Costs one system call once all peers are known.

        The caller handles the death and then calls `forget`; until then the same owner may be returned again.
        """
        members = self._arena.members()
        for lane, (generation, state) in enumerate(members):
            owner = lane, generation
            if state not in _PRESENT or lane == self._own or owner in self._known or owner in self._dismissed:
                continue
            if self._looks_to_skip.get(owner, 0) > 0:
                self._looks_to_skip[owner] -= 1
            elif not self._meet(owner):
                return owner
        for pidfd, _ in self._poll.poll(0):
            owner = self._owner_of[pidfd]
            # Read the state again: the worker may have left just before its process ended. If the lane has a new owner, or its
            # owner is marked dead, the shard locks of the dead owner may still have to be recovered.
            generation, state = self._arena.members()[owner[0]]
            if generation != owner[1] or state in (*_PRESENT, LANE_FAILED, LANE_DEAD):
                return owner
            self.forget(owner)
        # Failed workers come last, and those that failed because another died after the rest: the first cause says more.
        failed = [
            lane
            for lane, (generation, state) in enumerate(members)
            if state == LANE_FAILED and lane != self._own and (lane, generation) not in self._dismissed
        ]
        lane = min(failed, key=lambda lane: self._arena.failure(lane).startswith(WorkerDiedError.__name__), default=-1)
        return (lane, members[lane][0]) if lane >= 0 else None

    def error(self, owner: Owner) -> WorkerDiedError:
        """The error that names an owner that `dead` returned."""
        lane = owner[0]
        is_server = lane == self._arena.server_lane
        who = f"{'the server' if is_server else f'worker {lane}'} (process {self._arena.process_id(lane)})"
        if self._arena.lane_state(lane) == LANE_FAILED:
            return WorkerDiedError(f"{who} failed: {self._arena.failure(lane)}", lane)
        wish = "stay until the last worker has left" if is_server else "close its optimizer or to end normally"
        hint = "" if is_server else "; see its own output for the reason"
        return WorkerDiedError(f"{who} died: expected it to {wish}, found its process gone{hint}", lane)

    def forget(self, owner: Owner) -> None:
        """Remove this owner from the peers, and close its pidfd."""
        self._known.discard(owner)
        self._looks_to_skip.pop(owner, None)
        self._silences.pop(owner, None)
        for pidfd in [pidfd for pidfd, known in self._owner_of.items() if known == owner]:
            self._poll.unregister(pidfd)
            del self._owner_of[pidfd]
            os.close(pidfd)
        if self._arena.lane_state(owner[0]) == LANE_EXPELLED:
            self._dismissed.add(owner)  # its lane stays so after its end

    def dismiss(self, owner: Owner) -> None:
        """Forget this owner, and never return it from `dead` again."""
        self.forget(owner)
        self._dismissed.add(owner)

    def is_dismissed(self, owner: Owner) -> bool:
        """Whether `dismiss` was called with this owner."""
        return owner in self._dismissed

    def close(self) -> None:
        """Close all pidfds."""
        for descriptor in self._owner_of:
            os.close(descriptor)
        self._owner_of.clear()
        self._known.clear()
        self._poll = select.poll()

    def _meet(self, owner: Owner) -> bool:
        """Connect to a lane's process for its pidfd. Return False if no process listens and the lane still has this owner.

        If the lane's next owner answers, that process detects the death of this owner itself, before it joins.
        """
        lane = owner[0]
        place: rendezvous.Place = "server" if lane == self._arena.server_lane else lane
        try:
            answer = rendezvous.connect(self._job, place, _ASK_TIMEOUT_S, observer=True)
        except rendezvous.Absent:
            return self._has_changed(owner)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._warn_of_descriptors(lane, error)
            self._looks_to_skip[owner] = _MOST_SKIPPED_LOOKS
            return True
        except rendezvous.Silent:
            # The process listens, so it is stopped or slow, not dead; or it is about to end, and will be absent soon.
            self._silences[owner] = min(_MOST_SKIPPED_LOOKS, 2 * self._silences.get(owner, 0) + 1)
            self._looks_to_skip[owner] = self._silences[owner] - 1
            return True
        if not os.path.sameopenfile(answer.memfd, self._descriptor):
            answer.close()  # a restarted job has the name now, so the process that had it here has ended
            return self._has_changed(owner)
        os.close(answer.memfd)
        self._forget_replaced(owner)
        self._known.add(owner)
        self._owner_of[answer.pidfd] = owner
        self._poll.register(answer.pidfd, select.POLLIN)
        return True

    def _warn_of_descriptors(self, lane: int, error: OSError) -> None:
        if not self._is_told:
            logger.warning("the death of worker %d would not be noticed here: %s; close files, or raise ulimit -n", lane, error)
        self._is_told = True

    def _forget_replaced(self, owner: Owner) -> None:
        """Forget earlier owners of a lane whose processes live on: they have given it back. `dead` returns the others."""
        ended = {self._owner_of[pidfd] for pidfd, _ in self._poll.poll(0)}
        for earlier in self._known - ended:
            if earlier[0] == owner[0] and earlier != owner:
                self.forget(earlier)

    def _has_changed(self, owner: Owner) -> bool:
        """Whether the lane has another owner now, or its state says that this owner is no longer present."""
        generation, state = self._arena.members()[owner[0]]
        return generation != owner[1] or state not in _PRESENT
