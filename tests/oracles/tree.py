"""Rudra-adv's tree of parameter servers (Gupta et al., section 3.3, Figure 2) over n-softsync, and so Rudra-adv*'s.

The oracle decides when a leaf passes its sum on and when the root updates, not how sums are made or moved. Adv* differs from
adv by threads and a weights' tree, and makes the same decisions.
"""

from tests.oracles.plays import Plays
from tests.oracles.softsync import SoftSync


class Tree(SoftSync):
    """`groups` leaves; learner l is the responsibility of leaf floor(l * groups / lambda_0).

    "Each node in the parameter server group is responsible for averaging the gradients sent from its learners and relaying
    the averaged gradient to its parent." The paper does not say when. Here a leaf relays as soon as it holds as many gradients
    as it has live learners, or the share `relay` of them. The root counts gradients, as equation (5) does, not messages.
    """

    def __init__(self, workers: int, n: int, groups: int = 2, relay: float = 1.0) -> None:
        super().__init__(workers, n)
        self.leaf_of = {learner: learner * groups // workers for learner in range(workers)}
        self.part = relay
        self.held: dict[int, list[tuple[int, int]]] = {leaf: [] for leaf in range(groups)}

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.count_push(p)
        self.held[self.leaf_of[p]].append((p, timestamp))
        self.relay(self.leaf_of[p])
        return self.update_when_complete(), self.send_ok({p})

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.remove(worker)
        self.relay(self.leaf_of[worker])
        return self.update_when_complete(), []

    def relay(self, leaf: int) -> None:
        live = sum(self.leaf_of[learner] == leaf for learner in self.t)
        if len(self.held[leaf]) >= self.part * live:
            self.collected += self.held[leaf]
            self.held[leaf] = []

    def update_when_complete(self) -> list[int]:
        # With no learner left no gradient will be added, so the collected ones are used.
        if not self.collected or (self.t and len(self.collected) < self.c()):
            return []
        return self.update()


PLAYS = Plays(
    Tree,
    sized={
        "adv:1,groups=2": lambda workers: f"adv:1,groups={min(2, workers)}",
        "adv:2,groups=3": lambda workers: f"adv:{min(2, workers)},groups={min(3, workers)}",
        "adv:1,groups=3,relay=0.5": lambda workers: f"adv:1,groups={min(3, workers)},relay=0.5",
        "adv:4,groups=all": lambda workers: f"adv:{min(4, workers)},groups={workers}",
    },
    simulated=("adv:2", "adv*:2,groups=3", "adv:2,groups=2,relay=0.5"),
)
