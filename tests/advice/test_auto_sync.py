"""sync="auto": everybody chooses the same at the same step, and nothing of the model is lost on the way."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.advice import advise as advice
from fastps.advice.auto_sync import move, with_modifiers
from fastps.errors import PolicyError, UsageError
from fastps.job.update_rules import Update
from fastps.simulation.simulate import Simulation, simulate
from fastps.tracing.check import check
from fastps.tracing.file import read
from tests.support import processes

UPDATES = [fastps.SGD(lr=0.1, momentum=0.9), fastps.Adam(lr=0.01)]


def _gradients(rank: int, step: int) -> dict[str, Any]:
    draws = np.random.default_rng([rank, step])
    return {name: draws.standard_normal(50).astype(np.float32) for name in "abcd"}


def _weights() -> dict[str, Any]:
    return {name: np.ones(50, np.float32) for name in "abcd"}


@pytest.mark.parametrize("update", UPDATES, ids=["momentum", "adam"])
def test_a_move_in_the_middle_gives_the_bits_of_a_run_without(update: Update) -> None:
    """Weights, their average, momentum, second moments and Adam's counted steps go along; shards are cut anew."""
    workers, steps, job = 2, 12, f"move-{os.getpid()}-{update.rule.name}"

    def work(store: fastps.Store, rank: int, moves: bool) -> Any:
        worker = store.attach(rank)
        try:
            for step in range(steps):
                worker.step(_gradients(rank, step))
                if moves and step == 4:
                    old = worker
                    policy = with_modifiers(fastps.parse_policy("bsp,shards=2"), store.layout.policy)
                    worker = move(old, policy, job, store.hypers)
                    worker.wait_for_start()
                    old.close()
            assert worker.earlier_steps + worker.steps == steps
            worker.wait_for_others()
            averages = worker.store.plane_views(worker.store.committed()[1], worker.store.layout.planes - 1)
            return [values.tobytes() for values in (*worker.weights.values(), *averages)]
        finally:
            worker.close()
            if worker.store is not store:
                worker.store.close()

    outcomes = []
    for moves in (False, True):
        with fastps.Store.create(_weights(), update, sync="bsp,ema=0.75", workers=workers) as store:
            outcomes += processes.results(processes.start_each(lambda rank: work(store, rank, moves), workers), 60)  # noqa: B023
    assert outcomes == [outcomes[0]] * 4


def _train(rank: int, delay_s: float, steps: int, file: Path | None, leaves_at: int, moved: Any) -> Any:
    """A torch loop under auto:8; returns what was chosen, the steps counted, the version, and a weight that all must share.

    None takes the ninth step before all have seen the weights after the eighth.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if file is not None:
        fastps.trace(file)
    model = torch.nn.Linear(4, 1)
    seen = []
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), sync="auto:8") as optimizer:
        assert optimizer.policy.spec == "auto:8"
        for step in range(steps):
            if leaves_at and step == leaves_at:
                break
            if step == 8 and not leaves_at:
                moved.wait(30)
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + rank)).sum().backward()
            time.sleep(delay_s)
            optimizer.report_loss(1.0, 2)
            optimizer.step()
            seen.append((optimizer.policy.spec, float(model.weight.detach()[0, 0])))
        counted = optimizer.statistics()[rank].steps, optimizer.statistics()[rank].samples
        version = optimizer.version
        optimizer.load_state_dict(optimizer.state_dict())  # in the arena that the job has moved to
    assert all(not tensor.is_shared() for tensor in model.parameters())
    return seen, counted, version


def _trained(delays_s: list[float], steps: int, file: Path | None = None, leaves_at: int = 0) -> list[Any]:
    moved = multiprocessing.get_context("fork").Barrier(2 if leaves_at else 3)

    def work(rank: int) -> Any:
        return _train(rank, delays_s[rank], steps, file, leaves_at if rank == 2 else 0, moved)

    return processes.results(processes.start_job(work, 3), 60)


def test_all_choose_the_same_after_the_same_step_and_go_on_from_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is best depends on how busy the machine is; here it is what is not bsp.
    monkeypatch.setattr(advice, "recommend", lambda rows, *_: (next(row for row in rows if row["sync"] != "bsp"), "test"))
    file = tmp_path / "run.trace"
    outcomes = _trained([0.03, 0.004, 0.004], 20, file)
    chosen = {seen[-1][0] for seen, _, _ in outcomes}
    assert len(chosen) == 1 and chosen != {"auto:8"}, chosen
    for seen, counted, _ in outcomes:
        assert [spec for spec, _ in seen[:7]] == ["auto:8"] * 7
        assert {spec for spec, _ in seen[7:]} == chosen, "from the eighth step on"
        assert counted == (20, 40), "counts go on"
    assert len({seen[7][1] for seen, _, _ in outcomes}) == 1, "all go on from the same weights"
    assert outcomes[0][0][7][1] != outcomes[0][0][6][1]
    warm_up, rest = read(file), read(tmp_path / "run-1.trace")
    assert (len(warm_up.steps), len(rest.steps)) == (24, 36)
    assert (warm_up.header["sync"], {rest.header["sync"]}) == ("auto:8", chosen)
    assert check(warm_up) == check(rest) == []


def test_a_reader_that_follows_goes_on_in_the_arena_that_the_job_moves_to_and_versions_rise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advice, "recommend", lambda rows, *_: (next(row for row in rows if row["sync"] == "backup:1"), "test"))
    job, twin = f"auto-{os.getpid()}", torch.nn.BatchNorm1d(4)
    has_read = multiprocessing.get_context("fork").Event()

    def train(rank: int) -> str:
        model = torch.nn.BatchNorm1d(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with fastps.DistributedOptimizer(optimizer, "auto:8", model=model, job=job, rank=rank, workers=2) as wrapped:
            while wrapped.policy.spec == "auto:8" or not has_read.is_set():
                time.sleep(0.03 if rank == 0 else 0.002)
                wrapped.zero_grad()
                model(torch.randn(8, 4) + 100).square().sum().backward()
                wrapped.step()
            return str(wrapped.policy.spec)

    workers = processes.start_each(train, 2)
    versions = []
    with fastps.reader(job, follow=True) as reader, fastps.reader(job) as other:
        while reader.newest < 30:
            assert reader.wait(reader.version + 1, timeout_s=30)
            versions.append(reader.update(twin))
        assert reader.job == f"{job}.1" and versions == sorted(versions) and versions[0] < 8
        assert twin.running_mean is not None and bool((twin.running_mean > 1).all()), "with the buffers of the second arena"
        has_read.set()
        assert not other.wait(30) and other.over and other.job == job, "it was not asked to follow"
    assert set(processes.results(workers, 60)) == {"backup:1"}


def test_a_worker_that_ends_early_keeps_the_others_under_bsp() -> None:
    outcomes = _trained([0.002, 0.002, 0.002], 12, leaves_at=5)
    assert all({spec for spec, _ in seen} == {"auto:8"} for seen, _, _ in outcomes)
    assert [counted[0] for _, counted, _ in outcomes] == [12, 12, 5]


def test_auto_is_for_the_optimizer_alone() -> None:
    with pytest.raises(UsageError, match=r"sync 'auto' is for fastps\.DistributedOptimizer"):
        fastps.Store.create(_weights(), fastps.SGD(lr=0.1), sync="auto")
    with pytest.raises(UsageError, match="use fastps advise"):
        simulate(fastps.parse_policy("auto"), Simulation(workers=2, steps=2))
    with pytest.raises(PolicyError, match="warm_up is read with fold 'all' only"):
        fastps.Policy(fold="each", grant="at-once", warm_up=20)
