"""One worker of `fastps bench nodes`, in a process of its own. It prints the seconds of its steps, and what its node used."""

import json
import time
from dataclasses import asdict

import torch

from fastps.bench.two_nodes import counters
from fastps.bench.two_nodes.order import Order, meet, rendezvous
from fastps.bench.two_nodes.steps import SIDES
from fastps.job import environment


def main() -> None:
    """Run one side."""
    order = Order.given()
    torch.set_num_threads(1)
    rank, workers = environment.rank(), environment.world_size()
    counts = rank % order.local_workers == 0
    # torchrun's agent would keep the store; here worker 0 does.
    store = rendezvous(is_keeper=rank == 0)
    with SIDES[order.program](order, store) as side:
        for _ in range(order.warm_up):
            side.step()
        meet(store, "warm", workers)  # what a node sends at the end of a step has arrived
        before = counters.read(order.interface) if counts else None
        meet(store, "counted", workers)
        seconds = [side.step() for _ in range(order.steps)]
        meet(store, "done", workers)
        used = counters.read(order.interface) - before if before is not None else None
        result = side.finish()
    print(json.dumps({"seconds": seconds, "result": result, "used": asdict(used) if used is not None else None}))
    # The store's keeper ends last.
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < workers:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
