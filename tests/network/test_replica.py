"""Replicas: every node of a job under bsp has the whole state, so a script may do there what it does on one node."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from tests.support import nodes
from tests.support.rules import lazy_rule

STEPS, BATCH, WORKERS = 6, 4, 3


@dataclass(frozen=True)
class Case:
    """A job: its optimizer, its discipline, what its model and steps are like, and how far two sums of floats may differ."""

    make: Callable[[Any], Any]
    sync: str = "bsp"
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    before_step: Callable[[Any, int, int], None] = lambda optimizer, rank, step: None
    off: float = 1e-6


def _adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.05)


def _momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _squares(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return weight * weight, gradient * gradient


@lazy_rule(sums=_squares)
def _lars(weight, gradient, learning_rate, weights, gradients):  # type: ignore[no-untyped-def]
    return weight - learning_rate * math.sqrt(weights / (gradients + 1e-12)) * gradient


def _summing(parameters: Any) -> Any:
    return fastps.RuleOptimizer(parameters, _lars(), learning_rate=0.1)


def _skip(optimizer: Any, rank: int, step: int) -> None:
    """As a GradScaler does: worker 1 skips every third step, and all scale."""
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.found_inf = torch.tensor(float(rank == 1 and step % 3 == 1))


CASES = {
    "adamw": Case(_adam),
    "clip": Case(_momentum, "bsp,clip=0.05"),
    "ema": Case(_momentum, "bsp,ema=0.9"),
    "float64": Case(_adam, dtype=torch.float64, off=1e-12),
    "halves": Case(_momentum, dtype=torch.bfloat16, off=1e-2),
    "hardsync": Case(_momentum, "hardsync:8", options={"batch_size": BATCH}),
    "pushed halves": Case(_momentum, options={"push_dtype": torch.bfloat16}),
    "rule with sums": Case(_summing, off=1e-5),
    "scaler": Case(_momentum, before_step=_skip),
}


def _model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)


def _gradients(model: torch.nn.Module, rank: int, step: int) -> None:
    inputs = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(100 * step + rank))
    model(inputs.to(next(model.parameters()).dtype)).square().sum().backward()


def _run(case: Case, rank: int) -> tuple[list[Any], list[Any]]:
    """Train; the weights, and the tensors of the state."""
    model = _model(case.dtype)
    with fastps.DistributedOptimizer(case.make(model.parameters()), case.sync, timeout_s=30, **case.options) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            _gradients(model, rank, step)
            case.before_step(optimizer, rank, step)
            optimizer.step()
        with optimizer.averaged_weights():
            averages = [tensor.detach().double().numpy().copy() for tensor in model.parameters()]
        state = optimizer.state_dict()["state"]
        found = [value.double().numpy() for each in state.values() for value in each.values() if torch.is_tensor(value)]
        assert optimizer.version == STEPS
    return averages, found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_job_over_two_nodes_has_the_weights_and_the_state_of_one_node() -> None:
    """Whatever the optimizer, the types, the scales and the skips are; and all nodes have the same bits."""

    def work(rank: int) -> Any:
        return {name: _run(case, rank) for name, case in CASES.items()}

    alone = nodes.train((WORKERS,), work)[0]
    found = nodes.train((1, 2), work)
    for name, case in CASES.items():
        for each in found:
            for tensors, expected, first in zip(each[name], alone[name], found[0][name], strict=True):
                assert len(tensors) == len(expected)
                for tensor, other, of_first in zip(tensors, expected, first, strict=True):
                    assert np.abs(tensor - other).max() <= case.off, name
                    assert np.array_equal(tensor, of_first), name


@pytest.mark.slow
def test_what_a_worker_of_one_node_writes_into_the_job_reaches_the_other_nodes() -> None:
    """Weights and state that node 1 alone writes; the next version of all nodes begins from them."""

    def work(rank: int) -> Any:
        weights = torch.nn.Parameter(torch.zeros(4))
        optimizer = fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0, momentum=0.5), timeout_s=30)
        optimizer.wait_for_start()
        seen = []
        for step in range(4):
            if step == 1 and rank == 1:
                optimizer.replace_weights([torch.full((4,), 10.0)])
            if step == 3 and rank == 0:
                entry = optimizer.state_dict()
                entry["state"][0]["momentum_buffer"] = torch.full((4,), 8.0)
                optimizer.load_state_dict(entry)
            weights.grad = torch.ones(4)
            optimizer.step()
            seen.append(weights[0].item())
        buffer = optimizer.state_dict()["state"][0]["momentum_buffer"][0].item()
        optimizer.close()
        return seen, buffer

    # Momentum 1, 1.5, 1.75; then 8 is loaded: 8 * 0.5 + 1.
    assert nodes.train((1, 1), work) == [([-1.0, 8.5, 6.75, 1.75], 5.0)] * 2


@pytest.mark.slow
def test_an_optimizer_that_was_loaded_before_it_is_wrapped_goes_on_with_node_0s_state() -> None:
    def work(rank: int) -> Any:
        weights = torch.nn.Parameter(torch.zeros(4))
        plain = torch.optim.SGD([weights], lr=1.0, momentum=0.5)
        plain.state[weights]["momentum_buffer"] = torch.full((4,), 2.0 + rank)
        with fastps.DistributedOptimizer(plain, timeout_s=30) as optimizer:
            weights.grad = torch.ones(4)
            optimizer.step()
            return weights[0].item()

    assert nodes.train((1, 1), work) == [-2.0] * 2


@pytest.mark.slow
@pytest.mark.parametrize("bad", [(0,), (0, 1)])
def test_a_push_that_is_not_finite_is_dropped_on_all_nodes(bad: tuple[int, ...]) -> None:
    """The others of its version count. A version without any push that counts changes nothing."""

    def work(rank: int) -> Any:
        weights = torch.nn.Parameter(torch.zeros(4))
        with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), timeout_s=30) as optimizer:
            for step in range(3):
                weights.grad = torch.full((4,), float("nan") if step == 1 and rank in bad else 1.0 + rank)
                optimizer.step()
            return weights[0].item(), optimizer.statistics()[rank].rejected, optimizer.version

    mean, alone = 1.5, (2.0 if bad == (0,) else 0.0)
    assert nodes.train((1, 1), work) == [(-2 * mean - alone, int(rank in bad), 3) for rank in range(2)]


def test_nodes_whose_workers_make_different_numbers_of_steps_end_with_the_same_weights() -> None:
    """A node that is done makes the versions of the others, of which it brings nothing."""

    def work(rank: int) -> Any:
        weights = torch.nn.Parameter(torch.zeros(4))
        with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), timeout_s=30) as optimizer:
            for _ in range(2 + 3 * (rank == 1)):
                weights.grad = torch.full((4,), 1.0 + rank)
                optimizer.step()
            optimizer.wait_for_others()
            return weights[0].item(), optimizer.version

    assert nodes.train((1, 1), work) == [(-2 * 1.5 - 3 * 2.0, 5)] * 2


@pytest.mark.slow
def test_a_job_starts_once_the_workers_of_all_nodes_have_attached() -> None:
    def work(rank: int) -> Any:
        weights = torch.nn.Parameter(torch.zeros(4))
        if rank == 2:
            time.sleep(1.0)
        came = time.monotonic()
        with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            return came, time.monotonic()

    found = nodes.train((1, 2), work)
    assert min(started for _, started in found) >= max(came for came, _ in found)


def _averaged(rank: int) -> Any:
    """Running means and variances: each worker's own; averaged in the middle, and once all have left."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, timeout_s=30)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank)) + rank).sum().backward()
        optimizer.step()
        if step == 1:
            optimizer.average_buffers()
            found.append([value.double().clone().numpy() for value in model.buffers()])
    optimizer.wait_for_others()
    optimizer.average_buffers()
    found.append([value.double().clone().numpy() for value in model.buffers()])
    optimizer.close()
    return found


