"""Optimizers around another, inside fastps and around it: Lookahead, and SAM, which needs a second gradient."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import fastps
from tests.support import processes
from tests.torch.any_optimizer.test_fold import are_same, loss_of, new_model, values_of

STEPS = 7


class Lookahead(torch.optim.Optimizer):
    """Shares the groups of another optimizer; it has a state of its own, and a state dict of its own form."""

    def __init__(self, optimizer: Any, every: int = 3) -> None:
        self.optimizer, self.every, self.count = optimizer, every, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = defaultdict(dict)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach().clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        slow = {(0, index): self.state[each]["slow"] for index, each in enumerate(self.param_groups[0]["params"])}
        return {"slow": slow, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])
        self.param_groups = self.optimizer.param_groups
        for index, each in enumerate(self.param_groups[0]["params"]):
            self.state[each]["slow"] = state_dict["slow"][0, index].clone()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.optimizer.step(closure)
        self.count += 1
        for parameter in self.param_groups[0]["params"] if self.count % self.every == 0 else ():
            slow = self.state[parameter]["slow"]
            slow.lerp_(parameter.data, 0.5)
            parameter.data.copy_(slow)


class SAM(torch.optim.Optimizer):
    """The form that most people copy: two calls, or a step with a closure."""

    def __init__(self, params: Any, base: Callable[[Any], Any]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            self.state[each]["old"] = each.data.clone()
            each.add_(each.grad * (0.05 / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each in [each for group in self.param_groups for each in group["params"]]:
            each.data = self.state[each]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise ValueError("expected a closure")
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def lookahead(wrap_inner: Callable[[Any], Any], wrap: Callable[[Any], Any], parameters: Any) -> Any:
    return wrap(Lookahead(wrap_inner(sgd(parameters))))


def sam(wrap_inner: Callable[[Any], Any], wrap: Callable[[Any], Any], parameters: Any) -> Any:
    return wrap(SAM(parameters, lambda groups: wrap_inner(sgd(groups))))


def as_it_is(optimizer: Any) -> Any:
    return optimizer


def run(make: Callable[[Any], Any], ranks: list[int], way: str = "step") -> list[list[float]]:
    """Train, in plain torch with the sum of the gradients of all `ranks`: the weights."""
    model = new_model()
    optimizer = make(model.parameters())
    for step in range(STEPS):

        def closure(step: int = step) -> None:
            optimizer.zero_grad()
            sums = [torch.zeros_like(each) for each in model.parameters()]
            for rank in ranks:
                found = torch.autograd.grad(loss_of(model, 100 * step + rank), list(model.parameters()))
                sums = [one + other for one, other in zip(sums, found, strict=True)]
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter.grad = total * (1 / len(ranks))

        closure()
        if way == "two":
            optimizer.first_step()
            closure()
            optimizer.second_step()
        else:
            optimizer.step(*[closure][: way == "closure"])
    job = next((each for each in (optimizer, *vars(optimizer).values()) if isinstance(each, fastps.DistributedOptimizer)), None)
    if job is not None:
        job.wait_for_others()
        job.close()
        assert job.version == STEPS
    return values_of(model)


def of_workers(make: Callable[[Any], Any], workers: int, way: str = "step") -> list[Any]:
    def work(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        return run(make, [rank], way)

    return processes.results(processes.start_job(work, workers), 60)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"server": "process"}], ids=["worker 0", "server"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.sampled(2)
def test_lookahead_inside_is_as_without_fastps(workers: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    expected = run(partial(lookahead, as_it_is, as_it_is), list(range(workers)))
    wrap = partial(fastps.DistributedOptimizer, **options)
    assert of_workers(partial(lookahead, as_it_is, wrap), workers) == [expected] * workers


@pytest.mark.parametrize("workers", [1, 2])
def test_lookahead_around_is_as_without_fastps_under_bsp(workers: int) -> None:
    torch.set_num_threads(1)
    expected = run(partial(lookahead, as_it_is, as_it_is), list(range(workers)))
    assert of_workers(partial(lookahead, fastps.DistributedOptimizer, as_it_is), workers) == [expected] * workers


def test_the_state_dict_of_a_wrapper_travels_and_loads() -> None:
    def work(rank: int) -> bool:
        torch.set_num_threads(1)
        model = new_model()
        with fastps.DistributedOptimizer(Lookahead(sgd(model.parameters()))) as optimizer:
            loss_of(model, rank).backward()
            optimizer.step()
            optimizer.wait_for_others()
            state = optimizer.state_dict()
            if rank:
                with pytest.raises(fastps.UsageError, match="of torch's form, found slow, inner: use state_dict"):
                    _ = optimizer.state
        return are_same(optimizer.state_dict(), state) and set(state["slow"]) == {(0, 0), (0, 1)}

    assert processes.results(processes.start_job(work, 2), 60) == [True, True]


@pytest.mark.parametrize(("wraps", "way"), [("inside", "closure"), ("around", "closure"), ("around", "two")])
def test_one_workers_sam_is_as_without_fastps(wraps: str, way: str) -> None:
    both = (as_it_is, fastps.DistributedOptimizer) if wraps == "inside" else (fastps.DistributedOptimizer, as_it_is)
    assert run(partial(sam, *both), [0], way) == run(partial(sam, as_it_is, as_it_is), [0], way)


def _by_hand(workers: int) -> list[list[float]]:
    """SAM of one process, whose workers each perturb along their own gradient."""
    models = [new_model() for _ in range(workers)]
    inner = sgd(models[0].parameters())
    for step in range(STEPS):
        sums = [torch.zeros_like(each) for each in models[0].parameters()]
        for rank, model in enumerate(models):
            model.load_state_dict(models[0].state_dict())
            own = SAM(model.parameters(), sgd)
            own.zero_grad()
            loss_of(model, 100 * step + rank).backward()
            before = [each.detach().clone() for each in model.parameters()]
            own.first_step()
            found = torch.autograd.grad(loss_of(model, 100 * step + rank), list(model.parameters()))
            sums = [one + other for one, other in zip(sums, found, strict=True)]
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.data.copy_(old)
        for parameter, total in zip(models[0].parameters(), sums, strict=True):
            parameter.grad = total * (1 / workers)
        inner.step()
    return values_of(models[0])


@pytest.mark.parametrize("way", ["closure", "two"])
def test_workers_sam_around_perturbs_along_each_workers_gradient(way: str) -> None:
    """The cure that the errors below name."""
    torch.set_num_threads(1)
    found = of_workers(partial(sam, fastps.DistributedOptimizer, as_it_is), 2, way)
    assert found == [_by_hand(2)] * 2


def test_sam_inside_is_refused_by_name_where_it_cannot_be() -> None:
    model = new_model()
    with fastps.DistributedOptimizer(SAM(model.parameters(), sgd)) as optimizer:
        loss_of(model, 0).backward()
        optimizer.first_step()
        with pytest.raises(fastps.UsageError, match=r"inside SAM, which is wrapped, .*make SAM around it"):
            optimizer.second_step()

    def work(rank: int) -> None:
        run(partial(sam, as_it_is, fastps.DistributedOptimizer), [rank], "closure")

    children = processes.start_job(work, 2)
    processes.finish(children, 60)
    kind, text = children[0].outcome
    assert kind == "UnsupportedError" and "SAM: ValueError: expected a closure; step()" in text and "around it" in text
