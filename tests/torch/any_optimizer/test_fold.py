"""Optimizers that the core does not know: worker 0 runs their step(), with the bits of plain torch."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.kernels.combining.fold_call import FoldCall, FoldedPush
from fastps.kernels.update.fold import FOLD_EACH
from fastps.torch.any_optimizer.fold import TorchFold
from fastps.torch.tensors import Tensors
from tests.support import processes
from tests.support.said import listen

STEPS = 12


class Own(torch.optim.Optimizer):
    """Of a course: state in another type, a count of its own, gradients that it writes to, and `p.data` set anew."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.count, self.mode = 0, "train"

    def eval(self) -> None:
        self.mode = "eval"

    def entries(self) -> int:
        return len(self.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.bfloat16))
                    mean.lerp_(p.grad.bfloat16(), 0.1)
                    p.grad.mul_(2)
                    p.data = p.data - group["lr"] * (mean.to(p.dtype) + 0.1 * p.grad / self.count)


class OwnAdam(torch.optim.Adam):
    """A subclass that a library makes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["eps"] = 1e-8 * (1 + len(self.state))
        return super().step(closure)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "own": Own,
    "subclass": OwnAdam,
    "adafactor": torch.optim.Adafactor,
    "rprop": torch.optim.Rprop,
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    KINDS["muon"] = lambda parameters: torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=0.02)


def new_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False))


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    inputs, wanted = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
    return (model(inputs) - wanted).square().mean()


def values_of(model: torch.nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def plain(kind: str, workers: int = 1, steps: int = STEPS) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """One process that sums the gradients of all workers in their order."""
    model = new_model()
    optimizer = KINDS[kind](model.parameters())
    for step in range(steps):
        sums: list[torch.Tensor] = []
        for rank in range(workers):
            found = torch.autograd.grad(loss_of(model, 100 * step + rank), list(model.parameters()))
            sums = [one + other for one, other in zip(sums, found, strict=True)] if sums else list(found)
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total * (1 / workers)
        optimizer.step()
    return model, optimizer


def train(model: torch.nn.Module, optimizer: Any, rank: int = 0, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, 100 * step + rank).backward()
        optimizer.step()


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_has_the_weights_and_the_state_of_plain_torch(kind: str) -> None:
    expected, inner = plain(kind)
    model = new_model()
    with fastps.DistributedOptimizer(KINDS[kind](model.parameters())) as optimizer:
        train(model, optimizer)
        assert are_same(optimizer.state_dict(), inner.state_dict())
    assert values_of(model) == values_of(expected)
    assert are_same(optimizer.state_dict(), inner.state_dict()), "after close, too"


def test_workers_that_are_forks_of_a_process_with_threads_do_not_wait_for_those() -> None:
    """OpenMP's threads are not in a fork, whose next parallel loop would wait for them."""

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        parameter = torch.nn.Parameter(torch.ones(1_000_000))
        with fastps.DistributedOptimizer(Own([parameter])) as optimizer:
            for _ in range(2):
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()

    def parent() -> None:
        torch.set_num_threads(2)
        torch.ones(1_000_000).mul_(2.0).sum()
        processes.results(processes.start_job(work, 2), 30)

    assert processes.ended(parent).exit_code == 0


CLOSURES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4),
    "line search": lambda parameters: torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe"),
    "subclass": OwnAdam,
}


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("kind", CLOSURES)
@pytest.mark.sampled(3)
def test_one_workers_step_calls_a_closure_at_the_weights_that_it_moves(kind: str, sync: str) -> None:
    """A parameter that is frozen at first, one that the script writes, and a closure that fails once."""

    def run(wrap: Callable[[Any], Any]) -> tuple[list[list[float]], list[float], list[float]]:
        model, losses = new_model(), []
        model[0].weight.requires_grad_(False)
        optimizer, calls = wrap(inner := CLOSURES[kind](model.parameters())), [0]

        def closure() -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 9:
                raise ArithmeticError("the closure fails")
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        for step in range(8):
            if step == 3:
                model[0].weight.requires_grad_(True)
                inner.state.clear()  # LBFGS has one vector for all
            before = values_of(model)
            try:
                losses.append(float(optimizer.step(closure).detach()))
            except ArithmeticError:
                inner.state.clear()
                for parameter, values in zip(model.parameters(), before, strict=True):
                    parameter.data.copy_(torch.tensor(values).view_as(parameter))
            with torch.no_grad():
                model[2].weight.mul_(0.9)
                model[0].weight.mul_(0.9)
        gradients = [value for each in model.parameters() for value in each.grad.flatten().tolist()]  # type: ignore[union-attr]
        if isinstance(optimizer, fastps.DistributedOptimizer):
            optimizer.close()
        return values_of(model), losses, gradients

    assert run(partial(fastps.DistributedOptimizer, sync=sync)) == run(lambda inner: inner)


