"""The hardsync protocol of Rudra (Gupta et al., section 3.1): BSP's decisions, and its own learning rate.

"Each learner calculates exactly one mini-batch and sends its gradient to the parameter server. The parameter server
averages the gradients and updates the weights [...], then broadcasts the new weights to all learners. Staleness in the
hardsync protocol is always zero."
"""

import math

from tests.oracles.bsp import Bsp
from tests.oracles.plays import Plays


def learning_rate_factor(workers: int, batch: int, reference_batch: int) -> float:
    """Section 3.2: "multiplied by a factor sqrt(lambda mu / B), where B is the batch size of the reference model"."""
    return math.sqrt(workers * batch / reference_batch)


class HardSync(Bsp):
    """BSP that asserts staleness zero for every gradient."""

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:
        assert timestamp == self.version, f"a gradient of version {timestamp} at version {self.version}"
        self.clock_event(now_ns)
        return super().push(p, now_ns)

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        return super().leave(worker, now_ns)


PLAYS = Plays(lambda workers, reference_batch: HardSync(workers), specs=("hardsync:128",), simulated=("hardsync:64",))
