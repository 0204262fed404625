"""Hooks of backward mark a shard on a device once its last gradient is there, and nothing that changes later keeps its mark."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from fastps.device.arena import DeviceArena
from tests.support.torch_optimizers import OPTIMIZERS, one_worker
from tests.torch.placements import test_staged as staged
from tests.torch.placements.test_staged import HostDeviceOptimizer, SeveralDevicesOptimizer

SHARDS = [3, 2, 1, 0]  # of `make_model` in the tests, in the order in which their gradients appear


@pytest.fixture(autouse=True)
def a_shard_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_BUCKET_MB", "0.00006")  # a cache line: as many shards as layers
    monkeypatch.setenv("FASTPS_NONFINITE", "allow")  # a push that is checked needs no marks


class Watched:
    """What an arena was told, and which shards were marked before each push."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.marked: list[int] = []
        self.kept: list[list[int]] = []
        mark_computed, mark_pushed = DeviceArena.mark_computed, DeviceArena.mark_pushed

        def mark(arena: DeviceArena, shard: int) -> None:
            self.marked.append(shard)
            mark_computed(arena, shard)

        def push(arena: DeviceArena, slot: int | None) -> None:
            self.kept.append(sorted(arena.marked, reverse=True))
            mark_pushed(arena, slot)

        monkeypatch.setattr(DeviceArena, "mark_computed", mark)
        monkeypatch.setattr(DeviceArena, "mark_pushed", push)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in SHARDS))


def backward(model: torch.nn.Module, layers: slice = slice(None)) -> None:
    inputs = torch.ones(2, 4)
    for layer in list(model.children())[layers]:  # type: ignore[misc]
        inputs = layer(inputs)
    inputs.square().sum().backward()


def clip(model: torch.nn.Module, optimizer: Any) -> None:
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def set_one(model: torch.nn.Module, optimizer: Any) -> None:
    backward(model)
    list(model.parameters())[2].grad = torch.ones(4, 4)


def change_one(model: torch.nn.Module, optimizer: Any) -> None:
    backward(model)
    gradient = list(model.parameters())[1].grad
    assert gradient is not None
    gradient.mul_(2)


def accumulate_openly(model: torch.nn.Module, optimizer: Any) -> None:
    with optimizer.no_sync():
        backward(model)
    backward(model)


def only_without_sync(model: torch.nn.Module, optimizer: Any) -> None:
    backward(model)
    with optimizer.no_sync():
        backward(model)


# What a step does before it pushes; which shards hooks marked, and which of the marks the push kept.
STEPS: dict[str, tuple[Callable[[torch.nn.Module, Any], Any], list[int], list[int]]] = {
    "a backward": (lambda model, _: backward(model), SHARDS, SHARDS),
    "clipped by hand": (clip, SHARDS, []),
    "one set by hand": (set_one, SHARDS, [3, 1, 0]),
    "one changed in place": (change_one, SHARDS, [3, 2, 0]),
    "one dropped": (lambda model, _: (backward(model), setattr(next(model.parameters()), "grad", None)), SHARDS, SHARDS),
    "two backwards": (lambda model, _: (backward(model), backward(model)), SHARDS * 2, SHARDS),
    "a second backward of two layers": (
        lambda model, _: (backward(model), backward(model, slice(2))), [*SHARDS, 1, 0], SHARDS,
    ),
    "two backwards, the first in no_sync": (accumulate_openly, SHARDS, SHARDS),
    "two backwards, the second in no_sync": (only_without_sync, SHARDS, []),
    "a backward of two layers": (lambda model, _: backward(model, slice(2)), [1, 0], [1, 0]),
    "zeroed after backward": (lambda model, optimizer: (backward(model), optimizer.zero_grad(set_to_none=False)), SHARDS, []),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", list(STEPS))
def test_a_push_keeps_the_marks_of_shards_that_did_not_change_since(name: str, watched: Watched) -> None:
    act, marked, kept = STEPS[name]

    def run(model: torch.nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            act(model, optimizer)
            optimizer.step()

    staged.assert_same(HostDeviceOptimizer, run, OPTIMIZERS["sgd"], make_model, moves=name != "zeroed after backward")
    assert watched.marked == marked * 3
    assert watched.kept == [kept] * 3


def test_a_shard_whose_gradients_come_on_two_streams_is_left_to_the_push(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPS_BUCKET_MB", "0.0002")  # two layers a shard
    with one_worker(make_model(), OPTIMIZERS["sgd"], named=True, kind=HostDeviceOptimizer) as (model, optimizer):
        streams = iter([1, 1, 1, 2])
        monkeypatch.setattr(DeviceArena, "compute_stream", lambda _: next(streams))
        backward(model)
        optimizer.step()
    assert watched.kept == [[1]]


@pytest.mark.parametrize(("sync", "bucket_mb"), [("asp", "0.00006"), ("bsp", "0")], ids=["the worker waits", "the user said 0"])
def test_nothing_is_marked_where_no_fold_is_to_overlap(
    watched: Watched, sync: str, bucket_mb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPS_BUCKET_MB", bucket_mb)
    with one_worker(make_model(), OPTIMIZERS["sgd"], named=True, kind=HostDeviceOptimizer, sync=sync) as (model, optimizer):
        backward(model)
        optimizer.step()
        assert optimizer.version == 1
    assert watched.marked == [] and watched.kept == [[]]


def test_a_step_without_a_push_keeps_no_mark_for_the_next(watched: Watched) -> None:
    """A scaler found an infinity. Half of the next step's backward then marks nothing that is not complete."""
    with one_worker(make_model(), OPTIMIZERS["sgd"], named=True, kind=HostDeviceOptimizer) as (model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        backward(model)
        first = next(model.parameters()).grad
        assert first is not None
        first[0, 0] = torch.inf
        scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        backward(model, slice(1, 3))
        optimizer.step()
    assert watched.kept == [[3, 2, 1], [2, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_workers_on_two_gpus_with_several_shards_each_have_the_bits_of_the_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPS_GPUS", "0,1")
    expected = staged.run_ranks([fastps.DistributedOptimizer] * 2, "bsp", push_dtype=dtype)
    found = staged.run_ranks([SeveralDevicesOptimizer] * 2, "bsp", push_dtype=dtype)
    assert found == [expected[0]] * 2
