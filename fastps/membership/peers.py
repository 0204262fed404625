"""The peers of a process: which of the job's workers have died, or whether its server has, told by pidfds.

Each process opens its own pidfd and hands it to whoever asks its answering thread; no number is looked up, so no reused process
id can deceive. A lane that is live in the arena while nobody listens at its name belongs to a process that died before it was
asked. A lane's owners follow one another; each is known by its generation. Refuses to act on a death: it names it, and
membership.py decides.
"""

import os
import select

from fastps.errors import WorkerDiedError
from fastps.kernels.shm.arena import ABI, LANE_DEAD, LANE_FAILED, LANE_JOINING, LANE_LEAVING, LANE_LIVE, LANE_SERVING, Arena
from fastps.membership import rendezvous

_ASK_TIMEOUT_S = 0.05
_MOST_SKIPPED_LOOKS = (
    20  # a peer that did not answer, time and again (a stopped process), is asked so seldom: each try costs time
)
_PRESENT = (LANE_LIVE, LANE_LEAVING, LANE_JOINING, LANE_SERVING)

Owner = tuple[int, int]
"""A lane, and the generation of its owner."""


class Peers:
    """The other workers of `job`, whose arena `descriptor` is of, seen from the worker of lane `own`."""

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

    def dead(self) -> Owner | None:
        """A worker that failed, or died without leaving; None while all is well. Costs one system call.

        Who acts on it calls `forget`; until then it may be named again.
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
            # The state is read again: its worker may have left in good order just before its process ended. Where another
            # owns the lane already, or has marked_dead its owner to do so, the dead one's turn may still have to be broken.
            generation, state = self._arena.members()[owner[0]]
            if generation != owner[1] or state in (*_PRESENT, LANE_FAILED, LANE_DEAD):
                return owner
            self.forget(owner)
        # Last, for a worker that fails because another died says so itself, and the first cause is the better answer.
        failed = [
            lane
            for lane, (generation, state) in enumerate(members)
            if state == LANE_FAILED and lane != self._own and (lane, generation) not in self._dismissed
        ]
        lane = min(failed, key=self._is_consequence, default=-1)
        return (lane, members[lane][0]) if lane >= 0 else None

    def _is_consequence(self, lane: int) -> bool:
        """Whether a lane failed because another had."""
        return self._arena.failure(lane).startswith(WorkerDiedError.__name__)

    def error(self, owner: Owner) -> WorkerDiedError:
        """The named error for a worker that `dead` returned."""
        lane = owner[0]
        is_server = lane == self._arena.server_lane
        who = f"{'the server' if is_server else f'worker {lane}'} (process {self._arena.process_id(lane)})"
        if self._arena.lane_state(lane) == LANE_FAILED:
            return WorkerDiedError(f"{who} failed: {self._arena.failure(lane)}", lane)
        if is_server:
            return WorkerDiedError(
                f"{who} died: expected it to stay until the last worker has left, found its process gone", lane
            )
        return WorkerDiedError(
            f"{who} died: expected it to close its optimizer or to end normally, found its process gone; see its own output"
            " for the reason",
            lane,
        )

    def forget(self, owner: Owner) -> None:
        """This owner is no peer any more."""
        self._known.discard(owner)
        self._looks_to_skip.pop(owner, None)
        self._silences.pop(owner, None)
        for pidfd in [pidfd for pidfd, known in self._owner_of.items() if known == owner]:
            self._poll.unregister(pidfd)
            del self._owner_of[pidfd]
            os.close(pidfd)

    def dismiss(self, owner: Owner) -> None:
        """Forget this owner, and never name it again."""
        self.forget(owner)
        self._dismissed.add(owner)

    def is_dismissed(self, owner: Owner) -> bool:
        """Whether `dismiss` was called for it."""
        return owner in self._dismissed

    def close(self) -> None:
        """Let go of all pidfds."""
        for descriptor in self._owner_of:
            os.close(descriptor)
        self._owner_of.clear()
        self._known.clear()
        self._poll = select.poll()

    def _meet(self, owner: Owner) -> bool:
        """Ask a lane's process for its pidfd; False when nobody is there although the lane has the same owner still.

        Should the next owner have answered already, then it finds out about this one's death itself, before it joins.
        """
        lane = owner[0]
        place: rendezvous.Place = "server" if lane == self._arena.server_lane else lane
        try:
            answer = rendezvous.connect(
                self._job, place, abi=ABI, layout_hash=bytes(32), layout=b"", observer=True, timeout_s=_ASK_TIMEOUT_S
            )
        except rendezvous.Absent:
            return self._has_changed(owner)
        except rendezvous.Silent:
            # Alive enough to accept: a stopped process is slow, not dead; or it is about to end, and will be absent soon.
            self._silences[owner] = min(_MOST_SKIPPED_LOOKS, 2 * self._silences.get(owner, 0) + 1)
            self._looks_to_skip[owner] = self._silences[owner] - 1
            return True
        is_ours = os.path.sameopenfile(answer.memfd, self._descriptor)
        os.close(answer.memfd)
        if not is_ours:  # a job that was begun again has the name now, so whoever had it here has ended
            os.close(answer.pidfd)
            return self._has_changed(owner)
        self._known.add(owner)
        self._owner_of[answer.pidfd] = owner
        self._poll.register(answer.pidfd, select.POLLIN)
        return True

    def _has_changed(self, owner: Owner) -> bool:
        """Whether the lane is no more that owner's, or its owner is not there any more by its own word."""
        generation, state = self._arena.members()[owner[0]]
        return generation != owner[1] or state not in _PRESENT
