"""What one process of a turn is told, as JSON on its command line, and the barrier that all processes of a turn share."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Order:
    """One process's part of a turn.

    Attributes:
        program: the side, such as fastps or gloo.
        parameters: the size of the model, in float32.
        steps, warm_up: steps that are measured, and steps before them.
        interface: the node's interface, whose bytes the node's first worker counts.
        local_workers: the workers of each node.
        backward_s: the time that backward takes on an accelerator; 0 for steps without a model.
    """

    program: str
    parameters: int
    steps: int
    warm_up: int
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


def rendezvous(*, is_keeper: bool) -> Any:
    """The store at which the processes of a turn meet. One of them keeps it, and must end last."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=is_keeper, wait_for_workers=False)  # type: ignore[attr-defined]


def meet(store: Any, name: str, count: int) -> None:
    """Wait until `count` processes have come to a barrier of this name, which can be used once."""
    if store.add(f"{name} came", 1) == count:
        store.set(f"{name} all", b"1")
    store.wait([f"{name} all"])
