"""Batches whose size follows the grant: R2SP's batch tuning (section IV) for a torch data loader.

Each worker draws its own share of a common permutation, so no two workers draw the same sample within an epoch. Shares are not
rebalanced: with tuned batches a fast worker uses its share up sooner than the others, and begins its next epoch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fastps.torch.optimizer import DistributedOptimizer


class BatchSampler(torch.utils.data.Sampler[list[int]]):
    """Lists of indices for `DataLoader(data, batch_sampler=...)`, each as long as `optimizer.batch_size` when it is drawn.

    A loader with `num_workers` above 0 draws batches ahead, so a tuned size takes effect that many batches later.

    In a job that is resumed, and in a lost worker's replacement, the first pass goes on behind the steps that were made: of
    tuned sizes each counts as one of the first size.

    Args:
        samples: number of samples in the data set.
        optimizer: the DistributedOptimizer; give it `batch_size=`, the size before any tuning.
        seed: seed of the permutations, the same for all workers. `set_epoch` works as in torch's DistributedSampler.

    Raises:
        ValueError: The optimizer has no batch size.
    """

    def __init__(self, samples: int, optimizer: "DistributedOptimizer", seed: int = 0) -> None:
        if optimizer.batch_size < 1:
            raise ValueError("expected DistributedOptimizer(batch_size=...), the size before anything is tuned, found none")
        self._samples = samples
        self._optimizer = optimizer
        self._seed = seed
        worker = optimizer.worker
        own = len(range(worker.rank, samples, worker.store.layout.workers))
        self._epoch, done = divmod(worker.begun_at, max(1, -(-own // optimizer.batch_size)))
        self._begun = self._epoch, done * optimizer.batch_size  # where the first pass goes on

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order in the next pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
        self._epoch += 1
        worker = self._optimizer.worker
        order = torch.randperm(self._samples, generator=generator)[worker.rank :: worker.store.layout.workers].tolist()
        (begun, done), self._begun = self._begun, (-1, 0)
        order = order[done:] if begun == self._epoch - 1 else order
        while order:
            size = self._optimizer.batch_size
            batch, order = order[:size], order[size:]
            yield batch
