"""Checkpoints of a job of several nodes: one format, one version of all parts, and a resumed job that has the same bits."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.checkpoint.format import read_description, sealed
from tests.support import nodes

pytestmark = pytest.mark.slow

STEPS = 8
SMALL, LARGE = (12, 7), (1500, 2100)  # the large model has several parts under bsp


def _model(shape: tuple[int, int]) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(*shape), torch.nn.BatchNorm1d(shape[1]))


Optimizers = Callable[[Any], torch.optim.Optimizer]
ADAM: Optimizers = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
OTHERS: dict[str, Optimizers] = {  # what state a rule has differs between rules; how it is saved does not
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),  # has a number beside its tensors
}


def _work(shape: tuple[int, int], steps: int, save: Path | None = None, make: Optimizers = ADAM) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        model = _model(shape)
        with fastps.DistributedOptimizer(make(model.parameters()), model=model, timeout_s=30) as optimizer:
            begun = optimizer.worker.steps
            assert optimizer.version == begun
            for step in range(begun, steps):
                inputs = torch.randn(4, shape[0], generator=torch.Generator().manual_seed(100 * step + rank))
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            is_spread = os.environ.get("FASTPS_HOMES") == "spread"
            if save is not None and (rank == 0 or (is_spread and os.environ["FASTPS_LOCAL_RANK"] == "0")):
                fastps.save(optimizer, save, extra={"note": 5})
            elif save is not None and is_spread:
                with pytest.raises(fastps.UnsupportedError, match="save on the first worker of every node"):
                    fastps.save(optimizer, save)
            elif save is not None and rank == 1:
                with pytest.raises(fastps.UnsupportedError, match="save on a worker of node 0"):
                    fastps.save(optimizer, save)
            optimizer.wait_for_others()
            weights = [value.detach().numpy().tobytes() for value in model.parameters()]
            return begun, hashlib.sha256(b"".join(weights)).hexdigest()

    return work


@pytest.mark.parametrize(("counts", "shape"), [((1, 2), SMALL), ((1, 1), LARGE)], ids=["1+2, one part", "1+1, several parts"])
def test_a_resumed_job_ends_with_the_bits_of_one_that_was_not_stopped(
    counts: tuple[int, ...], shape: tuple[int, int], tmp_path: Path
) -> None:
    whole = nodes.train(counts, _work(shape, STEPS))
    nodes.train(counts, _work(shape, STEPS // 2, tmp_path))
    checkpoint = fastps.load(tmp_path)
    assert (checkpoint.version, checkpoint.extra["note"]) == (STEPS // 2, 5)
    shapes = {name: tuple(value.shape) for name, value in _model(shape).named_parameters()}
    assert {name: array.shape for name, array in checkpoint.weights().items()} == shapes
    assert checkpoint.buffers()["1.num_batches_tracked"] == STEPS // 2
    resumed = nodes.train(counts, _work(shape, STEPS), FASTPS_RESUME=str(tmp_path))
    assert [begun for begun, _ in resumed] == [STEPS // 2] * sum(counts)
    assert [digest for _, digest in resumed] == [digest for _, digest in whole]


@pytest.mark.parametrize("name", OTHERS)
def test_other_rules_resume_with_the_same_bits_and_load_into_plain_torch(name: str, tmp_path: Path) -> None:
    make = OTHERS[name]
    whole = nodes.train((1, 1), _work(SMALL, STEPS, make=make))
    nodes.train((1, 1), _work(SMALL, STEPS // 2, tmp_path, make))
    resumed = nodes.train((1, 1), _work(SMALL, STEPS, make=make), FASTPS_RESUME=str(tmp_path))
    assert [digest for _, digest in resumed] == [digest for _, digest in whole]
    model = _model(SMALL)
    optimizer, expected = make(model.parameters()), make(model.parameters())
    optimizer.load_state_dict(fastps.optimizer_state_dict(fastps.load(tmp_path)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(STEPS // 2):
        expected.step()
    found, theirs = (each.state_dict()["state"][0] for each in (optimizer, expected))
    assert set(found) == set(theirs)
    scalars = [key for key, value in theirs.items() if value.ndim == 0]
    assert [found[key] for key in scalars] == [theirs[key] for key in scalars]
    optimizer.step()


def test_periodic_checkpoints_load_into_plain_torch(tmp_path: Path) -> None:
    """Node 0 writes them while the nodes train, and each has one version of all parts."""
    nodes.train((1, 1), _work(LARGE, STEPS), FASTPS_CHECKPOINT=str(tmp_path), FASTPS_CHECKPOINT_EVERY="2")
    checkpoint = fastps.load(tmp_path)
    assert 2 <= checkpoint.version <= STEPS  # one that takes long delays the next, by any number of versions
    model = _model(LARGE)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    adam.load_state_dict(fastps.optimizer_state_dict(checkpoint))
    assert {int(entry["step"]) for entry in adam.state_dict()["state"].values()} == {checkpoint.version}
    for name, value in model.named_parameters():
        assert np.isfinite(checkpoint.weights()[name]).all()
        assert checkpoint.weights()[name].shape == tuple(value.shape)


def test_one_node_goes_on_where_two_nodes_stopped_and_the_other_way_round(tmp_path: Path) -> None:
    """The order of sums differs, so the bits do; the weights agree closely."""
    nodes.train((1, 1), _work(SMALL, 4, tmp_path / "two"))
    nodes.train((1, 1), _work(SMALL, 6, tmp_path / "more"), FASTPS_RESUME=str(tmp_path / "two"))
    checkpoint = fastps.load(tmp_path / "two")
    assert checkpoint.description["workers"] == 2
    alone = _model(SMALL)
    adam = torch.optim.Adam(alone.parameters(), lr=0.01)
    with fastps.DistributedOptimizer(adam, model=alone, job="alone", rank=0, workers=1, resume=tmp_path / "two") as optimizer:
        assert (optimizer.version, optimizer.worker.steps) == (4, 4)
        fastps.save(optimizer, tmp_path / "one")
    begun = nodes.train((1, 1), _work(SMALL, 6), FASTPS_RESUME=str(tmp_path / "one"))
    assert [steps for steps, _ in begun] == [4, 4]
    assert begun[0][1] == begun[1][1]


SPREAD = {"FASTPS_HOMES": "spread"}


@pytest.mark.parametrize(
    ("counts", "shape"), [((2, 1), SMALL), ((1, 1, 1), LARGE)], ids=["2+1, one part", "1+1+1, several parts"]
)
def test_shares_of_all_nodes_are_one_checkpoint(counts: tuple[int, ...], shape: tuple[int, int], tmp_path: Path) -> None:
    whole = nodes.train(counts, _work(shape, STEPS), **SPREAD)
    nodes.train(counts, _work(shape, STEPS // 2, tmp_path), **SPREAD)
    names = [f"share-{number}-of-{len(counts)}" for number in range(len(counts))]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == names
    checkpoint = fastps.load(tmp_path)
    assert (checkpoint.version, checkpoint.extra["note"]) == (STEPS // 2, 5)
    shapes = {name: tuple(value.shape) for name, value in _model(shape).named_parameters()}
    assert {name: array.shape for name, array in checkpoint.weights().items()} == shapes
    assert checkpoint.buffers()["1.num_batches_tracked"] == STEPS // 2
    adam = torch.optim.Adam(_model(shape).parameters(), lr=0.01)
    adam.load_state_dict(fastps.optimizer_state_dict(checkpoint))
    resumed = nodes.train(counts, _work(shape, STEPS), FASTPS_RESUME=str(tmp_path), **SPREAD)
    assert [begun for begun, _ in resumed] == [STEPS // 2] * sum(counts)
    assert [digest for _, digest in resumed] == [digest for _, digest in whole]


def test_job_with_one_home_goes_on_where_shares_stopped_and_the_other_way_round(tmp_path: Path) -> None:
    whole = nodes.train((1, 1), _work(SMALL, STEPS), **SPREAD)
    nodes.train((1, 1), _work(SMALL, 3, tmp_path / "spread"), **SPREAD)
    nodes.train((1, 1), _work(SMALL, 5, tmp_path / "first"), FASTPS_RESUME=str(tmp_path / "spread"))
    resumed = nodes.train((1, 1), _work(SMALL, STEPS), FASTPS_RESUME=str(tmp_path / "first"), **SPREAD)
    assert [digest for _, digest in resumed] == [digest for _, digest in whole]


def test_periodic_shares_are_of_the_same_versions_and_one_that_a_node_has_not_written_is_not_resumed_from(
    tmp_path: Path,
) -> None:
    nodes.train((2, 1), _work(SMALL, 20), FASTPS_CHECKPOINT=str(tmp_path), FASTPS_CHECKPOINT_EVERY="3", **SPREAD)
    for number in range(2):
        folders = sorted((tmp_path / f"share-{number}-of-2").iterdir())
        assert [fastps.load(folder).version for folder in folders] == [12, 15, 18]
    assert fastps.load(tmp_path).version == 18
    of_one = tmp_path / "share-1-of-2"
    shutil.rmtree(sorted(of_one.iterdir())[-1])
    assert fastps.load(tmp_path).version == 15
    for folder in of_one.iterdir():  # another run wrote these
        described = read_description(folder)
        described["share"]["run"] = "another"
        (folder / "checkpoint.json").write_bytes(sealed(described))
    with pytest.raises(fastps.CheckpointError, match=r"share-0-of-2 has 12, 15, 18; share-1-of-2 has 12, 15"):
        fastps.load(tmp_path)
    shutil.rmtree(of_one)
    with pytest.raises(fastps.CheckpointError, match="share-1-of-2 has none"):
        fastps.load(tmp_path)
