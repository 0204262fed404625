"""Partially synchronous parallelism: one server of Algorithm 1 of the PSP-SGD paper (lines of its server part quoted).

One oracle is one server, which holds one shard of the parameters and knows no other server. A worker that goes on with
some shards only (the worker part's partial pulling) makes pushes that this server did not grant.
This PSP is not probabilistic synchronous parallel.
"""

from tests.oracles.plays import Plays
from tests.oracles.server import Server


class PspServer(Server):
    """A version takes c gradients, and those within tau1 after the c-th; later gradients are dropped.

    The paper's workers never leave. Where some have, as many of the live ones are passed by as at first: the others' gradients
    are enough, and at least one is needed. The version is complete when all have responded. A worker has responded when its
    gradient is in the sum, so a dropped gradient is no response. A worker that leaves after its push has given that push.
    """

    def __init__(self, workers: int, c: int, tau1_ns: int) -> None:
        super().__init__(workers)
        assert c >= 1 and tau1_ns >= 0
        self.c, self.passed_by = c, workers - c
        self.tau1_ns = tau1_ns
        # Line 4: g <- 0, d <- 0. This list holds the workers whose gradients are in the sum g; its length is d.
        self.g: list[int] = []
        self.deadline_ns: int | None = None

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.waiting.discard(p)  # a worker without a grant from here went on with the other servers' shards
        self.count_push(p)  # line 6: receive gradient block with timestamp <g', t'>
        if timestamp < self.version:  # line 7: if t' < t then
            self.dropped[p] += 1  # line 8: drop g'
            return [], self.send_ok({p})  # line 3 has sent it <w, t> already
        # Line 9: else. After a partial pull t' > t is possible, and one sum may hold a worker's gradients of t and of t + 1.
        self.g.append(p)  # line 10: g <- g + g', d <- d + 1
        self.waiting.add(p)
        return self.update_when_complete()

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.remove(worker)
        return self.update_when_complete()

    def due_ns(self) -> int | None:
        return self.deadline_ns

    def fire(self) -> tuple[list[int], list[int]]:
        self.clock_timer()
        return self.update_when_complete()

    def update_when_complete(self) -> tuple[list[int], list[int]]:
        have_responded = len(set(self.g) & set(self.t))
        if len(self.g) >= self.c or have_responded >= max(1, len(self.t) - self.passed_by):
            self.deadline_ns = self.now_ns + self.tau1_ns if self.deadline_ns is None else self.deadline_ns
        # Line 12: until timeout tau1 after c gradients have been received or all workers have responded.
        timeout = self.deadline_ns is not None and self.now_ns >= self.deadline_ns
        all_have_responded = bool(self.g) and set(self.t) <= set(self.g)
        if not timeout and not all_have_responded:
            return [], []
        folded = sorted(self.g)  # line 13: w_{t+1} <- w_t - d eta_t Updater(g / d)
        self.g.clear()  # line 4 of the next t
        self.deadline_ns = None
        self.version += 1  # line 14: t <- t + 1
        return folded, self.send_ok(set(self.waiting))  # line 3: broadcast parameters with timestamp <w, t>

    def send_ok(self, workers: set[int]) -> list[int]:
        """Grant the step after each worker's latest push, however many of its pushes were not granted."""
        self.waiting -= workers
        for worker in workers:
            self.granted[worker] = self.t[worker] + 1
        return sorted(workers)


def _server(workers: int, push: int, pull: float, *, push_timeout: float = 0.0, pull_timeout: float = 0.0) -> PspServer:
    """The server of one shard: it decides by c and tau1 only."""
    return PspServer(workers, push, round(push_timeout * 1e9))


PLAYS = Plays(
    _server,
    sized={
        "psp:7/8": lambda workers: f"psp:{max(1, workers * 7 // 8)},0.5",
        # A timeout that meets the pushes of the coarse clock to the ns, and one that meets nothing.
        "psp:half,2ms": lambda workers: f"psp:{max(1, workers // 2)},0.5,push_timeout=0.002",
        "psp:1,777us": lambda workers: "psp:1,0.5,push_timeout=0.000777777",
        "psp:all,1ns": lambda workers: f"psp:{workers},0.5,push_timeout=1e-9",
    },
    simulated=("psp:5,0.75", "psp:5,0.5,push_timeout=0.001,pull_timeout=0.002"),
)
