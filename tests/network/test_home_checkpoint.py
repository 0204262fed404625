"""Checkpoints of a job of several nodes: one format, one version of all parts, and a resumed job that has the same bits."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from tests.support import nodes
from tests.support.torch_optimizers import mean_square, steps_on

pytestmark = pytest.mark.slow

STEPS, SAVED = 8, 4
SMALL, LARGE = (12, 7), (1500, 2100)  # the large model has several parts under bsp
HOME = {"FASTPS_LINK": "zmq", "FASTPS_SECRET": "a secret of 22 letters"}  # floats that are encrypted go to a home
Optimizers = Callable[[Any], torch.optim.Optimizer]
ADAM: Optimizers = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
AMSGRAD: Optimizers = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)  # noqa: E731
NADAM: Optimizers = lambda parameters: torch.optim.NAdam(parameters, lr=0.01)  # noqa: E731  (has a number beside its tensors)


def _model(shape: tuple[int, int]) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(*shape), torch.nn.BatchNorm1d(shape[1]))


def _save(optimizer: fastps.DistributedOptimizer, folder: Path, rank: int) -> None:
    """Save on the workers that may. Under bsp the others make no version meanwhile. With replicas, any worker may."""
    if rank == 0:
        fastps.save(optimizer, folder, extra={"note": 5})
    elif os.environ.get("FASTPS_LINK") == "zmq":
        with pytest.raises(fastps.UnsupportedError, match="save on a worker of node 0"):
            fastps.save(optimizer, folder)


def _work(
    shape: tuple[int, int], save: Path | None = None, at: int = SAVED, steps: int = STEPS, make: Optimizers = ADAM
) -> Callable[[int], Any]:
    """Train, and save after step `at`. Returns the step at which training began, and a digest of the final weights."""

    def work(rank: int) -> Any:
        model = _model(shape)
        with fastps.DistributedOptimizer(make(model.parameters()), model=model, timeout_s=30) as optimizer:
            begun = optimizer.worker.steps
            assert optimizer.version == begun
            for step in range(begun, steps):
                if save is not None and step == at:
                    _save(optimizer, save, rank)
                inputs = torch.randn(4, shape[0], generator=torch.Generator().manual_seed(100 * step + rank))
                steps_on(model, optimizer, inputs, loss=mean_square)
            optimizer.wait_for_others()
            weights = [value.detach().numpy().tobytes() for value in model.parameters()]
            return begun, hashlib.sha256(b"".join(weights)).hexdigest()

    return work


def _check(checkpoint: fastps.Checkpoint, shape: tuple[int, int], make: Optimizers) -> None:
    """It has all of the model at one version, and the state that plain torch has after so many steps."""
    model = _model(shape)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert {name: array.shape for name, array in checkpoint.weights().items()} == shapes
    optimizer, expected = make(model.parameters()), make(model.parameters())
    optimizer.load_state_dict(fastps.optimizer_state_dict(checkpoint))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(checkpoint.version):
        expected.step()
    theirs = expected.state_dict()["state"]
    for number, found in optimizer.state_dict()["state"].items():
        assert set(found) == set(theirs[number])
        scalars = [key for key, value in theirs[number].items() if value.ndim == 0]
        assert [found[key] for key in scalars] == [theirs[number][key] for key in scalars]
    optimizer.step()


@pytest.mark.parametrize(("counts", "shape", "make", "variables"), [
    pytest.param((1, 2), SMALL, NADAM, {}, id="1+2, replicas of one part"),
    pytest.param((1, 1), LARGE, AMSGRAD, {}, id="1+1, replicas of several parts"),
    pytest.param((1, 2), SMALL, NADAM, HOME, id="1+2, a home of one part"),
    pytest.param((1, 1), LARGE, AMSGRAD, HOME, id="1+1, a home of several parts"),
])  # fmt: skip
def test_a_resumed_job_ends_with_the_bits_of_one_that_went_on(
    counts: tuple[int, ...], shape: tuple[int, int], make: Optimizers, variables: dict[str, str], tmp_path: Path
) -> None:
    whole = nodes.train(counts, _work(shape, tmp_path, make=make), **variables)
    checkpoint = fastps.load(tmp_path)
    assert (checkpoint.version, checkpoint.extra["note"]) == (SAVED, 5)
    assert checkpoint.buffers()["1.num_batches_tracked"] == SAVED
    _check(checkpoint, shape, make)
    resumed = nodes.train(counts, _work(shape, make=make), FASTPS_RESUME=str(tmp_path), **variables)
    assert [begun for begun, _ in resumed] == [SAVED] * sum(counts)
    assert [digest for _, digest in resumed] == [digest for _, digest in whole]


def test_periodic_checkpoints_have_one_version_of_all_parts_and_are_resumed_with_the_same_bits(tmp_path: Path) -> None:
    """Node 0 writes them while the nodes train. One that takes long delays the next, by any number of versions."""
    whole = nodes.train((1, 1), _work(LARGE), FASTPS_CHECKPOINT=str(tmp_path), FASTPS_CHECKPOINT_EVERY="2")
    first = sorted(tmp_path.iterdir())[0]
    checkpoint = fastps.load(first)
    assert 2 <= checkpoint.version <= STEPS
    _check(checkpoint, LARGE, ADAM)
    resumed = nodes.train((1, 1), _work(LARGE), FASTPS_RESUME=str(first))
    assert resumed == [(checkpoint.version, digest) for _, digest in whole]


def test_one_process_a_home_and_replicas_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    """Sums of one process have another order; jobs of the same workers end with the same bits, wherever the weights are."""
    alone, replicas, one_home = tmp_path / "alone", tmp_path / "replicas", tmp_path / "one home"
    model, job = _model(SMALL), f"alone-{os.getpid()}"
    with fastps.DistributedOptimizer(ADAM(model.parameters()), model=model, job=job, rank=0, workers=1) as optimizer:
        for _ in range(2):
            model(torch.ones(4, 12)).square().mean().backward()
            optimizer.step()
        fastps.save(optimizer, alone)
    ends = [
        nodes.train((1, 1), _work(SMALL, replicas, 4), FASTPS_RESUME=str(alone)),
        nodes.train((1, 1), _work(SMALL, one_home, 6), FASTPS_RESUME=str(replicas), **HOME),
        nodes.train((1, 1), _work(SMALL), FASTPS_RESUME=str(one_home)),
    ]
    assert [[begun for begun, _ in end] for end in ends] == [[2, 2], [4, 4], [6, 6]]
    assert len({digest for end in ends for _, digest in end}) == 1
    resumed = _model(SMALL)
    inner = ADAM(resumed.parameters())
    with fastps.DistributedOptimizer(inner, model=resumed, job=job, rank=0, workers=1, resume=one_home) as optimizer:
        assert (optimizer.version, optimizer.worker.steps) == (6, 6)
    assert fastps.load(one_home).description["workers"] == 2
