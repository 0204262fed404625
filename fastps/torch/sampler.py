"""Each worker's share of the data: of a loader, of a data set, of a tensor, and of batches whose size follows the grant.

All workers draw the same order, from one seed and the number of the pass, and each takes every N-th sample of it. So no two
workers draw the same sample within a pass. In a job that is resumed the first pass goes on behind the steps that were made.
Where the grants of a version carry batches of one sum (bsp,tune=true), each batch is the next part of that order: a version has
the samples that it would have with equal batches.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler, Subset

from fastps.errors import UnsupportedError, UsageError
from fastps.job import environment
from fastps.store import jobs_of_process

if TYPE_CHECKING:
    from fastps.store.worker import Worker
    from fastps.torch.optimizer import DistributedOptimizer

logger = logging.getLogger("fastps.torch")

Uneven = Literal["drop", "keep"]


def shard(data: Any, optimizer: "DistributedOptimizer | None" = None, *, uneven: Uneven = "drop", seed: int = 0) -> Any:
    """This worker's share of the data: every N-th sample, another one for each worker.

    A DataLoader becomes one with the same options, whose batches are of this worker's samples; the batch size stays that of
    one worker, or under bsp,tune=true follows the grants. With shuffle=True, or a sampler that has a `generator`, all workers
    draw one common order, a new one in each pass. In a job that is resumed, and in a lost worker's replacement, the first
    pass goes on behind the steps that were made, a batch each, and `loader.sampler.epoch` is the number of the next pass. One
    worker draws everything, in the same order.

    Args:
        data: a DataLoader; a data set, map-style or iterable; a tensor, an array, a list, a tuple or a range, cut along its
            first dimension; or a dict of these. All workers must read an iterable data set in one order, and a resumed job
            begins at its start. A loader that is a share already stays as it is.
        optimizer: the DistributedOptimizer whose worker this is; default: this process's own, or what its launcher says.
        uneven: the N-th part of a length that N does not divide. "drop": all workers have equally many samples, and those left
            over, fewer than N, are other ones in each shuffled pass. "keep": the first workers have one more.
        seed: seed of the orders, the same in all workers.

    Raises:
        UnsupportedError: The loader has a sampler of its own, whose order may differ between the workers.
        UsageError: The data or an option is of another kind.

    >>> shard(list(range(5)))
    [0, 1, 2, 3, 4]
    """
    if uneven not in get_args(Uneven):
        raise UsageError(f"uneven: expected drop or keep, found {uneven!r:.40}")
    environment.note_division()
    if isinstance(data, Mapping):
        return {name: shard(each, optimizer, uneven=uneven, seed=seed) for name, each in data.items()}
    if isinstance(data, DataLoader):
        return _shared_loader(data, optimizer, uneven, seed)
    rank, workers, _ = _place(optimizer)
    if isinstance(data, IterableDataset):
        return _IterableShare(data, rank, workers, uneven)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        kind = type(data).__name__
        raise UsageError(f"shard: expected a DataLoader, a data set, a tensor, a list, or a dict of these, found {kind}")
    own = _own(len(data), rank, workers, uneven)
    if isinstance(data, torch.Tensor | np.ndarray | list | tuple | range):
        return data[own.start : own.stop : own.step]
    return Subset(data, own)


def _place(optimizer: "DistributedOptimizer | None") -> tuple[int, int, int]:
    """The worker's number, how many there are, and the steps that were made when it attached."""
    if optimizer is not None:
        return optimizer._identity.rank, optimizer._identity.workers, optimizer.worker.begun_at
    worker = jobs_of_process.open_worker()
    rank, workers = environment.own_rank(), environment.own_world_size()
    if worker is not None and workers == 1:  # the script has said which worker this is
        rank, workers = worker.rank, worker.store.layout.workers
    return rank, workers, 0 if worker is None else worker.begun_at


def _own(samples: int, rank: int, workers: int, uneven: Uneven) -> range:
    """A worker's places in an order of so many samples.

    >>> list(_own(7, 1, 3, "drop")), list(_own(7, 0, 3, "keep"))
    ([1, 4], [0, 3, 6])
    """
    return range(rank, samples - samples % workers if uneven == "drop" else samples, workers)


