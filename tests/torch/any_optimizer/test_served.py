"""Optimizers in Python under disciplines whose workers do not wait for each other: a server process runs step()."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from tests.support import processes
from tests.torch.any_optimizer.test_fold import STEPS, Failing, Own, are_same, loss_of, new_model, plain, train, values_of


@pytest.mark.slow
def test_a_server_that_runs_the_optimizer_has_the_bits_of_one_process() -> None:
    def work(rank: int) -> tuple[list[list[float]], bool]:
        torch.set_num_threads(1)
        model = new_model()
        with fastps.DistributedOptimizer(Own(model.parameters()), server="process") as optimizer:
            train(model, optimizer, rank)
            optimizer.wait_for_others()
            state = optimizer.state_dict()
        assert are_same(optimizer.state_dict(), state), "after close, too"
        return values_of(model), are_same(state["state"], plain("own", 2)[1].state_dict()["state"])

    torch.set_num_threads(1)
    children = processes.start_job(work, 2)
    assert processes.results(children, 90) == [(values_of(plain("own", 2)[0]), True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["asp", "ssp:2", "dssp:1,3", "softsync:2", "adv*:1"])
def test_each_push_is_a_step_of_the_server_whatever_the_pace_of_worker_0(sync: str) -> None:
    """Worker 1 does not wait for worker 0, whose steps take long."""

    def work(rank: int) -> float:
        model = new_model()
        with fastps.DistributedOptimizer(Own(model.parameters()), sync, batch_size=5) as optimizer:
            optimizer.wait_for_start()
            began = time.monotonic()
            for step in range(2 if rank == 0 else 4 if sync.startswith("ssp") else 10):
                time.sleep(0.0 if rank else 0.5)
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            took = time.monotonic() - began
            optimizer.wait_for_others()
            assert optimizer.state_dict()["state"][0]["mean"].dtype == torch.bfloat16
            return took

    found = processes.results(processes.start_job(work, 2), 90)
    assert found[0] >= 1.0 and (found[1] < 0.9 or sync == "dssp:1,3" or sync == "ssp:2")


@pytest.mark.slow
def test_what_a_script_changes_in_its_param_groups_reaches_the_server_with_its_push() -> None:
    """And an option that the optimizer itself counts in stays its own."""

    def work(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        model = new_model()
        inner = Counting(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 3)
        with fastps.DistributedOptimizer(inner, server="process") as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                schedule.step()
                optimizer.param_groups[0]["mode"] = f"after {step}"
            assert [group["k"] for group in optimizer.state_dict()["param_groups"]] == [STEPS]
            return values_of(model)

    torch.set_num_threads(1)
    model = new_model()
    inner = Counting(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 3)
    for step in range(STEPS):
        inner.zero_grad()
        loss_of(model, step).backward()
        inner.step()
        schedule.step()
        inner.param_groups[0]["mode"] = f"after {step}"
    assert processes.results(processes.start_job(work, 1), 60) == [values_of(model)]


class Counting(torch.optim.Optimizer):
    """Counts in its param_groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "mode": "begin"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * len(group["mode"]) / group["k"])


@pytest.mark.parametrize("end", [pytest.param("raise", marks=pytest.mark.slow), "kill"])
def test_the_end_of_the_server_ends_the_workers_by_name(end: str) -> None:
    def work(rank: int) -> None:
        model = new_model()
        inner = Failing(model.parameters()) if end == "raise" else Own(model.parameters())
        with fastps.DistributedOptimizer(inner, "asp", timeout_s=20) as optimizer:
            if end == "kill" and rank == 0:
                os.kill(optimizer.worker.store.arena.process_id(optimizer.worker.store.arena.server_lane), signal.SIGKILL)
            train(model, optimizer, rank, steps=100)

    Failing.end = end
    children = processes.start_job(work, 2)
    processes.finish(children, 60)
    why = "ArithmeticError: the user's step fails" if end == "raise" else "was killed"
    for child in children:
        assert child.outcome[0] == "WorkerDiedError" and "the job's server, which runs the optimizer" in child.outcome[1]
    assert any(why in child.outcome[1] for child in children)


@pytest.mark.slow
def test_a_worker_that_dies_leaves_the_optimizer_to_the_others_and_a_checkpoint_resumes(tmp_path: Path) -> None:
    def work(rank: int) -> bool:
        model = new_model()
        options: dict[str, Any] = {"on_worker_loss": "continue", "checkpoint": tmp_path, "every": 1000}
        with fastps.DistributedOptimizer(Own(model.parameters()), "bsp", model=model, **options) as optimizer:
            train(model, optimizer, rank, steps=3)
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, rank, steps=3)
            return bool(optimizer.version >= 6)

    children = processes.start_job(work, 2)
    processes.finish(children, 60)
    assert children[0].exit_code == -signal.SIGKILL and children[1].outcome is True
    model = new_model()
    with fastps.DistributedOptimizer(Own(model.parameters()), model=model, resume=tmp_path) as optimizer:
        assert optimizer._inner.count == optimizer.version >= 6


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["backup:1,shards=1", "psp:2,1,shards=1"])
def test_two_jobs_of_a_script_do_not_wait_for_each_other_where_some_pushes_make_a_version(sync: str) -> None:
    """A worker 0 that ran the optimizer would wait in one job for workers that wait for it in the other."""

    def work(rank: int) -> int:
        model = new_model()
        jobs = [fastps.DistributedOptimizer(Own([each]), sync, timeout_s=20) for each in model.parameters()]
        for step in range(60):
            for optimizer in jobs:
                optimizer.zero_grad()
            loss_of(model, 100 * step + rank).backward()
            for optimizer in jobs:
                optimizer.step()
        for optimizer in jobs:
            assert optimizer.worker.store.layout.has_server
            optimizer.close()
        return rank

    assert processes.results(processes.start_job(work, 3), 90) == [0, 1, 2]


@pytest.mark.slow
def test_one_worker_with_overlap_has_a_server_because_its_thread_would_move_the_scripts_weights() -> None:
    def work(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        model = new_model()
        with fastps.DistributedOptimizer(Own(model.parameters()), "adv*:1,groups=1", batch_size=5) as optimizer:
            assert optimizer.worker.store.layout.has_server
            train(model, optimizer, rank, steps=1)
            optimizer.wait_for_others()
        return values_of(model)

    torch.set_num_threads(1)
    assert processes.results(processes.start_job(work, 1), 60) == [values_of(plain("own", steps=1)[0])]
