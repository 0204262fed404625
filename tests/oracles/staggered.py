"""Rudra's n-softsync with its learners staggered as R2SP staggers workers: our own combination of the two papers.

The folds are those of softsync, and the grants are those of R2SP.
"""

from tests.oracles.plays import Plays
from tests.oracles.r2sp import RoundRobin
from tests.oracles.softsync import SoftSync


class StaggeredSoftSync(RoundRobin):
    """A gradient joins the sum when it arrives; its learner proceeds in its turn, a gap after the previous learner."""

    def __init__(self, workers: int, n: int, stagger: float) -> None:
        super().__init__(workers, stagger)
        self.folds = SoftSync(workers, n)

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.count_push(p)
        self.waiting.add(p)
        self.profile(p)
        folded, _ = self.folds.push(p, now_ns, timestamp)
        self.version = self.folds.version
        return folded, self.issue_permissions()

    def join(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.folds.join(worker, now_ns)
        return super().join(worker, now_ns)

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.remove(worker)
        folded, _ = self.folds.leave(worker, now_ns)
        self.version = self.folds.version
        return folded, self.issue_permissions()


PLAYS = Plays(
    StaggeredSoftSync,
    specs=("softsync:1,stagger=0.8",),
    sized={"softsync:4,stagger=1": lambda workers: f"softsync:{min(4, workers)},stagger=1"},
    simulated=("softsync:2,stagger=0.5",),
)
