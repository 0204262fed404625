"""Sums that begin during backward: results have the same bits as without them, whatever a script does to its gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.job import wire
from fastps.network.group_sums import GroupSums
from fastps.torch.early import EarlyMarks
from tests.support import nodes

STEPS = 7


class Model(torch.nn.Module):
    """Four layers, one of which some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(4))

    def forward(self, inputs: torch.Tensor, without: int = -1) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            inputs = torch.tanh(layer(inputs)) if number != without else inputs
        return inputs.square().sum()


def _backward(model: Model, rank: int, step: int, without: int = -1) -> None:
    model(torch.randn(3, 24, generator=torch.Generator().manual_seed(100 * step + rank)), without).backward()


def _clipped(model: Model, optimizer: Any, rank: int, step: int) -> None:
    _backward(model, rank, step)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _accumulated(model: Model, optimizer: Any, rank: int, step: int) -> None:
    _backward(model, rank, step)
    _backward(model, rank, step + 50)


def _without_sync(model: Model, optimizer: Any, rank: int, step: int) -> None:
    with optimizer.no_sync():
        _backward(model, rank, step)
    _backward(model, rank, step + 50)


def _scaled(model: Model, optimizer: Any, rank: int, step: int) -> None:
    _backward(model, rank, step)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(step == 3 and rank == 1))


def _unused(model: Model, optimizer: Any, rank: int, step: int) -> None:
    _backward(model, rank, step, without=2 if (step + rank) % 2 else -1)


def _replaced(model: Model, optimizer: Any, rank: int, step: int) -> None:
    _backward(model, rank, step)
    if step == 2 and rank == 0:
        model.layers[3].weight.grad = torch.ones(24, 24)


SCRIPTS: dict[str, Callable[[Model, Any, int, int], None]] = {
    "plain": lambda model, optimizer, rank, step: _backward(model, rank, step),
    "clipped": _clipped,
    "accumulated": _accumulated,
    "no_sync": _without_sync,
    "scaled": _scaled,
    "unused": _unused,
    "replaced": _replaced,
}


def _run(script: Callable[[Model, Any, int, int], None], rank: int, begun: Path | None, frozen: bool = False) -> bytes:
    """Train; the bits of the weights. In the first step wait for a file that the node's agent makes once it has begun a sum."""
    model = Model()
    if frozen:
        model.layers[1].requires_grad_(False)
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), timeout_s=30) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            script(model, optimizer, rank, step)
            if step == 0 and begun is not None:
                nodes.await_files(begun, 1, 20, optimizer.worker.store.job)
            optimizer.step()
        optimizer.wait_for_others()
        return b"".join(tensor.detach().numpy().tobytes() for tensor in model.parameters())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_bits_do_not_depend_on_whether_sums_begin_during_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script begins some of them then."""
    begin_early = GroupSums.begin_early

    def noted(self: GroupSums) -> None:
        begin_early(self)
        if self._early[1]:
            (tmp_path / self._store.job).touch()

    monkeypatch.setattr(wire, "part_count", lambda numbers: 6)
    monkeypatch.setattr(GroupSums, "begin_early", noted)

    def work(rank: int, begun: Path | None = tmp_path) -> Any:
        found = [_run(each, rank, begun) for each in SCRIPTS.values()]
        return [*found, _run(SCRIPTS["plain"], rank, begun, frozen=True)]

    early = nodes.train((1, 2), work)
    monkeypatch.setattr(EarlyMarks, "of", staticmethod(lambda worker, gradients: None))
    late = nodes.train((1, 2), lambda rank: work(rank, None))
    assert early[0] == early[1] == early[2]
    for name, found, expected in zip([*SCRIPTS, "frozen"], early[0], late[0], strict=True):
        assert found == expected, name


@pytest.mark.slow
def test_marks_are_of_parts_from_the_last_on_and_a_push_says_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "part_count", lambda numbers: 2)

    def work(rank: int) -> Any:
        weights = [torch.nn.Parameter(torch.zeros(64)) for _ in range(2)]
        found = []
        with fastps.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), timeout_s=30) as optimizer:
            early, lane = optimizer._job.early, optimizer.worker.lane
            weights[0].sum().backward()
            found.append(lane.marked())  # the first part comes last
            weights[1].sum().backward()
            found.append(lane.marked())
            weights[1].grad.mul_(2.0)
            optimizer.step()
            found.append(early._said & 3)
            found.append([value[0].item() for value in weights])
        return found

    assert nodes.train((1, 1), work) == [[0, 2, 1, [-1.0, -2.0]]] * 2


@pytest.mark.parametrize("thaws", [{0, 1, 2}, {0}], ids=["on all nodes", "on one node"])
def test_a_layer_that_thaws_trains_as_in_one_process(thaws: set[int]) -> None:
    """Where one worker thaws it, the others' sums lack it, and their nodes have its weights all the same."""

    def work(rank: int) -> Any:
        model = Model()
        model.layers[1].requires_grad_(False)
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), timeout_s=30) as optimizer:
            for step in range(STEPS):
                if step == 3 and rank in thaws:
                    model.layers[1].requires_grad_(True)
                optimizer.zero_grad()
                _backward(model, rank, step)
                optimizer.step()
            optimizer.wait_for_others()
            return [tensor.detach().clone() for tensor in model.parameters()]

    plain = Model()
    plain.layers[1].requires_grad_(False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(3):
            plain.layers[1].requires_grad_(step >= 3 and rank in thaws)
            _backward(plain, rank, step)
        for tensor in plain.parameters():
            if tensor.grad is not None:
                tensor.grad /= 3
        optimizer.step()
    for found in nodes.train((1, 2), work):
        for tensor, expected in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(tensor, expected.detach(), rtol=0, atol=1e-5)