class OfGraphs(torch.optim.Optimizer):
    """Needs backward(create_graph=True)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        found = torch.autograd.grad(sum(each.grad.square().sum() for each in parameters), parameters)
        with torch.no_grad():
            for parameter, curvature in zip(parameters, found, strict=True):
                parameter.sub_(0.1 * parameter.grad / (1 + curvature.abs()))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_one_workers_step_sees_the_gradients_with_their_graph() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[list[float]]:
        optimizer = wrap(OfGraphs((model := new_model()).parameters()))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward(create_graph=True)
            optimizer.step()
        if isinstance(optimizer, fastps.DistributedOptimizer):
            optimizer.close()
        return values_of(model)

    assert run(fastps.DistributedOptimizer) == run(lambda inner: inner)


class OwnAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("kind", [OwnAdamW, torch.optim.AdamW])
def test_a_subclass_beside_another_optimizer_in_python_keeps_the_bits_and_a_compiled_one_roughly(kind: Any) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        model = new_model()
        first, last = model[0].weight, model[2].weight
        optimizers = [wrap(each) for each in (torch.optim.Adafactor([first]), kind([last], lr=0.01))]
        for step in range(20):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers if wrap is fastps.DistributedOptimizer else ():
            optimizer.close()
        return [each.detach().clone() for each in model.parameters()]

    found, expected = run(fastps.DistributedOptimizer), run(lambda inner: inner)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0 if kind is OwnAdamW else 1e-4)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("own", "muon")])
def test_workers_have_the_weights_of_one_process_that_sums_in_their_order(kind: str, workers: int) -> None:
    """Worker 0 makes fewer steps than the others in the end, whose pushes it folds before it closes."""

    def work(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        model = new_model()
        with fastps.DistributedOptimizer(KINDS[kind](model.parameters())) as optimizer:
            train(model, optimizer, rank)
            if rank:
                optimizer.zero_grad()
                (0 * loss_of(model, 0)).backward()
                optimizer.step()
            return values_of(model) if rank == 0 else [[float(optimizer.version)]]

    torch.set_num_threads(1)
    expected = values_of(plain(kind, workers)[0])
    children = processes.start_job(work, workers)
    processes.finish(children, 60)
    assert children[0].outcome == expected
    assert [child.outcome for child in children[1:]] == [[[STEPS + 1.0]]] * (workers - 1)


class Failing(Own):
    """Fails, or is killed, in its third step."""

    end = "raise"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.count == 3 and self.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == 3:
            raise ArithmeticError("the user's step fails")


@pytest.mark.parametrize("end", ["raise", "kill"])
def test_a_step_that_fails_ends_the_job_by_name_and_publishes_nothing(end: str) -> None:
    def work(rank: int) -> None:
        Failing.end = end
        model = new_model()
        with fastps.DistributedOptimizer(Failing(model.parameters()), timeout_s=20) as optimizer:
            try:
                train(model, optimizer, rank)
            finally:
                assert optimizer.version == 2

    children = processes.start_job(work, 2)
    processes.finish(children, 60)
    own, other = (child.outcome for child in children)
    assert own == (("ArithmeticError", "the user's step fails") if end == "raise" else None)
    assert other[0] == "WorkerDiedError"
    assert ("ArithmeticError: the user's step fails" if end == "raise" else "worker 0") in other[1]


def test_methods_that_the_wrapped_optimizer_alone_has_are_the_wrappers() -> None:
    model = new_model()
    with fastps.DistributedOptimizer(inner := Own(model.parameters())) as optimizer:
        train(model, optimizer, steps=2)
        optimizer.eval()
        assert (inner.count, inner.mode) == (2, "eval")


def test_a_state_dict_is_loaded_by_the_wrapped_optimizers_own_method() -> None:
    _, inner = plain("adafactor", steps=3)
    model = new_model()
    with fastps.DistributedOptimizer(torch.optim.Adafactor(model.parameters())) as optimizer:
        optimizer.load_state_dict(inner.state_dict())
        assert are_same(optimizer.state_dict(), inner.state_dict())
        optimizer.__setstate__({"param_groups": optimizer.param_groups})  # as some loaders of states do
        train(model, optimizer, steps=1)
        assert {int(entry["step"]) for entry in optimizer.state.values()} == {4}


def test_a_parameter_that_is_trained_later_and_hooks_count_as_in_torch() -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[list[list[float]], list[int]]:
        model, calls = new_model(), [0]
        model[0].weight.requires_grad_(False)
        inner = Own(model.parameters())
        inner.register_step_post_hook(lambda *_: calls.append(calls[-1] + 1))
        optimizer = wrap(inner)
        for step in range(6):
            model[0].weight.requires_grad_(step > 2)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        if isinstance(optimizer, fastps.DistributedOptimizer):
            optimizer.close()
        return values_of(model), calls

    expected = run(lambda inner: inner)
    assert run(fastps.DistributedOptimizer) == expected and expected[1] == list(range(7))


def test_a_push_that_is_not_finite_is_rejected_before_the_optimizer_sees_it() -> None:
    model = new_model()
    with fastps.DistributedOptimizer(Own(model.parameters())) as optimizer:
        train(model, optimizer, steps=1)
        before = values_of(model)
        (loss_of(model, 0) * float("inf")).backward()
        optimizer.step()
        assert values_of(model) == before and optimizer._inner.count == 1 and optimizer.statistics()[0].rejected == 1


def test_the_moving_average_follows_each_version() -> None:
    model, mean = new_model(), [each.detach().clone() for each in new_model().parameters()]
    with fastps.DistributedOptimizer(Own(model.parameters()), "bsp:ema=0.5") as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            mean = [0.5 * (one + other.detach()) for one, other in zip(mean, model.parameters(), strict=True)]
        with optimizer.averaged_weights():
            for one, other in zip(mean, model.parameters(), strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-7)


def test_parameters_in_half_precision_have_float32_masters() -> None:
    model, masters = new_model().bfloat16(), new_model().bfloat16().float()
    inner = torch.optim.Adafactor(masters.parameters())
    with fastps.DistributedOptimizer(torch.optim.Adafactor(model.parameters())) as optimizer:
        for step in range(5):
            optimizer.zero_grad()
            for one, other in zip(model.parameters(), masters.parameters(), strict=True):
                one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
                other.grad = one.grad.float()
            optimizer.step()
            inner.step()
    for one, other in zip(model.parameters(), masters.parameters(), strict=True):
        assert one.dtype == torch.bfloat16 and torch.equal(one, other.bfloat16())


def test_each_push_is_a_step_where_a_discipline_folds_each() -> None:
    model, (expected, _) = new_model(), plain("own")
    with fastps.DistributedOptimizer(Own(model.parameters()), "asp") as optimizer:
        train(model, optimizer)
        optimizer.wait_for_others()
    assert values_of(model) == values_of(expected)


@pytest.mark.parametrize(("kind", "options", "found"), [
    (Own, {"sync": "bsp,shards=2"}, "shards=1, found 2 shards"),
    (Own, {"sync": "auto"}, "a fixed sync, found sync='auto'"),
    (torch.optim.LBFGS, {"max_workers": 2, "on_worker_loss": "continue"},
     "one worker, without clip=.*, because each step evaluates the loss several times, found up to 2 under bsp"),
    (torch.optim.LBFGS, {"sync": "bsp:clip=1"}, "one worker, without clip=.* found up to 1 under bsp,clip=1"),
])  # fmt: skip
def test_what_an_optimizer_in_python_cannot_be_is_refused_by_name(kind: Any, options: dict[str, Any], found: str) -> None:
    with pytest.raises(fastps.UnsupportedError, match=rf"{kind.__name__}: .*runs its step\(\) in Python: expected {found}"):
        fastps.DistributedOptimizer(kind(new_model().parameters()), **options)


def test_a_weights_buffer_has_memory_from_the_first_version_that_it_gets() -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 18))
    with fastps.DistributedOptimizer(Own([weight])) as optimizer:
        store = optimizer.worker.store

        def models() -> float:
            return os.fstat(store.descriptor).st_blocks * 512 / weight.nbytes

        weight.sum().backward()
        optimizer.step()
        assert store.arena.buffers == 4 and 3.0 < models() < 3.5, "two buffers and a slot"
        pinned = optimizer.pin_whole_version({})  # as a checkpoint does
        optimizer.step()
        optimizer.step()
        assert 4.0 < models() < 4.5, "one more"
        pinned.close()


def test_another_worker_reads_the_state_of_the_published_version() -> None:
    def work(rank: int) -> tuple[bool, bool]:
        torch.set_num_threads(1)
        model = new_model()
        with fastps.DistributedOptimizer(Own(model.parameters())) as optimizer:
            train(model, optimizer, rank)
            assert optimizer.entries() == len(list(model.parameters()))
            found = optimizer.state_dict(), {"state": dict(enumerate(optimizer.state.values()))}
        _, inner = plain("own", 2)
        return are_same(found[0], inner.state_dict()), are_same(found[1]["state"], inner.state_dict()["state"])

    children = processes.start_job(work, 2)
    processes.finish(children, 60)
    assert [child.outcome for child in children] == [(True, True)] * 2


def test_worker_0_closes_before_another_one_reads_the_last_state(tmp_path: Path) -> None:
    def work(rank: int) -> bool:
        torch.set_num_threads(1)
        model, closed = new_model(), tmp_path / "closed"
        optimizer = fastps.DistributedOptimizer(Own(model.parameters()))
        train(model, optimizer, rank)
        if rank:
            optimizer.wait_for_others()
            while not closed.exists():
                time.sleep(0.01)
            assert are_same(optimizer.state_dict(), plain("own", 2)[1].state_dict())
        optimizer.close()
        closed.touch()
        return are_same(optimizer.state_dict(), plain("own", 2)[1].state_dict()) and optimizer._inner.count == STEPS

    torch.set_num_threads(1)
    assert processes.results(processes.start_job(work, 2), 60) == [True, True]


@pytest.mark.parametrize(("option", "what"), [("lr", "learning_rate 0.02 and 0.04"), ("alpha", "others than the rates")])
def test_workers_that_begin_with_other_options_are_told_that_worker_0s_count(option: str, what: str) -> None:
    def work(rank: int) -> list[str]:
        said, model = listen(), new_model()
        inner = torch.optim.ASGD(model.parameters(), **{"lr": 0.02, option: 0.02 * (1 + rank)})
        with fastps.DistributedOptimizer(inner) as optimizer:
            train(model, optimizer, rank)
        return [each for each in said if "other options" in each]

    zero, _ = processes.results(processes.start_job(work, 2), 60)
    assert len(zero) == 1 and f"({what}): a version takes those of worker 0" in zero[0]


def test_pushes_are_steps_in_the_order_of_the_versions_and_not_of_their_slots() -> None:
    """Two pushes of a worker in one commit: with momentum the order decides."""
    model = torch.nn.Linear(1, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with fastps.Store.create({"w": np.ones((1, 1), np.float32)}, fastps.SGD(lr=0.1), sync="asp") as store:
        for slot in (0, 1):
            store.gradient_views(0, slot)[0][:] = slot + 1
            np.frombuffer(store.memory, np.uint8, 8, store.arena.presence_offset(0, slot))[0] = 1
        pushes = [FoldedPush(0, slot, 1.0, 1.0, 1) for slot in (1, 0)]
        made = TorchFold(inner, Tensors(list(model.parameters())).enter(store))
        assert made.fold(FoldCall(0, FOLD_EACH, 1.0, 1.0, 0, 1, 0, 1, pushes)) is None
        assert store.weight_views([1])[0].item() == pytest.approx(1 - 0.1 * (2 + (1 + 0.5 * 2)))
