"""Asynchronous parallel as the DSSP paper states it (Zhao et al., section I.A.2).

"All workers send their computed gradients to the parameter server at each iteration but no synchronization is
required. Workers do not wait for each other."
"""

from tests.oracles.plays import Plays
from tests.oracles.server import Server


class Asp(Server):
    """Every push is folded at once and its worker is granted at once."""

    def push(self, p: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.count_push(p)
        self.version += 1
        return [p], self.send_ok({p})

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.remove(worker)
        return [], []


PLAYS = Plays(Asp, specs=("asp", "asp,combine=true"), simulated=("asp",), timed=False)
