"""A worker of one side of the step benchmark: the orders that it answers, whoever started its process.

Refuses to know the sides: what makes its peer is given.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from fastps.bench.peers import Job, fused_sgd


class Member:
    """Makes the peer with the threads that are its share of the cores, then obeys."""

    def __init__(self, job: Job, make: Callable[[], Any]) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.workers))
        self.peer = make()

    def __call__(self, order: int) -> tuple[Any, Any]:
        """So many steps, after one that brings all together: (begin, end) in ns. Order 0: lowest and highest weight."""
        if order == 0:
            weights = self.peer.weights.detach()
            return float(weights.min()), float(weights.max())
        self.peer.run(1)
        began_ns = time.monotonic_ns()
        self.peer.run(order)
        return began_ns, time.monotonic_ns()

    def close(self) -> None:
        """The end of this process' part."""
        close = getattr(self.peer, "close", None)
        if close is not None:
            close()


def load_torch() -> None:
    """Let torch import, before workers are forked, what it imports at an optimizer's first step: seconds in each, else."""
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    fused_sgd([parameter]).step()
