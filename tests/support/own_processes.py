"""These programs start their own processes, so they run without a launcher's variables, with one thread each."""

import os
from collections.abc import Iterator

import pytest
import torch

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FASTPS_RANK", "FASTPS_WORKERS", "FASTPS_JOB", "FASTPS_SYNC")


@pytest.fixture(autouse=True)
def own_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment like that of a fresh shell."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FASTPS_TIMEOUT", "200")  # on busy cores, five processes that import a framework take over a minute
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not a cluster that another test, or a process that was killed, has started
    threads, kept = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(kept)