class Share(Sampler[Any]):
    """This worker's samples among those that `sampler` draws, which is given the same generator in all workers.

    `batch_size` and `drop_last` are those of the loader: they say how many steps a pass has.
    """

    def __init__(
        self,
        sampler: "Sampler[Any]",
        optimizer: "DistributedOptimizer | None",
        batch_size: int = 1,
        *,
        drop_last: bool = False,
        uneven: Uneven = "drop",
        seed: int = 0,
    ) -> None:
        self._sampler, self._optimizer, self._uneven, self._seed = copy.copy(sampler), optimizer, uneven, seed
        self._batch_size, self._drop_last = batch_size, drop_last
        self._epoch = -1  # before the first pass, when the job may not have begun
        self._begun = -1, 0  # the pass that goes on behind so many samples

    @property
    def epoch(self) -> int:
        """The number of the next pass, from 0; in a resumed job that of the pass in which it goes on."""
        self._begin()
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order in the next pass, as of torch's DistributedSampler."""
        self._begin()
        self._epoch = epoch

    def _begin(self) -> None:
        if self._epoch < 0:
            _, _, steps = _place(self._optimizer)
            self._epoch, done = divmod(steps, self.steps)
            self._begun = self._epoch, done * self._batch_size

    @property
    def steps(self) -> int:
        """The batches of a whole pass. Where they are drawn together, what is left over at its end is dropped."""
        if self.drawing_worker() is not None:
            return max(1, len(self._sampler) // (_place(self._optimizer)[1] * self._batch_size))  # type: ignore[arg-type]
        batches, rest = divmod(len(self), self._batch_size)
        return max(1, batches + (rest > 0 and not self._drop_last))

    def drawing_worker(self) -> "Worker | None":
        """The worker whose grants carry its part of a sum of batches; None under a discipline without such."""
        worker = jobs_of_process.open_worker() if self._optimizer is None else self._optimizer.worker
        policy = None if worker is None else worker.store.layout.policy
        return worker if policy is not None and policy.tune and policy.is_level else None

    def drawn(self, worker: "Worker") -> Iterator[list[Any]]:
        """One pass of batches as large as the grants say: a version's are next to each other in the common order."""
        behind, of_version = self._begin_pass() // self._batch_size, _place(self._optimizer)[1] * self._batch_size
        order = self._order(self._epoch - 1)
        for step in range(behind, self.steps):
            worker.drawn_samples = size = worker.batch_size or self._batch_size
            first = step * of_version + worker.lane.samples_before(self._batch_size)
            yield [order[place % len(order)] for place in range(first, first + size)]

    def _order(self, epoch: int) -> list[Any]:
        if hasattr(self._sampler, "generator"):
            self._sampler.generator = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
        return list(self._sampler)

    def __len__(self) -> int:
        """The samples of a whole pass."""
        rank, workers, _ = _place(self._optimizer)
        return len(_own(len(self._sampler), rank, workers, self._uneven))  # type: ignore[arg-type]  # those of torch have it

    def __iter__(self) -> Iterator[Any]:
        """One pass, and the next one's order is another."""
        behind = self._begin_pass()
        rank, workers, _ = _place(self._optimizer)
        order = self._order(self._epoch - 1)
        yield from [order[place] for place in _own(len(order), rank, workers, self._uneven)][behind:]

    def _begin_pass(self) -> int:
        """Begin the next pass. Returns how many samples of this worker it goes on behind."""
        self._begin()
        (begun, done), self._begun = self._begun, (-1, 0)
        self._epoch += 1
        return done if begun == self._epoch - 1 else 0


class _Batches(torch.utils.data.BatchSampler):
    """Batches of a share, as large as the loader's, or as the grants say."""

    sampler: Share

    def __len__(self) -> int:
        return self.sampler.steps if self.sampler.drawing_worker() is not None else super().__len__()

    def __iter__(self) -> Iterator[list[Any]]:
        worker = self.sampler.drawing_worker()
        yield from super().__iter__() if worker is None else self.sampler.drawn(worker)


class _IterableShare(IterableDataset[Any]):
    """Every N-th sample of an iterable data set, which all workers read in the same order."""

    def __init__(self, data: "IterableDataset[Any]", rank: int, workers: int, uneven: Uneven) -> None:
        self._data, self._rank, self._workers, self._keeps = data, rank, workers, uneven == "keep"

    def __len__(self) -> int:
        return len(_own(len(self._data), self._rank, self._workers, "keep" if self._keeps else "drop"))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        own = None
        for number, sample in enumerate(self._data):
            place = number % self._workers
            if place == self._rank:
                own = sample
                if self._keeps:
                    yield own
            if place == self._workers - 1 and not self._keeps:
                yield own


def _shared_loader(
    loader: "DataLoader[Any]", optimizer: "DistributedOptimizer | None", uneven: Uneven, seed: int
) -> "DataLoader[Any]":
    """A copy of the loader, of its own class, in which the sampler or the iterable data set is this worker's share."""
    given: Any = loader
    if isinstance(given.dataset, IterableDataset):
        if isinstance(given.dataset, _IterableShare):
            return loader
        rank, workers, _ = _place(optimizer)
        return _changed(loader, dataset=_IterableShare(given.dataset, rank, workers, uneven))
    batches = given.batch_sampler
    sampler: Any = given.sampler if batches is None else getattr(batches, "sampler", None)
    if isinstance(batches, BatchSampler) or isinstance(sampler, Share | DistributedSampler):
        return loader
    is_torchs = batches is None or type(batches) is torch.utils.data.BatchSampler
    if not is_torchs or not (isinstance(sampler, SequentialSampler) or hasattr(sampler, "generator")):
        raise UnsupportedError(
            f"shard: the loader has a {type(batches if not is_torchs else sampler).__name__}, which may draw another order in"
            " each worker: expected shuffle=True or False, or a sampler with a `generator`; draw this worker's share in it"
            " (fastps.rank(), fastps.world_size())"
        )
    size, drops = (1, False) if batches is None else (batches.batch_size, batches.drop_last)
    own = Share(sampler, optimizer, size, drop_last=drops, uneven=uneven, seed=seed)
    _warn_of_no_batch(own, len(sampler) if hasattr(sampler, "__len__") else 0, size if drops else 1)
    if batches is None:
        return _changed(loader, sampler=own)
    return _changed(loader, sampler=own, batch_sampler=_Batches(own, size, drops))


def _warn_of_no_batch(own: Share, samples: int, least: int) -> None:
    """Warn of a share that makes no batch of `least` samples, where all samples would make one."""
    if samples >= least > len(own):
        logger.warning(
            "fastps.shard: this worker's share has no batch: it has %d of %d samples, and a batch needs %d%s; use fewer"
            " workers, smaller batches, or more samples",
            len(own),
            samples,
            least,
            " (drop_last=True)" if least > 1 else "",
        )


def _changed(loader: "DataLoader[Any]", **parts: Any) -> "DataLoader[Any]":
    """A copy of a loader with other parts, which a DataLoader lets nobody set: it keeps all options, and its class."""
    made = copy.copy(loader)
    made.__dict__.update(parts, _iterator=None)
    return made


class BatchSampler(Sampler[list[int]]):
    """Lists of indices for `DataLoader(data, batch_sampler=...)`, each as long as `optimizer.batch_size` when it is drawn.

    Batches follow the sizes that grants carry. A loader with `num_workers` above 0 draws batches ahead, so a tuned size takes
    effect that many batches later: tell each push its size then (`report_loss`). Under bsp,tune=true each batch is the next of
    one order of all workers. Under r2sp (section IV) shares are not rebalanced: a fast worker uses its share up sooner than the
    others, and begins its next epoch.

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
        self._optimizer = optimizer
        environment.note_division()
        self._share = Share(RandomSampler(range(samples)), optimizer, optimizer.batch_size, uneven="keep", seed=seed)

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order in the next pass."""
        self._share.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        worker = self._share.drawing_worker()
        if worker is not None:
            yield from self._share.drawn(worker)
            return
        order = list(self._share)
        while order:
            size = self._optimizer.batch_size
            batch, order = order[:size], order[size:]
            self._optimizer.worker.drawn_samples = len(batch)
            yield batch
