"""Stale synchronous parallel: Algorithm 1 of the DSSP paper without the controller, that is lines 1, 2, 7 to 9 and 17.

The bound is on grants, as line 8 tests it: a worker begins a step only while t_p - t_slowest <= s, so the gap right
after its next push may be s + 1.
"""

from tests.oracles.plays import Plays
from tests.oracles.server import Server


class Ssp(Server):
    """Every push is folded at once; a worker more than `s` pushes ahead of the slowest waits until it is not."""

    def __init__(self, workers: int, s: int) -> None:
        super().__init__(workers)
        self.s = s

    def push(self, p: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.count_push(p)  # line 1: t_p = t_p + 1
        self.version += 1  # line 2: update the server weights
        # Line 8: if t_p - t_slowest <= s_L, line 9: send OK to worker p; else it waits. Line 17 then decides for all
        # waiting workers: "wait until the slowest worker sends the next push request(s) so that
        # t_p - t_slowest <= s_L", then send OK.
        self.waiting.add(p)
        return [p], self.release()

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.remove(worker)
        return [], self.release()

    def release(self) -> list[int]:
        return self.send_ok({worker for worker in self.waiting if self.gap(worker) <= self.s})


PLAYS = Plays(
    Ssp,
    specs=("ssp:0", "ssp:1", "ssp:3", "ssp:10", "ssp:0,combine=true", "ssp:3,combine=true"),
    simulated=("ssp:2",),
    timed=False,
    events=52_000,
)
