"""A model with tables, its batches, and the optimizers that update rows: for tests of jobs with sparse gradients."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

import fastps

ROWS, WIDTH = 300, 16


class TableModel(torch.nn.Module):
    """Two tables and a linear layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bag = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.one = torch.nn.Embedding(50, 10, sparse=True)
        self.top = torch.nn.Linear(WIDTH + 10, 1)

    def forward(self, bags: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
        """One number for each sample."""
        found: torch.Tensor = self.top(torch.cat([self.bag(bags), self.one(ones)], 1))
        return found.squeeze(1)

    def tables(self) -> list[torch.nn.Parameter]:
        """The tables' weights."""
        return [self.bag.weight, self.one.weight]


Batch = tuple[torch.Tensor, torch.Tensor]


def batches_of(steps: int, size: int, seed: int = 1) -> list[Batch]:
    """Rows of both tables for each sample; a few rows are in many samples."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        bags = (torch.rand(size, 5, generator=generator) ** 3 * ROWS).long()
        found.append((bags, torch.randint(0, 50, (size,), generator=generator)))
    return found


def loss_of(model: TableModel, batch: Batch) -> torch.Tensor:
    """The mean distance to a target that depends on the batch's rows."""
    return torch.nn.functional.mse_loss(model(*batch), batch[0].sum(1) / ROWS)


def train_on(model: TableModel, optimizers: Iterable[torch.optim.Optimizer], batches: Iterable[Batch]) -> None:
    """Step all optimizers on each batch."""
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()


MAKERS: dict[str, Callable[[TableModel], list[torch.optim.Optimizer]]] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05)],
    "maximized-sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=1e-5, maximize=True)],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1)],
    "sparse-adam": lambda model: [
        torch.optim.Adam(model.top.parameters(), lr=0.01),
        torch.optim.SparseAdam(model.tables(), lr=0.01),
    ],
    "row-wise-adagrad": lambda model: [
        torch.optim.SGD(model.top.parameters(), lr=0.05),
        fastps.RowWiseAdagradOptimizer(model.tables(), lr=0.05),
    ],
}


@contextlib.contextmanager
def wrapped(model: TableModel, name: str, resume: Iterable[Path] = ()) -> Iterator[list[fastps.DistributedOptimizer]]:
    """The optimizers of this name as jobs under bsp, which are closed in the end; each may begin from a checkpoint."""
    with contextlib.ExitStack() as stack:
        pairs = itertools.zip_longest(MAKERS[name](model), resume)
        jobs = (fastps.DistributedOptimizer(each, "bsp", model=model, resume=folder) for each, folder in pairs)
        yield [stack.enter_context(job) for job in jobs]
