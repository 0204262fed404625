"""Batches whose size follows the grant: R2SP's batch tuning (section IV) for a torch data loader.

Every worker draws its own share of a permutation that all agree on, so nobody shares a sample within an epoch. Refuses to
balance what is left when one worker's share is used up before another's: tuned batches use a fast worker's share up sooner,
and it begins the next epoch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fastps.torch.optimizer import DistributedOptimizer


class BatchSampler(torch.utils.data.Sampler[list[int]]):
    """For `DataLoader(data, batch_sampler=...)`: lists of indices, each as long as `optimizer.batch_size` when it is drawn.

    With `num_workers` of the loader above 0 batches are drawn ahead, so a tuned size takes effect that many batches later.

    Args:
        samples: number of samples of the data set.
        optimizer: the DistributedOptimizer; give it `batch_size=`, the size before anything is tuned.
        seed: decides the permutations; the same for all workers. `set_epoch` as for torch's DistributedSampler.

    Raises ValueError when the optimizer knows no batch size.
    """

    def __init__(self, samples: int, optimizer: "DistributedOptimizer", seed: int = 0) -> None:
        if optimizer.batch_size < 1:
            raise ValueError("expected DistributedOptimizer(batch_size=...), the size before anything is tuned, found none")
        self._samples = samples
        self._optimizer = optimizer
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass have the order of this epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
        self._epoch += 1
        worker = self._optimizer.worker
        order = torch.randperm(self._samples, generator=generator)[worker.rank :: worker.store.layout.workers].tolist()
        while order:
            size = self._optimizer.batch_size
            batch, order = order[:size], order[size:]
            yield batch
