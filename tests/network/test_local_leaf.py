"""Local steps between nodes equal the papers' algorithms, written with torch's own optimizers.

They are DiLoCo (arXiv 2311.08105, Algorithm 1) and Streaming DiLoCo (arXiv 2501.18512, Algorithm 2).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from tests.support import nodes
from tests.support.torch_optimizers import train_on

pytestmark = pytest.mark.slow

STEPS, BATCH = 10, 8
Optimizers = Callable[[Any], torch.optim.Optimizer]
MOMENTUM: Optimizers = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # noqa: E731
ADAMW: Optimizers = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)  # noqa: E731
PLAIN: Optimizers = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(13, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(BATCH, 13, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)


def _step(model: torch.nn.Module, optimizer: Any, ranks: list[int], step: int) -> None:
    """A step with the mean gradient of some workers' batches."""
    batches = [_batch(rank, step) for rank in ranks]
    inputs, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
    train_on(model, optimizer, [(inputs, labels)])


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


def _write(model: torch.nn.Module, flat: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(flat, model.parameters())


def diloco(make: Optimizers, ranks: list[list[int]], local_steps: int, *, mix: float = 1.0) -> np.ndarray[Any, Any]:
    """Algorithm 1 for nodes with these workers; the steps that are left at the end make one more, shorter round."""
    home = torch.nn.Parameter(_flat(_model()))
    outer = torch.optim.SGD([home], lr=0.7, momentum=0.9, nesterov=True)
    models = [_model() for _ in ranks]
    inner = [make(model.parameters()) for model in models]
    taken = home.detach().clone()
    for step in range(STEPS):
        for model, optimizer, own in zip(models, inner, ranks, strict=True):
            _step(model, optimizer, own, step)
        if (step + 1) % local_steps == 0 or step == STEPS - 1:
            home.grad = torch.stack([taken - _flat(model) for model in models]).mean(0)
            outer.step()
            taken = home.detach().clone()
            for model in models:
                _write(model, torch.lerp(_flat(model), taken, mix))
    return home.detach().numpy()


def _spread(flat: torch.Tensor) -> torch.Tensor:
    """Flat weights as they lie in memory: each parameter begins at a multiple of 16 floats."""
    shapes = [value.numel() for value in _model().parameters()]
    padded = [torch.nn.functional.pad(values, (0, -len(values) % 16)) for values in flat.split(shapes)]
    return torch.cat(padded)


def _close_up(memory: torch.Tensor) -> torch.Tensor:
    shapes = [value.numel() for value in _model().parameters()]
    rows = memory.split([length + -length % 16 for length in shapes])
    return torch.cat([row[:length] for row, length in zip(rows, shapes, strict=True)])


def _fragments(count: int) -> list[slice]:
    floats = len(_spread(_flat(_model())))
    length = -(-floats // (16 * count)) * 16
    return [slice(first, min(first + length, floats)) for first in range(0, floats, length)]


def streaming(make: Optimizers, nodes: int, local_steps: int, fragments: int, overlap: int, mix: float) -> np.ndarray[Any, Any]:
    """Algorithm 2 for nodes with a worker each; `mix` is 1 - alpha.

    A difference is taken from the home's weights of the fragment's last exchange, so that nothing counts twice. At the end
    each fragment that has moved since is exchanged at once.
    """
    spans, period = _fragments(fragments), local_steps // fragments
    homes = [torch.nn.Parameter(_spread(_flat(_model()))[span].clone()) for span in spans]
    outers = [torch.optim.SGD([home], lr=0.7, momentum=0.9, nesterov=True) for home in homes]
    models = [_model() for _ in range(nodes)]
    inner = [make(model.parameters()) for model in models]
    exchanged, turn, under_way = [0] * len(spans), 0, -1

    def send(step: int) -> None:
        home = homes[turn]
        home.grad = torch.stack([home.detach() - _spread(_flat(model))[spans[turn]] for model in models]).mean(0)
        exchanged[turn] = step

    def receive(turn: int) -> None:
        outers[turn].step()
        for model in models:
            memory = _spread(_flat(model))
            memory[spans[turn]] = torch.lerp(memory[spans[turn]], homes[turn].detach(), mix)
            _write(model, _close_up(memory))

    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            _step(model, optimizer, [rank], step - 1)
        if under_way >= 0 and step == exchanged[under_way] + overlap:
            receive(under_way)
            under_way = -1
        if step % period == 0:
            send(step)
            under_way, turn = turn, (turn + 1) % len(spans)
            if overlap == 0:
                receive(under_way)
                under_way = -1
    if under_way >= 0:
        receive(under_way)
    while exchanged[turn] < STEPS:
        send(STEPS)
        receive(turn)
        turn = (turn + 1) % len(spans)
    return _close_up(torch.cat([home.detach() for home in homes])).numpy()


def _work(make: Optimizers, sync: str = "bsp", steps: int = STEPS) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        model = _model()
        with fastps.DistributedOptimizer(make(model.parameters()), sync=sync, batch_size=BATCH, timeout_s=30) as optimizer:
            for step in range(steps):
                _step(model, optimizer, [rank], step)
            optimizer.wait_for_others()
            return _flat(model).numpy().copy()

    return work


def _train(counts: tuple[int, ...], work: Callable[[int], Any], **variables: object) -> np.ndarray[Any, Any]:
    """The final weights, with which all workers end."""
    weights, *others = nodes.train(counts, work, **{f"FASTPS_{name.upper()}": str(value) for name, value in variables.items()})
    assert all(np.array_equal(weights, each) for each in others)
    return weights  # type: ignore[no-any-return]


def _is_near(weights: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    return np.allclose(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("counts", "make", "local_steps", "mix"), [
    pytest.param((2, 1, 1), ADAMW, 3, 0.5, id="2+1+1, adamw, 3, mixed"),
    pytest.param((1, 1), MOMENTUM, 4, 1.0, id="1+1, momentum, 4"),
    pytest.param((1, 1), MOMENTUM, 100, 1.0, id="1+1, one round"),
])  # fmt: skip
def test_nodes_train_as_the_paper_says(counts: tuple[int, ...], make: Optimizers, local_steps: int, mix: float) -> None:
    """Every node counts once, however many workers it has. The last round may be shorter."""
    firsts = np.cumsum([0, *counts])
    ranks = [list(range(first, first + count)) for first, count in zip(firsts[:-1].tolist(), counts, strict=True)]
    found = _train(counts, _work(make), local_steps=local_steps, local_mix=mix)
    assert _is_near(found, diloco(make, ranks, local_steps, mix=mix))


def _streams(local_steps: int, fragments: int, overlap: int, mix: float) -> dict[str, object]:
    return {"local_steps": local_steps, "local_fragments": fragments, "local_overlap": overlap, "local_mix": mix}


@pytest.mark.parametrize(("count", "make", "streams"), [
    pytest.param(2, MOMENTUM, (6, 3, 1, 0.5), id="3 fragments, 1 version of overlap"),
    pytest.param(3, ADAMW, (4, 2, 0, 1.0), id="2 fragments, no overlap"),
    pytest.param(2, ADAMW, (4, 2, 2, 0.5), id="an overlap as long as the distance"),
    pytest.param(2, MOMENTUM, (4, 1, 3, 0.7), id="one fragment with overlap"),
    pytest.param(2, MOMENTUM, (16, 16, 1, 0.5), id="more fragments than are begun"),
])  # fmt: skip
def test_fragments_travel_in_turn_as_the_paper_says(count: int, make: Optimizers, streams: tuple[int, int, int, float]) -> None:
    assert _is_near(_train((1,) * count, _work(make), **_streams(*streams)), streaming(make, count, *streams))


def test_one_local_step_with_a_plain_outer_rule_is_the_mean_of_the_nodes_weights() -> None:
    """With lr=1 and no momentum the home averages weights; SGD's mean gradient over equal nodes does the same."""
    model = _model()
    optimizer = PLAIN(model.parameters())
    for step in range(STEPS):
        _step(model, optimizer, [0, 1], step)
    assert _is_near(_train((1, 1), _work(PLAIN), local_steps=1, outer_lr=1, outer_momentum=0), _flat(model).numpy())


def test_rounded_differences_train_nearly_the_same() -> None:
    for streams, expected in (
        ({"local_steps": 4}, diloco(MOMENTUM, [[0], [1]], 4)),
        (_streams(4, 2, 1, 0.5), streaming(MOMENTUM, 2, 4, 2, 1, 0.5)),
    ):
        found = _train((1, 1), _work(MOMENTUM), link_dtype="int8", **streams)
        assert 0 < np.abs(found - expected).max() < 2e-2


@pytest.mark.parametrize(("sync", "variables"), [
    ("asp", {"local_steps": 4}),
    ("ssp:2", {"local_steps": 4, "within": "asp"}),
    ("backup:1", {**_streams(4, 2, 1, 0.5), "link_dtype": "bfloat16"}),
    ("softsync:1", {**_streams(4, 2, 1, 0.5), "link_dtype": "bfloat16"}),
])  # fmt: skip
def test_local_steps_and_fragments_work_under_other_disciplines(sync: str, variables: dict[str, object]) -> None:
    weights = _train((1, 2), _work(MOMENTUM, sync, 30), **variables)
    assert np.isfinite(weights).all()
    assert not np.array_equal(weights, _flat(_model()).numpy())
