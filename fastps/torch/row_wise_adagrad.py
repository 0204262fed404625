"""Row-wise Adagrad as a torch optimizer: one accumulator for each row of an embedding table.

torch has no such optimizer; recommendation models use it, because its state is one number for a row and not a row.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastps.errors import UnsupportedError


class RowWiseAdagradOptimizer(torch.optim.Optimizer):
    """Adagrad with one accumulator for each row: it adds the mean of the squares of the row's gradient.

    All parameters are weights of layers with sparse=True. It steps by itself, and `DistributedOptimizer` wraps it.

    >>> table = torch.nn.Embedding(4, 2, sparse=True)
    >>> optimizer = RowWiseAdagradOptimizer(table.parameters(), lr=0.5)
    >>> with torch.no_grad(): _ = table.weight.zero_()
    >>> table(torch.tensor([1])).sum().backward(); optimizer.step()
    >>> table.weight[1].tolist(), optimizer.state[table.weight]["sum"].flatten().tolist()
    ([-0.5, -0.5], [0.0, 1.0, 0.0, 0.0])

    Args:
        params: the tables' weights, or param_groups of them.
        lr: the learning rate.
        eps: is added to the root of the accumulator.
        maximize: whether to go up the gradient.

    Raises:
        ValueError: A learning rate or an eps below 0.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, *, maximize: bool = False) -> None:
        if lr < 0 or eps < 0:
            raise ValueError(f"expected lr and eps of 0 or more, found {lr} and {eps}")
        super().__init__(params, {"lr": lr, "eps": eps, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that have a gradient. Raises UnsupportedError for a dense gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._step_rows(table, group)
        return loss

    def _step_rows(self, table: torch.Tensor, group: dict[str, Any]) -> None:
        assert table.grad is not None
        if table.grad.layout is not torch.sparse_coo:
            raise UnsupportedError(f"expected a sparse gradient, found {table.grad.layout}: build the layer with sparse=True")
        gradient = table.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        if group["maximize"]:
            values = -values
        entry = self.state[table]
        if not entry:
            entry["step"] = torch.tensor(0.0, dtype=torch.float32)
            entry["sum"] = table.new_zeros(len(table), 1)
        entry["step"] += 1
        entry["sum"][rows] += values.square().mean(1, keepdim=True)
        table[rows] -= group["lr"] * values / (entry["sum"][rows].sqrt() + group["eps"])
