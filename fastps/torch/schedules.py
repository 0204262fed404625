"""Learning-rate schedules over the job's updates, which the papers count as steps, instead of a worker's own steps.

The two counts differ under schemes that fold several pushes into one version, or drop some.
"""

from collections.abc import Callable

import torch

from fastps.torch.optimizer import DistributedOptimizer


class GlobalStepLR(torch.optim.lr_scheduler.LambdaLR):
    """The base learning rates times `factor(updates)`, where updates is the job's update count, `optimizer.version`.

    Call `step()` after each `optimizer.step()`, as for any torch scheduler. With several shards the least advanced one counts.
    """

    optimizer: DistributedOptimizer  # torch leaves it out of state_dict()

    def __init__(self, optimizer: DistributedOptimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer, factor)

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates for the job's updates so far."""
        self.last_epoch = self.optimizer.version - 1
        super().step()


def exponential_decay(optimizer: DistributedOptimizer, decay: float, updates: int) -> GlobalStepLR:
    """Multiply the learning rates by `decay` every `updates` updates of the job, smoothly (Chen et al. 2017, appendix A.3).

    Raises ValueError unless 0 < decay <= 1 and updates > 0.
    """
    if not 0 < decay <= 1 or updates <= 0:
        raise ValueError(f"expected 0 < decay <= 1 and updates > 0, found decay={decay}, updates={updates}")
    return GlobalStepLR(optimizer, lambda version: float(decay ** (version / updates)))
