"""One worker of a side of `fastps bench nodes`, in a process of its own: it makes steps, and counts what its node uses."""

from dataclasses import asdict

import torch

from fastps.bench.two_nodes import counters
from fastps.bench.two_nodes.order import Meeting, Order, answer, turns
from fastps.bench.two_nodes.steps import SIDES
from fastps.job import environment


def main() -> None:
    """Run one worker."""
    order, meeting = Order.given(), Meeting()
    torch.set_num_threads(1)
    counts = environment.rank() % order.local_workers == 0
    with SIDES[order.program](order, meeting.store) as side:
        for warm_up, steps in turns():
            for _ in range(warm_up):
                side.step()
            meeting.wait()  # what a node sends at the end of a step has arrived
            before = counters.read(order.interface) if counts else None
            meeting.wait()
            seconds = [side.step() for _ in range(steps)]
            meeting.wait()
            used = counters.read(order.interface) - before if before is not None else None
            answer(seconds=seconds, used=asdict(used) if used is not None else None)
        answer(result=side.finish())
    meeting.end()


if __name__ == "__main__":
    main()
