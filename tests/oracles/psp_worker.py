"""Partially synchronous parallelism: a worker of Algorithm 1 of the PSP-SGD paper (lines of its worker part quoted).

It knows the moments at which blocks reach the worker, nothing of how the servers decide. Times are integers, in ns.
"""

from math import ceil


class PspWorker:
    """A worker of `blocks` blocks that computes once a share `b` of them has come, and those within tau2 after that.

    `receive` and `advance` return the moment at which the computation begins, or None while lines 8 to 15 repeat.
    """

    def __init__(self, blocks: int, b: float, tau2_ns: int) -> None:
        self.t = 0  # line 1: t <- 0
        self.blocks = blocks
        self.least = ceil(b * blocks - 1e-9)
        self.tau2_ns = tau2_ns
        self.w = [0] * blocks  # the timestamp of each block of W_t; line 6: W_t <- 0
        self.stale = 0  # blocks that a computation took from the step before it, all steps together
        self._begin_step()

    def _begin_step(self) -> None:
        """Lines 3 and 4: if t > 0 then W_t <- W_{t-1}. The blocks of the last step stay until newer ones come."""
        self.received: set[int] = set()
        self.deadline_ns: int | None = None

    def receive(self, j: int, timestamp: int, now_ns: int) -> int | None:
        """Line 9: receive the j-th block and its timestamp <W'_j, t'>."""
        begins_ns = self.advance(now_ns)
        if begins_ns is not None:
            return begins_ns
        if timestamp < self.t:  # line 10: if t' < t then
            return None  # line 11: drop W'_j
        self.w[j] = timestamp  # lines 12 and 13: else W_t,j <- W'_j
        self.received.add(j)
        if len(self.received) == self.least:
            self.deadline_ns = now_ns + self.tau2_ns
        return self._ends(now_ns)

    def advance(self, now_ns: int) -> int | None:
        """Time passes until just before `now_ns`: tau2 may have run out."""
        return self.deadline_ns if self.deadline_ns is not None and self.deadline_ns < now_ns else None

    def _ends(self, now_ns: int) -> int | None:
        """Line 15: until timeout tau2 after b% blocks have been received or all servers have responded."""
        all_have_responded = len(self.received) == self.blocks
        timeout = self.deadline_ns is not None and now_ns >= self.deadline_ns
        return now_ns if all_have_responded or timeout else None

    def compute(self) -> list[int]:
        """Lines 16 to 18: compute with W_t, push, t <- t + 1. Returns the timestamps of the blocks of W_t."""
        self.stale += self.blocks - len(self.received) if self.t else 0
        # Line 18 sends t. A worker whose gradient was dropped is behind the servers, so it is the oldest of the step's blocks.
        self.timestamp = min((self.w[j] for j in self.received), default=0)
        self.t += 1
        used = list(self.w)
        self._begin_step()
        return used
