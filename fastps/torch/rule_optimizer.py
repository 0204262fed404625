"""A user-defined update rule as a torch optimizer that DistributedOptimizer can wrap.

It cannot step by itself: the rule is compiled for the fold, which runs it for any number of workers, also for one.
"""

from collections.abc import Iterable
from typing import Any

import torch

from fastps.errors import UsageError
from fastps.job.user_rules import UserRule


class RuleOptimizer(torch.optim.Optimizer):
    """The param_groups of a rule made by `fastps.rule`. The learning rate is stored as "lr", where torch's schedulers find it.

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
