"""What a process of a side is told: its order on the command line, then a line for each turn. It answers each with a line.

All processes of a side share a store, at which they also wait for each other.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from fastps.job import environment


@dataclass(frozen=True)
class Order:
    """One process's part of a side.

    Attributes:
        program: the side, such as fastps or gloo.
        parameters: the size of the model, in float32.
        interface: the node's interface, whose bytes the node's first process counts.
        local_workers: the processes on each node.
        backward_s: the time that backward takes on an accelerator; 0 for steps without a model.
    """

    program: str
    parameters: int
    interface: str
    local_workers: int
    backward_s: float = 0.0

    def arguments(self) -> list[str]:
        """The arguments of the process."""
        return [json.dumps(asdict(self))]

    @staticmethod
    def given() -> "Order":
        """The order of this process."""
        return Order(**json.loads(sys.argv[1]))


def turns() -> Iterator[tuple[int, int]]:
    """The turns of this process: steps that warm up, and steps that are measured."""
    for line in sys.stdin:
        warm_up, steps = map(int, line.split())
        yield warm_up, steps


def answer(**found: Any) -> None:
    """Answer a turn."""
    print(json.dumps(found), flush=True)


class Meeting:
    """The store of a side, which its first process keeps."""

    def __init__(self) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._is_keeper, self._count = environment.rank() == 0, environment.world_size()
        self.store: Any = dist.TCPStore(address, port, is_master=self._is_keeper, wait_for_workers=False)  # type: ignore[attr-defined]
        self._met = 0

    def wait(self) -> None:
        """Wait until all processes have come to this barrier."""
        self._met += 1
        if self.store.add(f"came {self._met}", 1) == self._count:
            self.store.set(f"all {self._met}", b"1")
        self.store.wait([f"all {self._met}"])

    def end(self) -> None:
        """Leave the store. Its keeper leaves last."""
        self.store.add("ended", 1)
        while self._is_keeper and self.store.add("ended", 0) < self._count:
            time.sleep(0.01)
