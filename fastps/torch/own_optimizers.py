"""The torch optimizers that torch does not have: for users' update rules, and row-wise Adagrad for embedding tables."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastps.errors import UnsupportedError, UsageError
from fastps.job.user_rules import UserRule


class RuleOptimizer(torch.optim.Optimizer):
    """The param_groups of a rule made by `fastps.rule`. The learning rate is stored as "lr", where torch's schedulers find it.

    It cannot step by itself: the rule is compiled for the fold, which runs it for any number of workers, also for one.

    >>> from fastps import DistributedOptimizer, rule
    >>> @rule(hyper=("learning_rate",))
    ... def sign_sgd(weight, gradient, learning_rate):
    ...     return weight - learning_rate * (1 if gradient > 0 else -1)
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad(): _ = model.weight.fill_(1.0)
    >>> with DistributedOptimizer(RuleOptimizer(model.parameters(), sign_sgd, learning_rate=0.25)) as opt:
    ...     model(torch.ones(1, 2)).sum().backward(); opt.step()
    >>> model.weight.tolist()
    [[0.75, 0.75]]

    Raises:
        TypeError: A hyper-parameter of the rule is given neither here, by name, nor in its param_group, or one is unknown.
    """

    def __init__(self, params: Iterable[Any], rule: UserRule, **hyper: float) -> None:
        self.rule = rule
        defaults = {_key(name): float(value) for name, value in hyper.items()}
        super().__init__(params, defaults)
        expected = {_key(name) for name in rule.hyper_names}
        for group in self.param_groups:
            found = {name for name in group if name not in ("params", "param_names")}
            if found != expected:
                raise TypeError(
                    f"rule {rule.name!r}: expected the hyper-parameters {', '.join(sorted(expected))}, found"
                    f" {', '.join(sorted(found)) or 'none'}"
                )

    def step(self, closure: Any = None) -> Any:
        """Raise UsageError: only fastps.DistributedOptimizer runs the rule."""
        raise UsageError("a RuleOptimizer does not step by itself: wrap it in fastps.DistributedOptimizer, also for one worker")


def _key(name: str) -> str:
    return "lr" if name == "learning_rate" else name


class RowWiseAdagradOptimizer(torch.optim.Optimizer):
    """Adagrad with one accumulator for each row: it adds the mean of the squares of the row's gradient.

    Recommendation models use it, because its state is one number for a row and not a row. All parameters are weights of layers
    with sparse=True. It steps by itself, and `DistributedOptimizer` wraps it.

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
