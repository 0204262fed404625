"""A process at its limits: without threads a checkpoint is written all the same, without descriptors a worker goes on."""

import contextlib
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.kernels.shm.arena import LANE_LIVE
from tests.support import processes
from tests.support.said import listen

ONES = {name: np.ones(64, np.float32) for name in ("a", "b")}


def test_without_threads_a_checkpoint_is_written_and_the_log_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, model = listen(), torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastps.DistributedOptimizer(inner, checkpoint=tmp_path, every=2) as optimizer:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert fastps.load(tmp_path).version == 5
    assert any("no thread can be started for a checkpoint (can't start new thread)" in each for each in said)


def test_without_descriptors_a_worker_goes_on_beside_a_peers_replacement_and_says_so() -> None:
    options: dict[str, Any] = {"workers": 2, "on_worker_loss": "continue", "timeout_s": 30, "sync": "asp"}
    with fastps.Store.create({"a": ONES["a"]}, fastps.SGD(lr=0.1), **options) as store, store.attach(0) as worker:
        go, told = os.pipe()

        def peer(waits: bool) -> None:
            if waits:
                os.read(go, 1)
            with store.attach(1) as other:
                while True:
                    other.step({"a": ONES["a"]})
                    time.sleep(0.01)

        first, second = processes.start(partial(peer, False)), processes.start(partial(peer, True))
        processes.wait_until(lambda: store.arena.lane_state(1) == LANE_LIVE)
        worker.check_peers()
        said, held = listen(), []
        processes.kill(first)
        worker.check_peers()
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        try:
            os.write(told, b"x")
            processes.wait_until(lambda: worker.step({"a": ONES["a"]}) or store.arena.members()[1] == (1, LANE_LIVE))
            for _ in range(5):
                worker.step({"a": ONES["a"]})
                worker.check_peers()
        finally:
            for each in held:
                os.close(each)
        processes.kill(second)
        assert len([each for each in said if "the death of worker 1 would not be noticed here" in each]) == 1
        for each in (go, told):
            os.close(each)


def test_the_death_of_who_holds_a_shards_lock_is_told_in_a_partial_pull() -> None:
    options: dict[str, Any] = {"sync": "psp:1,0.5,pull_timeout=10,shards=2", "workers": 2, "timeout_s": 60}
    with fastps.Store.create(ONES, fastps.SGD(lr=0.1), **options) as store:
        ready, told = os.pipe()

        def hold() -> None:
            other = store.attach(1)
            processes.wait_until(lambda: other.lane.hold(1))
            os.write(told, b"x")
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

        child = processes.start(hold)
        with store.attach(0) as worker:
            os.read(ready, 1)
            began = time.monotonic()
            with pytest.raises(fastps.WorkerDiedError, match=r"worker 1 .* died"):
                worker.step({"a": np.ones(64), "b": np.ones(64)})
            assert time.monotonic() - began < 3.0
        processes.kill(child)
        for each in (ready, told):
            os.close(each)
