"""A worker of one side of the step benchmark, which answers a crew's commands."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from fastps.bench.peers import Job, fused_sgd


class Member:
    """Makes its peer with its share of the cores' threads, then answers commands."""

    def __init__(self, job: Job, make: Callable[[], Any]) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.workers))
        self.peer = make()

    def __call__(self, command: int) -> tuple[Any, Any]:
        """Take `command` steps after one that aligns all workers: (begin, end) in ns. 0: lowest and highest weight."""
        if command == 0:
            weights = self.peer.weights.detach()
            return float(weights.min()), float(weights.max())
        self.peer.run(1)
        began_ns = time.monotonic_ns()
        self.peer.run(command)
        return began_ns, time.monotonic_ns()

    def close(self) -> None:
        """Close the peer, if it can be closed."""
        close = getattr(self.peer, "close", None)
        if close is not None:
            close()


def load_torch() -> None:
    """Take one optimizer step before workers are forked: torch's imports at a first step would cost seconds in each."""
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    fused_sgd([parameter]).step()