@pytest.mark.slow
def test_buffers_are_averaged_over_the_workers_of_all_nodes() -> None:
    """In the middle of training and at its end, to the same bits on all nodes, and as on one node."""
    alone, found = nodes.train((3,), _averaged)[0], nodes.train((1, 2), _averaged)
    for each in found:
        for buffers, expected, first in zip(each, alone, found[0], strict=True):
            for buffer, other, of_first in zip(buffers, expected, first, strict=True):
                assert np.abs(buffer - other).max() < 1e-5
                assert np.array_equal(buffer, of_first)


def test_workers_that_do_not_average_when_others_do_end_the_job() -> None:
    def work(rank: int) -> Any:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        try:
            with fastps.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model=model, timeout_s=30
            ) as optimizer:
                for _ in range(3):
                    model(torch.randn(8, 3)).sum().backward()
                    optimizer.step()
                    if rank:
                        optimizer.average_buffers()
        except fastps.Error as error:
            return str(error)
        return ""

    for text in nodes.train((1, 1), work):
        assert "the workers of node 1 average their buffers, and those of node 0 make a step" in text


@pytest.mark.slow
def test_statistics_have_a_row_for_each_worker_of_all_nodes() -> None:
    def work(rank: int) -> Any:
        weights = torch.nn.Parameter(torch.zeros(4))
        with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            at_first = [(row.rank, row.state) for row in optimizer.statistics()]
            for _ in range(8):
                time.sleep(0.2)
                weights.grad = torch.ones(4)
                optimizer.step()
            now = optimizer.statistics()
            optimizer.wait_for_others()
            at_last = [(row.steps, row.folded) for row in optimizer.statistics()]
            return at_first, [row.rank for row in now], [row.steps for row in now], at_last

    for rank, (at_first, ranks, steps, at_last) in enumerate(nodes.train((1, 2), work)):
        assert at_first == [(0, "live"), (1, "live"), (2, "live")]
        assert ranks == [0, 1, 2]
        assert all(count >= 4 for count in steps), "no row is older than a second"
        assert steps[rank] == 8
        assert at_last == [(8, 8)] * 3, "of all nodes, once their workers have ended"
