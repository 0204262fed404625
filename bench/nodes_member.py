"""One worker of `fastps bench nodes`, in a process of its own: SIDE PARAMETERS STEPS. It prints the seconds of its steps."""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastps.job import environment
from fastps.torch.optimizer import DistributedOptimizer

WARM_UP = 2


def main() -> None:
    """Run one side."""
    side, parameters, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rank = environment.rank()
    # torchrun's agent would keep the store; here worker 0 does.
    store = dist.TCPStore(*_address(), is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    seconds, result = (_fastps if side == "fastps" else _gloo)(store, rank, parameters, WARM_UP + steps)
    print(json.dumps({"seconds": seconds[WARM_UP:], "result": result}))
    # The store's keeper ends last.
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < environment.world_size():
        time.sleep(0.01)


def _fastps(store: Any, rank: int, parameters: int, steps: int) -> tuple[list[float], float]:
    """Steps with gradients of ones; the weights count them."""
    weights = torch.nn.Parameter(torch.zeros(parameters))
    seconds = []
    with DistributedOptimizer(torch.optim.SGD([weights], lr=1.0)) as optimizer:
        optimizer.expose_gradients()
        assert weights.grad is not None
        weights.grad.fill_(1.0)
        optimizer.wait_for_start()
        for _ in range(steps):
            optimizer.expose_gradients()
            began = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        optimizer.wait_for_others()
        return seconds, float(weights.detach()[-1])


def _gloo(store: Any, rank: int, parameters: int, steps: int) -> tuple[list[float], float]:
    """All-reduces of ones, over and over."""
    workers, limit = environment.world_size(), timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=limit)
    gradient, seconds = torch.ones(parameters), []
    for _ in range(steps):
        gradient.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(gradient)
        seconds.append(time.perf_counter() - began)
    found = float(gradient[-1])
    dist.destroy_process_group()
    return seconds, found


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


if __name__ == "__main__":
    main()
