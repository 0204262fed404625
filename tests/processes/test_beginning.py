"""Worker 0 is lost while it is alone in its arena: a replacement begins the job anew, and the launcher says what is lost."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.processes.beginning import Beginning
from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from fastps.system.clock import SYSTEM_CLOCK
from tests.support import processes
from tests.support.scripts import program

WEIGHTS = {"w": np.ones(3, np.float32)}


def _alone(job: str, steps: int, seen: Path) -> None:
    """Make a job's arena and some steps, and end without a word once the file is there."""
    store = fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), sync="asp", workers=2, job=job, on_worker_loss="continue")
    worker = store.attach(0)
    for _ in range(steps):
        worker.step(WEIGHTS)
    while not seen.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_steps_of_a_lone_worker_are_lost_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, seen = f"lone-{tmp_path.name}", tmp_path / "seen"
    beginning = Beginning(job, SYSTEM_CLOCK)
    child = processes.start(lambda: _alone(job, 3, seen))
    while beginning._arena is None or beginning._arena.counters(0)["steps"] < 3:
        beginning.check()
    seen.touch()
    processes.finish([child], 60)
    assert not beginning.is_over()
    assert beginning.replaced(0) == 3
    assert "the job begins anew, and the 3 steps that it had made are lost" in caplog.text
    assert beginning.replaced(0) is None  # one that ended before it was seen
    assert "any steps that it had made are lost" in caplog.text
    assert beginning.replaced(1) == 0


def test_a_job_that_two_workers_have_joined_is_over_once_its_arena_is_gone(tmp_path: Path) -> None:
    job = f"two-{tmp_path.name}"
    beginning = Beginning(job, SYSTEM_CLOCK)
    assert not beginning.is_over()
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), sync="asp", workers=2, job=job) as store:
        with store.attach(0), store.attach(1):
            beginning.check()
            assert not beginning.is_watched
            assert not beginning.is_over()
    assert beginning.is_over()


def test_worker_lost_in_a_later_job_of_the_script_is_not_replaced(tmp_path: Path) -> None:
    job = f"later-{tmp_path.name}"
    beginning = Beginning(job, SYSTEM_CLOCK)
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), sync="asp", workers=2, job=f"{job}.1") as later, later.attach(1):
        assert beginning.is_over(), "a replacement would make the first job, in which it would train alone"
        with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), sync="asp", workers=2, job=job) as first, first.attach(1):
            assert not beginning.is_over(), "both jobs run (two optimizers), and a replacement joins both"


def test_a_job_that_its_only_worker_has_left_is_over(tmp_path: Path) -> None:
    job = f"left-{tmp_path.name}"
    beginning = Beginning(job, SYSTEM_CLOCK)
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), workers=1, job=job) as store:
        with store.attach(0) as worker:
            worker.step(WEIGHTS)
            beginning.check()
    assert beginning.is_over()


SCRIPT = """
import os, pathlib, sys, time
import numpy as np, fastps
folder = pathlib.Path(sys.argv[1])
rank, job = int(os.environ["FASTPS_RANK"]), os.environ["FASTPS_JOB"]
options = {"sync": "asp", "workers": 2, "on_worker_loss": "continue"}
is_first = rank == 0 and not (folder / "first").exists()
if rank == 0:
    store = fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=1.0), job=job, **options)
    worker = store.attach(0)
    for _ in range(3):
        worker.step({"w": np.ones(3)})
    if is_first:
        (folder / "first").touch()
        while not (folder / "seen").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    (folder / "second").write_text(str(store.version))
    worker.close()
while not (folder / "second").exists():
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_replacement_begins_the_job_of_a_lone_worker_anew_and_the_launcher_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [*program(tmp_path, SCRIPT), str(tmp_path)]
    launcher = Launcher(command, 2, options=JobOptions(restarts=1), imports=["numpy"])

    def look() -> None:
        if launcher._beginning._arena is not None and (tmp_path / "first").exists():
            (tmp_path / "seen").touch()

    outcome = launcher.run(on_tick=look)
    assert outcome.exit_code == 0, [list(worker.errors.tail) for worker in outcome.workers]
    ends = [(worker.rank, worker.restart, worker.exit_code, worker.lost_steps) for worker in outcome.workers]
    assert ends == [(0, 0, -9, 3), (1, 0, 0, 0), (0, 1, 0, 0)]
    assert (tmp_path / "second").read_text() == "3"
    assert "the 3 steps that it had made are lost" in caplog.text
