"""Synchronous SGD with backup workers: Algorithm 4 of Chen et al., "Revisiting Distributed Synchronous SGD".

Learning rates and averages are left out. The paper's workers never leave or join; the decisions on these are our own.
"""

from tests.oracles.plays import Plays
from tests.oracles.server import Server


class Backup(Server):
    """Of N + b live workers the first N gradients of a version make it; later ones are dropped. N is at least 1.

    So N follows the workers that leave and join. A worker that leaves after its push has given that push, which is folded
    with the version and is none of the N.
    """

    def __init__(self, workers: int, b: int) -> None:
        super().__init__(workers)
        assert 0 <= b < workers, f"{b} backup workers of {workers}"
        self.b = b
        self.G: set[int] = set()  # line 2: G = {}, as the workers of the gradients; each gives one per version

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.count_push(p)
        # Line 4: wait for (G, t') from any worker; line 5: if t' == t then G <- G u {G}; line 6: else drop gradient G.
        if timestamp != self.version:
            self.dropped[p] += 1
            # Algorithm 3, line 2: "wait to read theta^(t)". The late worker's next theta is available already.
            return [], self.send_ok({p})
        self.G.add(p)
        self.waiting.add(p)
        return self.update_when_complete()

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.remove(worker)
        return self.update_when_complete()

    def update_when_complete(self) -> tuple[list[int], list[int]]:
        least = max(1, len(self.t) - self.b)  # N: "Input: N number of mini-batches to aggregate"
        # Line 3: while |G| < N do. The last to leave closes the version.
        if not self.G or (self.t and len(self.G & set(self.t)) < least):
            return [], []
        folded = sorted(self.G)
        self.G.clear()  # line 2 of the next t
        self.version += 1  # line 7: theta^(t+1) <- theta^(t) - gamma_t / N sum of G
        return folded, self.send_ok(set(self.waiting))


PLAYS = Plays(
    Backup,
    specs=("backup:0",),
    sized={
        "backup:1": lambda workers: f"backup:{min(1, workers - 1)}",
        "backup:half": lambda workers: f"backup:{workers // 2}",
    },
    simulated=("backup:2",),
)
