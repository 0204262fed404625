"""A small model, its batches, and every torch optimizer that the fold runs; scripts with fastps and with torch alone."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fastps
from tests.support.own_processes import LAUNCHERS

STEPS = 200
BATCH = 16

SAME_BITS = ("sgd", "sgd-decay", "momentum", "dampening", "nesterov", "maximize")
# Every optimizer that the fold runs: a row here is covered by all tests of the table.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.001, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adagrad-decays": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, weight_decay=0.01),
    "adagrad-initial": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
    "rmsprop-momentum": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True),
    "rmsprop-all": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9, centered=True, weight_decay=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adam-maximize": lambda p: torch.optim.Adam(p, lr=0.001, maximize=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.005),
    "nadam-decays": lambda p: torch.optim.NAdam(p, lr=0.005, weight_decay=0.01, momentum_decay=0.1),
    "nadam-decoupled": lambda p: torch.optim.NAdam(p, lr=0.005, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "radam-early": lambda p: torch.optim.RAdam(p, lr=0.002, betas=(0.8, 0.9), weight_decay=0.01),
    "radam-decoupled": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adamax-decay": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adadelta-decay": lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.8, weight_decay=0.01),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables; one thread, so that sums have one order."""
    for name in (*LAUNCHERS, "FASTPS_GPUS", "FASTPS_PLACEMENT", "FASTPS_BUCKET_MB"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(13, 17), torch.nn.Tanh(), torch.nn.Linear(17, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    )


def batches_of(steps: int, size: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 13, generator=generator), torch.randint(3, (size,), generator=generator)) for _ in range(steps)]


def share_of(batches: list[tuple[torch.Tensor, torch.Tensor]], rank: int, size: int = BATCH) -> Any:
    """The rows of a worker in the batches of all."""
    own = slice(rank * size, (rank + 1) * size)
    return [(first[own], second[own]) for first, second in batches]


def train_on(
    model: torch.nn.Module,
    optimizer: Any,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    change: Callable[[int], Any] = lambda step: None,
) -> None:
    """A step for each batch; `change(step)` is called between its backward and its step."""
    for step, (inputs, labels) in enumerate(batches):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        change(step)
        optimizer.step()


def steps_on(model: Any, optimizer: Any, inputs: torch.Tensor, steps: int = 1, loss: Callable[..., Any] = torch.sum) -> None:
    """Steps, each with the gradient of a loss of what the model makes of the same inputs."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(inputs)).backward()
        optimizer.step()


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def relative_difference(model: torch.nn.Module, expected: torch.nn.Module) -> float:
    """Greatest absolute difference over the greatest absolute weight."""
    ours = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    theirs = torch.nn.utils.parameters_to_vector(expected.parameters()).detach()
    return float((ours - theirs).abs().max() / theirs.abs().max())


@contextlib.contextmanager
def one_worker(
    model: torch.nn.Module | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    *,
    named: bool = False,
    kind: type[fastps.DistributedOptimizer] = fastps.DistributedOptimizer,
    **options: Any,
) -> Iterator[tuple[Any, fastps.DistributedOptimizer]]:
    """A model, new if none is given, and the optimizer of a job of one worker that ends with the block.

    `named`: the job has the model's names and buffers.
    """
    own = new_model() if model is None else model
    with kind(make(own.parameters()), model=own if named else None, **options) as optimizer:
        yield own, optimizer


def with_and_without(script: Callable[[Callable[..., Any]], Any], **options: Any) -> tuple[Any, Any]:
    """What a script returns with fastps, and with torch alone: it gets a function that wraps an optimizer, or gives it back.

    Jobs have `options`, and end with the script.
    """
    with contextlib.ExitStack() as jobs:
        found = script(lambda inner, **more: jobs.enter_context(fastps.DistributedOptimizer(inner, **options, **more)))
    return found, script(lambda inner, **more: inner)


def as_in_torch(
    run: Callable[[Any, Any], Any],
    make: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    most: float = 0.0,
    model: Callable[[], torch.nn.Module] = new_model,
    **options: Any,
) -> tuple[Any, Any]:
    """Run the same with fastps and with torch alone, on a model each. The weights differ by at most `most`: with 0, in no bit.

    Returns what `run(model, optimizer)` returned with fastps, and what it returned without.
    """

    def script(wrap: Callable[..., Any]) -> tuple[Any, torch.nn.Module]:
        own = model()
        return run(own, wrap(make(own.parameters()))), own

    (found, ours), (expected, theirs) = with_and_without(script, **options)
    assert relative_difference(ours, theirs) <= most
    return found, expected
