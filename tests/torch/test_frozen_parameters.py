"""Parameters that nobody trains: they cost the arena one copy, and become usual ones with their first gradient."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.errors import ArenaError
from fastps.kernels.shm.arena import LANE_DEAD
from fastps.membership import job_memory
from fastps.system import memory_limits, shared_memory
from tests.support import processes

STEPS, THAWS = 12, {4: 1, 7: 0}  # the layer that trains from a step on
SIDE = 64


def _model(dtype: torch.dtype = torch.float32, side: int = SIDE) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(side, side), torch.nn.Linear(side, side), torch.nn.Linear(side, 3)).to(dtype)
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


def _loss(model: torch.nn.Sequential, step: int, worker: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    batch = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(100 * step + worker)).to(dtype)
    return model(batch).float().square().mean()


def _plain(workers: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = _model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        for each in [THAWS[step]] if step in THAWS else []:
            model[each].requires_grad_(True)
        optimizer.zero_grad()
        for worker in range(workers):
            (_loss(model, step, worker) / workers).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def _steps(model: torch.nn.Sequential, optimizer: Any, rank: int, steps: range) -> Iterator[int]:
    for step in steps:
        for each in [THAWS[step]] if step in THAWS else []:
            model[each].requires_grad_(True)
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        optimizer.step()
        yield step


def _wrapped(model: torch.nn.Module, sync: str = "bsp", **options: Any) -> fastps.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fastps.DistributedOptimizer(inner, sync, model=model, timeout_s=60, **options)


def _trained(sync: str, dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        model = _model(dtype)
        with _wrapped(model, sync, **options) as optimizer:
            frozen = [len(optimizer.worker.store.frozen) for _ in _steps(model, optimizer, rank, range(STEPS))]
            optimizer.wait_for_others()
            return frozen[0], [each.detach().float().numpy() for each in model.parameters()]

    return work


def _outcomes(work: Callable[[int], Any], workers: int = 2) -> list[Any]:
    children = processes.start_job(work, workers)
    processes.finish(children, 120.0)
    return [child.outcome for child in children]


def _allocated(optimizer: fastps.DistributedOptimizer) -> int:
    return 512 * os.fstat(optimizer.worker.store.descriptor).st_blocks


@pytest.mark.parametrize(("sync", "options", "workers"), [
    ("bsp", {}, 1), ("bsp", {}, 3), ("bsp,shards=2", {}, 3), ("hardsync:12", {"batch_size": 4}, 3), ("bsp,ema=0.9", {}, 3),
    ("bsp", {"server": "process"}, 3),
])  # fmt: skip
@pytest.mark.sampled(2)
def test_layers_that_are_unfrozen_one_after_the_other_train_as_in_torch(
    sync: str, options: dict[str, Any], workers: int
) -> None:
    expected = _plain(workers)
    for outcome in _outcomes(_trained(sync, **options), workers):
        assert outcome[0] == 4, outcome
        for found, plain in zip(outcome[1], expected, strict=True):
            assert np.allclose(found, plain.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_they_do_in_other_types(dtype: torch.dtype) -> None:
    expected = _plain(2, dtype)
    for outcome in _outcomes(_trained("bsp", dtype)):
        for found, plain in zip(outcome[1], expected, strict=True):
            assert np.allclose(found, plain.float().numpy(), rtol=1e-5 if dtype == torch.float64 else 0.05, atol=1e-3)


@pytest.mark.parametrize("sync", ["asp", "dssp:1,3", "asp,shards=3", "backup:1"])
def test_workers_that_unfreeze_at_their_own_moments_end_with_the_same_weights(sync: str) -> None:
    (_, one), (_, other) = _outcomes(_trained(sync))
    for mine, theirs in zip(one, other, strict=True):
        assert np.array_equal(mine, theirs)
    for mine, begun in zip(one, _model().parameters(), strict=True):
        assert not np.array_equal(mine, begun.detach().numpy())


def test_a_layer_that_one_worker_alone_unfreezes_reaches_the_other() -> None:
    def work(rank: int) -> Any:
        model = _model()
        with _wrapped(model) as optimizer:
            model[0].requires_grad_(rank == 1)
            for step in range(3):
                optimizer.zero_grad()
                _loss(model, step, rank).backward()
                optimizer.step()
            return model[0].weight.detach().numpy(), optimizer.worker.store.frozen

    (mine, frozen), (theirs, _) = _outcomes(work)
    assert np.array_equal(mine, theirs) and not np.array_equal(mine, _model()[0].weight.detach().numpy())
    assert frozen == {2, 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_arena_has_one_copy_of_them_and_more_from_their_first_gradient_on(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 4)).to(dtype)
    model[0].requires_grad_(False)
    one = model[0].weight.numel() * (6 if dtype == torch.bfloat16 else 4)
    with _wrapped(model) as optimizer:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 1024, dtype=dtype)).sum().backward()
            optimizer.step()
        before = _allocated(optimizer)
        assert before < one + (2 << 20)
        model[0].requires_grad_(True)
        model(torch.ones(2, 1024, dtype=dtype)).sum().backward()
        optimizer.step()
        assert _allocated(optimizer) > before + 6 * one


def test_without_memory_for_a_layer_that_is_unfrozen_the_step_says_so_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _model()
    with _wrapped(model) as optimizer:
        for _ in _steps(model, optimizer, 0, range(2)):
            pass
        before = [each.detach().clone() for each in model.parameters()]
        model[1].requires_grad_(True)
        monkeypatch.setattr(shared_memory, "available_bytes", lambda: (0, "the machine's memory"))
        with pytest.raises(ArenaError, match=r"parameter '1\.(weight|bias)', which is trained from now on, needs"):
            _loss(model, 2, 0).backward()
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        monkeypatch.setattr(shared_memory, "available_bytes", memory_limits.available_bytes)
        optimizer.zero_grad()
        _loss(model, 2, 0).backward()
        optimizer.step()
        assert not torch.equal(model[1].weight, before[2])


def test_a_reader_shows_them_before_and_after_their_first_gradient() -> None:
    model, shown = _model(), _model()
    with torch.no_grad():
        for each in shown.parameters():
            each.zero_()
    with _wrapped(model, job="frozen-read") as optimizer, fastps.reader("frozen-read") as reader:
        for _ in _steps(model, optimizer, 0, range(STEPS)):
            reader.update(shown)
            assert all(torch.equal(*pair) for pair in zip(shown.parameters(), model.parameters(), strict=True))


def test_a_checkpoint_has_them_and_a_job_resumes_from_it_frozen_or_not(tmp_path: Path) -> None:
    expected = _plain(1)
    for begun in (3, 6, 9):
        model = _model()
        with _wrapped(model, checkpoint=tmp_path / str(begun), every=1000) as optimizer:
            for _ in _steps(model, optimizer, 0, range(begun)):
                pass
            fastps.save(optimizer, tmp_path / str(begun))
        resumed = _model()
        for step, layer in THAWS.items():
            resumed[layer].requires_grad_(step < begun)
        with torch.no_grad():
            for each in resumed.parameters():
                each.zero_()  # the weights come from the checkpoint
        with _wrapped(resumed, resume=tmp_path / str(begun)) as optimizer:
            assert len(optimizer.worker.store.frozen) == {3: 4, 6: 2, 9: 0}[begun]
            for _ in _steps(resumed, optimizer, 0, range(begun, STEPS)):
                pass
            for found, plain in zip(resumed.parameters(), expected, strict=True):
                assert torch.allclose(found.detach(), plain, rtol=1e-5, atol=1e-6)


def test_weights_that_are_loaded_before_the_first_step_are_the_jobs_also_of_frozen_parameters() -> None:
    def work(rank: int) -> Any:
        torch.manual_seed(rank)
        model = _model()
        with _wrapped(model, job="frozen-load" if rank < 0 else None) as optimizer:
            with torch.no_grad():
                for each in model.parameters():
                    each.fill_(0.5 + rank)
            for _ in _steps(model, optimizer, rank, range(1)):
                pass
            optimizer.wait_for_others()
            return model[0].weight.detach().numpy().copy()

    one, other = _outcomes(work)
    assert (one == 0.5).all() and (other == 0.5).all()


def test_replaced_weights_and_loaded_state_of_frozen_parameters_are_the_jobs() -> None:
    model = _model()
    trained = _model()
    for layer in trained:
        layer.requires_grad_(True)
    plain = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    _loss(trained, 0, 0).backward()
    plain.step()
    with _wrapped(model) as optimizer:
        for _ in _steps(model, optimizer, 0, range(2)):
            pass
        optimizer.replace_weights([each.detach() for each in trained.parameters()])
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), trained.parameters(), strict=True))
        optimizer.load_state_dict(plain.state_dict())
        for one, other in zip(model.parameters(), trained.parameters(), strict=True):
            assert torch.equal(optimizer.state[one]["momentum_buffer"], plain.state[other]["momentum_buffer"])
        for layer in model:
            layer.requires_grad_(True)
        optimizer.zero_grad()
        plain.zero_grad()
        _loss(model, 1, 0).backward()
        _loss(trained, 1, 0).backward()
        optimizer.step()
        plain.step()
        for one, other in zip(model.parameters(), trained.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("calls", [1, 5])
def test_a_worker_that_is_killed_while_it_thaws_a_layer_leaves_it_as_it_was(calls: int) -> None:
    def work(rank: int) -> Any:
        model, left = _model(), [calls]
        allocate = job_memory.allocate

        def die(*place: Any) -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            allocate(*place)

        if rank == 1:
            job_memory.allocate = die
        with _wrapped(model, on_worker_loss="continue") as optimizer:
            for _ in _steps(model, optimizer, rank, range(3)):
                pass
            if rank == 0:
                processes.wait_until(
                    lambda: optimizer.worker.store.arena.lane_state(1) == LANE_DEAD or optimizer.worker.check_peers()
                )
            before = model[1].weight.detach().clone()
            model[1].requires_grad_(True)
            optimizer.zero_grad()
            _loss(model, 3, rank).backward()
            gradient = model[1].weight.grad
            assert gradient is not None
            expected = before - 0.05 * gradient
            optimizer.step()
            return torch.allclose(model[1].weight, expected, rtol=1e-5, atol=1e-6), optimizer.worker.store.frozen

    zero, one = _outcomes(work)
    assert zero == (True, {0, 1}) and one is None
