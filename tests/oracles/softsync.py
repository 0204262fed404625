"""The n-softsync protocol of Rudra (Gupta et al., section 3.1), and its measure of staleness, equation (2).

Learning rates, which use the staleness, are left out.
"""

from tests.oracles.plays import Plays
from tests.oracles.server import Server


def average_staleness(version: int, timestamps: list[int]) -> float:
    """Equation (2): <sigma> = (i - 1) - mean(i_1, ..., i_n), of the gradients that led to weights timestamp i."""
    assert max(timestamps) < version, f"max {max(timestamps)} of the vector clock, not below {version}"
    return (version - 1) - sum(timestamps) / len(timestamps)


class SoftSync(Server):
    """A fold of "at least c = floor(lambda / n) gradients" with any timestamps; no worker waits, no push is dropped.

    lambda is the number of live learners, so c shrinks as they leave; c is never below 1. The gradients of a learner that
    has left stay in the sum.
    """

    def __init__(self, workers: int, n: int) -> None:
        super().__init__(workers)
        assert n >= 1
        self.n = n
        self.collected: list[tuple[int, int]] = []  # (learner, timestamp) of each gradient in the sum
        # "Parameter Server records the vector clock of each weight update": (new timestamp, timestamps of its gradients).
        self.history: list[tuple[int, list[int]]] = []

    def c(self) -> int:
        return max(1, len(self.t) // self.n)  # c = floor(lambda / n)

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:
        assert timestamp <= self.version, f"a gradient of version {timestamp}, which is still to come"
        self.clock_event(now_ns)
        self.count_push(p)
        self.collected.append((p, timestamp))
        return self.update_when_complete(), self.send_ok({p})

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.remove(worker)
        return self.update_when_complete(), []

    def update_when_complete(self) -> list[int]:
        # "The parameter server updates the weights after collecting at least c gradients." With no learner left c is 1, so
        # the collected gradients are used although no more will come.
        if len(self.collected) < self.c():
            return []
        return self.update()

    def update(self) -> list[int]:
        """Apply the collected gradients; return their learners."""
        self.version += 1  # equation (5)
        self.history.append((self.version, sorted(timestamp for _, timestamp in self.collected)))
        folded = sorted(learner for learner, _ in self.collected)
        self.collected.clear()
        return folded


PLAYS = Plays(
    SoftSync,
    specs=("softsync:1",),
    sized={
        "softsync:2": lambda workers: f"softsync:{min(2, workers)}",
        "softsync:30": lambda workers: f"softsync:{min(30, workers)}",
    },
    simulated=("softsync:3",),
)
