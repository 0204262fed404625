"""Kills of worker 0, of another worker, or of the server at any moment: the others end by name, and a checkpoint resumes."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from tests.support import processes
from tests.torch.any_optimizer.test_fold import Own, loss_of, new_model, plain, values_of

STEPS = 30


def _job(folder: Path, server: str, doomed: str, after_s: float) -> list[Any]:
    """The outcomes of two workers, of which `doomed` is killed: "0", "1", "server", or "" for none."""

    def work(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        model = new_model()
        options: dict[str, Any] = {
            "checkpoint": folder,
            "every": 4,
            "resume": folder if any(folder.glob("checkpoint-*")) else None,
        }
        inner = Own(model.parameters())
        with fastps.DistributedOptimizer(inner, model=model, server=server, timeout_s=30, **options) as optimizer:
            optimizer.wait_for_start()
            arena = optimizer.worker.store.arena
            if doomed == str(rank) or (doomed == "server" and rank == 0):
                process = arena.process_id(arena.server_lane) if doomed == "server" else os.getpid()
                threading.Timer(after_s, os.kill, (process, signal.SIGKILL)).start()
            while optimizer.worker.steps < STEPS:
                step = optimizer.worker.steps
                optimizer.zero_grad()
                loss_of(model, 100 * step + rank).backward()
                time.sleep(0.002 if doomed else 0)
                optimizer.step()
            optimizer.wait_for_others()
            return values_of(model)

    children = processes.start_job(work, 2)
    processes.finish(children, 60)
    return [child.outcome if child.exit_code != -signal.SIGKILL else "killed" for child in children]


@pytest.mark.slow
@pytest.mark.parametrize("server", ["workers", "process"])
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_ends_the_job_by_name_and_the_resumed_job_has_the_bits(
    seed: int, server: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    expected = values_of(plain("own", 2, STEPS)[0])
    for _ in range(2):
        doomed = chance.choice(["0", "1"] if server == "workers" else ["0", "1", "server"])
        for outcome in _job(tmp_path, server, doomed, chance.uniform(0.0, 0.12)):
            assert outcome in ("killed", expected) or outcome[0] == "WorkerDiedError", outcome
    assert _job(tmp_path, server, "", 0.0) == [expected] * 2
