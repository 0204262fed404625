"""Bulk synchronous parallel as the DSSP paper states it (Zhao et al., section I.A.1).

"Once the parameter server receives gradients from all workers and updates the global weights, it sends the latest
global weights (parameters) to the workers before each worker starts a new iteration."
"""

from tests.oracles.plays import Plays
from tests.oracles.server import Server


class Bsp(Server):
    """One fold per version, of one push from every worker.

    A worker that leaves after its push has given that push: the push is still folded with its version.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.pushed: set[int] = set()

    def push(self, p: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.count_push(p)
        self.pushed.add(p)
        self.waiting.add(p)
        return self.fold_when_complete()

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.remove(worker)
        return self.fold_when_complete()

    def fold_when_complete(self) -> tuple[list[int], list[int]]:
        live = set(self.t)
        if not self.pushed or not live <= self.pushed:
            return [], []
        folded = sorted(self.pushed)
        self.pushed.clear()
        self.version += 1
        return folded, self.send_ok(live)


PLAYS = Plays(Bsp, specs=("bsp",), simulated=("bsp",), timed=False)
