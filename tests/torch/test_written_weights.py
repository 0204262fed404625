"""What scripts write to the weights between steps: taken if all workers write the same, else refused, and never another's."""

import faulthandler
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from tests.support import processes
from tests.support.torch_optimizers import one_worker
from tests.support.weight_writers import WRITES, Clamped, Lookahead, Program, batch_of, replicas, train


def _outcomes(work: Callable[[int], Any], workers: int, timeout_s: float = 120.0) -> list[Any]:
    """What each worker returned, or its exception's name and text."""
    children = processes.start_job(work, workers)
    processes.finish(children, timeout_s)
    return [child.outcome for child in children]


def _work(kind: type[Program], sync: str, **options: Any) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        program = kind()
        with fastps.DistributedOptimizer(program.optimizer(), sync, model=program.model, timeout_s=60, **options) as optimizer:
            optimizer.wait_for_start()  # a worker that fails before another has attached is one that never came
            return [p.numpy() for p in train(program, optimizer, rank)]

    return work


def _check_equal(found: list[Any], expected: list[list[torch.Tensor]]) -> None:
    for worker, (mine, plain) in enumerate(zip(found, expected, strict=True)):
        assert isinstance(mine, list), mine
        for index, (one, other) in enumerate(zip(mine, plain, strict=True)):
            assert np.allclose(one, other.numpy(), rtol=1e-6, atol=1e-6), (worker, index)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("kind", WRITES, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(3)
def test_programs_that_write_weights_compute_under_bsp_what_they_do_in_torch(kind: type[Program], workers: int) -> None:
    _check_equal(_outcomes(_work(kind, "bsp"), workers), replicas(kind, workers))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("kind", WRITES, ids=lambda kind: kind.__name__)
def test_programs_that_write_weights_do_so_on_busy_cores_each_of_twenty_times(kind: type[Program], workers: int) -> None:
    expected = replicas(kind, workers)
    with processes.busy_core(), processes.busy_core():
        for _ in range(20):
            _check_equal(_outcomes(_work(kind, "bsp"), workers), expected)


@pytest.mark.parametrize(("sync", "options"), [
    ("bsp,shards=2", {}), ("hardsync:24", {"batch_size": 8}), ("bsp", {"server": "process"}), ("bsp,ema=0.9", {}),
])  # fmt: skip
@pytest.mark.parametrize("kind", [Lookahead, Clamped], ids=lambda kind: kind.__name__)
@pytest.mark.sampled(2)
def test_writes_are_taken_wherever_all_pushes_are_folded_together(
    kind: type[Program], sync: str, options: dict[str, Any]
) -> None:
    _check_equal(_outcomes(_work(kind, sync, **options), 3), replicas(kind, 3))


@pytest.mark.parametrize("sync", ["asp", "dssp:1,3", "backup:1"])
@pytest.mark.parametrize("kind", WRITES, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(6)
def test_writes_are_refused_by_name_where_workers_go_on_from_other_weights(kind: type[Program], sync: str) -> None:
    outcomes = _outcomes(_work(kind, sync), 2)
    if not WRITES[kind]:
        assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
        return
    told = [outcome[1] for outcome in outcomes if isinstance(outcome, tuple) and outcome[0] == "ParameterChangedError"]
    assert told and f"under {sync} other workers go on from the weights before" in told[0], outcomes
    assert "replace_weights" in told[0]


@pytest.mark.parametrize("writers", [(0,), (1,), (0, 1), (0, 2)])
def test_a_write_that_not_all_workers_made_alike_is_refused_by_name_of_the_parameter_and_the_workers(
    writers: tuple[int, ...],
) -> None:
    def work(rank: int) -> Any:
        program = Program()
        with fastps.DistributedOptimizer(program.optimizer(), "bsp", model=program.model, timeout_s=30) as optimizer:
            train(program, optimizer, rank, 3)
            if rank in writers:
                program.parameters[2].data.add_(1.0 + rank)
            train(program, optimizer, rank, 1)

    outcomes = _outcomes(work, 3)
    refused = [text for outcome in outcomes if outcome for name, text in [outcome] if name == "ParameterChangedError"]
    assert refused and all("parameter '2.weight' was written to" in text for text in refused)
    assert any(f"worker {writer} wrote to it, and worker" in text for text in refused for writer in writers)
    assert all(outcome for outcome in outcomes), "every worker is told"


def _set_transposed(weight: torch.Tensor) -> None:
    weight.data = weight.data.transpose(-1, -2)


def _transpose_in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.transpose_(-1, -2)


def _set_to_transposed(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.set_(weight.data.transpose(-1, -2))  # type: ignore[call-overload]


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("turn", [_set_transposed, _transpose_in_place, _set_to_transposed])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_weight_that_a_script_transposes_over_its_own_memory_is_the_jobs_as_in_torch(
    turn: Callable[[torch.Tensor], None], workers: int, kind: str
) -> None:
    def trained(wraps: bool) -> list[list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3, bias=False) if kind == "linear" else torch.nn.Conv2d(2, 2, 3, bias=False)
        inputs = torch.randn((4, 3) if kind == "linear" else (4, 2, 5, 5))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = fastps.DistributedOptimizer(optimizer, "bsp", model=model, timeout_s=30) if wraps else optimizer
        found = []
        for step in range(4):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if step in (1, 2):
                turn(model.weight)
            found.append(model.weight.detach().flatten().tolist())
        if wraps:
            optimizer.close()
        return found

    for found in _outcomes(lambda _: trained(True), workers):
        np.testing.assert_allclose(found, trained(False), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_parameter_that_shows_its_memory_in_a_form_that_cannot_follow_is_refused_by_name(sync: str) -> None:
    def work(rank: int) -> None:
        model = torch.nn.Linear(4, 4, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with fastps.DistributedOptimizer(inner, sync, model=model, timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            for step in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                if step == 1:
                    model.weight.data = model.weight.data[:2] if sync == "bsp" else model.weight.data.t()

    told = [text for outcome in _outcomes(work, 2) if outcome for name, text in [outcome] if name == "ParameterChangedError"]
    assert told and "parameter 'weight' was" in told[0]  # the other is alone then, or ends with it


def test_what_a_worker_writes_after_its_last_step_is_its_own() -> None:
    """Worker 0 loads other weights, evaluates and saves them, while the other goes on."""

    def work(rank: int) -> Any:
        program = Program()
        optimizer = fastps.DistributedOptimizer(program.optimizer(), "bsp", model=program.model, timeout_s=60)
        train(program, optimizer, rank, 3 if rank == 0 else 40)
        if rank == 0:
            for p in program.parameters:
                p.data.fill_(1e6)
            time.sleep(0.2)
        optimizer.close()
        return max(float(p.abs().max()) for p in program.parameters), min(float(p.min()) for p in program.parameters)

    (_, own), (largest, _) = _outcomes(work, 2)
    assert own == 1e6 and largest < 100


@pytest.mark.parametrize(("sync", "moments"), [
    ("bsp", 100),
    *(pytest.param(sync, 1000, marks=pytest.mark.slow) for sync in ("bsp", "asp")),
])  # fmt: skip
def test_weights_of_a_moment_are_in_no_checkpoint_reader_or_other_worker(sync: str, moments: int, tmp_path: Path) -> None:
    """A worker writes garbage at many moments of its steps, takes it back, and trains on."""

    def work(rank: int) -> Any:
        program = Program()
        random, inner = np.random.default_rng(rank), torch.optim.SGD(program.parameters, lr=0.001)
        with fastps.DistributedOptimizer(inner, sync, model=program.model, timeout_s=60) as optimizer:
            reader = fastps.reader(optimizer.worker.store.job)
            seen = 0.0
            for moment in range(moments):
                optimizer.zero_grad()
                program.gradient(batch_of(moment % 7, rank))
                if rank == 0:
                    kept = [p.data.clone() for p in program.parameters]
                    for index in random.permutation(len(program.parameters))[: random.integers(1, 5)]:
                        program.parameters[index].data.fill_(1e30)
                optimizer.worker.try_combine()
                reader.pull()
                seen = max(seen, *(float(abs(weights).max()) for weights in reader.weights.values()))
                if moment % 50 == 10:
                    saved = fastps.load(fastps.save(optimizer, tmp_path / f"{rank}-{moment}")).weights()
                    seen = max(seen, *(float(abs(weights).max()) for weights in saved.values()))
                if rank == 0:
                    for p, value in zip(program.parameters, kept, strict=True):
                        p.data.copy_(value)
                else:
                    seen = max(seen, *(float(p.detach().abs().max()) for p in program.parameters))
                optimizer.step()
            return seen, optimizer.version

    for seen, version in _outcomes(work, 2):
        assert seen < 1e3 and version >= moments


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_parameter_that_only_another_worker_trains_is_the_jobs(sync: str) -> None:
    def work(rank: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
        before = float(model[1].weight.sum())
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync, model=model) as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                model[rank if step > 1 else 0](torch.ones(1, 2)).sum().backward()
                optimizer.step()
            optimizer.wait_for_others()
            return before, float(model[1].weight.sum())

    (before, first), (_, second) = _outcomes(work, 2)
    assert first == second < before


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_that_turns_faulthandler_on_may_write(when: str) -> None:
    def work(_: int) -> Any:
        faulthandler.disable()
        if when == "before":
            faulthandler.enable()
        program = Clamped()
        with fastps.DistributedOptimizer(program.optimizer(), model=program.model) as optimizer:
            faulthandler.enable()
            return [p.numpy() for p in train(program, optimizer, 0)]

    _check_equal(_outcomes(work, 1), replicas(Clamped, 1))


def test_a_forked_child_writes_its_own_weights() -> None:
    with one_worker(torch.nn.Linear(4, 1)) as (model, optimizer):
        train_one = [model(torch.ones(1, 4)).sum().backward(), optimizer.step()]
        before = [p.detach().clone() for p in model.parameters()]

        def child() -> float:
            model.weight.data.fill_(9.0)
            return float(model.weight.sum())

        assert processes.ended(child).outcome == 36.0
        assert train_one and all(map(torch.equal, before, model.parameters()))


def test_a_graph_of_weights_that_only_others_have_changed_is_refused() -> None:
    job: dict[str, Any] = {"sync": "asp", "job": f"counted-{os.getpid()}", "workers": 2}
    own, other = ([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))] for _ in range(2))
    first = fastps.DistributedOptimizer(torch.optim.SGD(own, lr=0.1), rank=0, **job)
    with fastps.DistributedOptimizer(torch.optim.SGD(other, lr=0.1), rank=1, **job) as second, first:
        own[0].grad, other[1].grad = torch.ones(3), torch.ones(2)
        first.step()
        second.step()
        own[0].grad = torch.ones(3)
        first.step()
        stale = own[1].square().sum()
        other[1].grad = torch.ones(2)
        second.step()
        own[0].grad = torch.ones(3)
        first.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
