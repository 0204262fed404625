"""Models in half precision on several nodes: float32 gradients and weights travel, and each node makes the halves itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from tests.support import nodes, processes

STEPS = 8


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(13, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3)
    return torch.nn.Sequential(*layers).bfloat16()


def _backward(model: torch.nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs, labels = torch.randn(8, 13, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    torch.nn.functional.cross_entropy(model(inputs.bfloat16()), labels).backward()


def _expected(workers: int) -> torch.Tensor:
    """The masters after steps with the mean of all workers' gradients."""
    model = _model(0)
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(workers):
            _backward(model, rank, step)
            for parameter, master in zip(model.parameters(), masters, strict=True):
                assert parameter.grad is not None
                mine = parameter.grad.float() / workers
                master.grad = mine if master.grad is None else master.grad + mine
            model.zero_grad()
        optimizer.step()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.data.copy_(master.data)
    return torch.cat([master.detach().reshape(-1) for master in masters])


def _work(sync: str, push_dtype: torch.dtype | None) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        model = _model(rank)  # rank 0's weights are everyone's first, on the other node too
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with fastps.DistributedOptimizer(inner, sync=sync, push_dtype=push_dtype, timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            for step in range(STEPS):
                optimizer.zero_grad()
                _backward(model, rank, step)
                optimizer.step()
            optimizer.wait_for_others()
            masters = torch.cat([torch.tensor(weights).reshape(-1) for weights in optimizer.worker.weights.values()])
            halves = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
            assert torch.equal(halves, masters.bfloat16())
            return masters.tolist()

    return work


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"FASTPS_LOCAL_STEPS": "3"}], ids=["each step", "local steps"])
def test_two_nodes_train_float32_masters_and_show_their_halves(variables: dict[str, str]) -> None:
    first, second = nodes.train((1, 1), _work("bsp", torch.float32), **variables)
    assert first == second
    if not variables:
        assert torch.allclose(torch.tensor(first), _expected(2), atol=1e-5)


def test_halves_are_not_pushed_to_a_home() -> None:
    with nodes.rendezvous() as port:
        children = nodes.start((1, 1), port, _work("asp", None))
        processes.finish(children, 60)
    for child in children:
        assert child.outcome[0] == "UnsupportedError"
        assert "expected push_dtype=torch.float32, found bfloat16" in child.outcome[1]
