"""One worker of a live run, in a process of its own: PARAMETERS COMPUTE_MS SECONDS. It prints the times of its steps."""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from fastps.job import environment
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.torch.optimizer import DistributedOptimizer


def main(clock: Clock = SYSTEM_CLOCK) -> None:
    """Be one worker."""
    parameters, compute_ms, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    rank, workers = environment.rank(), environment.world_size()
    # torchrun's agent would keep the store; here worker 0 does.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    weights = torch.nn.Parameter(torch.zeros(parameters))
    steps = []
    with DistributedOptimizer(torch.optim.SGD([weights], lr=1e-6, momentum=0.9), timeout_s=120) as optimizer:
        optimizer.expose_gradients()
        assert weights.grad is not None
        weights.grad.fill_(1.0)
        optimizer.wait_for_start()
        store.add("begun", 1)
        while store.add("begun", 0) < workers:  # workers of other nodes may be slow to start
            clock.sleep_ns(10_000_000)
        over_ns = clock.now_ns() + int(1e9 * seconds)
        while clock.now_ns() < over_ns:
            optimizer.expose_gradients()
            begin_ns = clock.now_ns()
            clock.sleep_ns(int(1e6 * compute_ms))
            computed_ns = clock.now_ns()
            optimizer.step()
            steps.append((begin_ns, computed_ns, clock.now_ns()))
    print(json.dumps(steps[1:]))
    store.set_timeout(timedelta(seconds=60))
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < workers:  # the store's keeper ends last
        clock.sleep_ns(10_000_000)


if __name__ == "__main__":
    main()
