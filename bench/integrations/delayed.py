"""A training program in one process whose optimizer gets each gradient some steps late: staleness, and nothing else of fastps.

    python -P -m fastps.bench.integrations.delayed 1 examples/transformers_digits_plain.py --seed 0

The program itself stays as it is. A gradient that is K steps late belongs to weights that are K updates old, as a push of
staleness K does under asp, ssp and dssp. So what such a run loses, a run with that staleness loses for this reason.
"""

import runpy
import sys
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Delay:
    """A hook before a step: it puts the gradients of an earlier step in the place of the new ones; at first there are none."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._kept: dict[int, deque[list[torch.Tensor | None]]] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        """Keep this step's gradients, and give the optimizer those of `steps` steps before."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        kept = self._kept.setdefault(id(optimizer), deque())
        kept.append([None if tensor.grad is None else tensor.grad.clone() for tensor in tensors])
        late = kept.popleft() if len(kept) > self._steps else [None] * len(tensors)
        for tensor, gradient in zip(tensors, late, strict=True):
            tensor.grad = gradient


def main() -> None:
    """Run the program that the command line names."""
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    register_optimizer_step_pre_hook(Delay(int(sys.argv[1])))
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
