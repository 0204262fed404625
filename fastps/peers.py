"""The peers of a process: which of the job's workers have died, told by pidfds.

Each process opens its own pidfd and hands it to whoever asks its answering thread; no number is looked up, so no reused process
id can deceive. A lane that is live in the arena while nobody listens at its name belongs to a process that died before it was
asked. Refuses to act on a death: it names it, and store and worker decide.
"""

import os
import select

from fastps import rendezvous
from fastps.errors import WorkerDiedError
from fastps.kernels.arena import ABI, LANE_FAILED, LANE_LEAVING, LANE_LIVE, Arena

_ASK_TIMEOUT_S = 0.05
_ASK_AGAIN_LOOKS = 20  # a peer that did not answer (a stopped process) is asked again after so many looks: each try costs time
_PRESENT = (LANE_LIVE, LANE_LEAVING)


class Peers:
    """The other workers of `job`, seen from the worker of lane `own`."""

    def __init__(self, arena: Arena, job: str, own: int) -> None:
        self._arena = arena
        self._job = job
        self._own = own
        self._poll = select.poll()
        self._lane_of: dict[int, int] = {}
        self._known: set[int] = set()
        self._looks_to_skip: dict[int, int] = {}

    def dead(self) -> int | None:
        """A lane whose worker failed, or died without leaving; None while all is well. Costs one system call."""
        states = self._arena.lane_states()
        for lane, state in enumerate(states):
            if state not in _PRESENT or lane == self._own or lane in self._known:
                continue
            if self._looks_to_skip.get(lane, 0) > 0:
                self._looks_to_skip[lane] -= 1
            elif not self._meet(lane):
                return lane
        for descriptor, _ in self._poll.poll(0):
            lane = self._lane_of[descriptor]
            # The state is read again: its worker may have left in good order just before its process ended.
            if self._arena.lane_state(lane) in (*_PRESENT, LANE_FAILED):
                return lane
            self._poll.unregister(descriptor)
        # Last, for a worker that fails because another died says so itself, and the first cause is the better answer.
        failed = [lane for lane, state in enumerate(states) if state == LANE_FAILED and lane != self._own]
        return min(failed, key=self._is_consequence, default=None)

    def _is_consequence(self, lane: int) -> bool:
        """Whether a lane failed because another had."""
        return self._arena.failure(lane).startswith(WorkerDiedError.__name__)

    def error(self, lane: int) -> WorkerDiedError:
        """The named error for a lane that `dead` returned."""
        who = f"worker {lane} (process {self._arena.process_id(lane)})"
        if self._arena.lane_state(lane) == LANE_FAILED:
            return WorkerDiedError(f"{who} failed: {self._arena.failure(lane)}", lane)
        return WorkerDiedError(
            f"{who} died: expected it to close its optimizer or to end normally, found its process gone; see its own output"
            " for the reason",
            lane,
        )

    def close(self) -> None:
        """Let go of all pidfds."""
        for descriptor in self._lane_of:
            os.close(descriptor)
        self._lane_of.clear()
        self._known.clear()
        self._poll = select.poll()

    def _meet(self, lane: int) -> bool:
        """Ask a lane's process for its pidfd; False when nobody is there although the lane is still live."""
        try:
            answer = rendezvous.ask(
                self._job, lane, abi=ABI, layout_hash=bytes(32), layout=b"", observer=True, timeout_s=_ASK_TIMEOUT_S
            )
        except rendezvous.Absent:
            return self._arena.lane_state(lane) not in _PRESENT
        except rendezvous.Silent:
            self._looks_to_skip[lane] = _ASK_AGAIN_LOOKS
            return True  # alive enough to accept: a stopped process is slow, not dead
        os.close(answer.memfd)
        self._known.add(lane)
        self._lane_of[answer.pidfd] = lane
        self._poll.register(answer.pidfd, select.POLLIN)
        return True
