"""A small job in random environments: it trains, or ends with one sentence of fastps and an exit code; nothing is left.

FASTPS_ENVIRONMENTS is the number of environments of the slow test; each seed draws one, and is named by a failure.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastps.processes.launcher import Launcher
from tests.support import stacks, store_job

_FEW = 2
_MANY = int(os.environ.get("FASTPS_ENVIRONMENTS", "20"))
_SEED = int(os.environ.get("FASTPS_FUZZ_SEED", "0"))
_LIMIT_S = 90.0  # far above what a job takes on a busy machine
_VARIABLES = (
    *("FASTPS_TIMEOUT", "FASTPS_STALL_MS", "FASTPS_ISA", "FASTPS_JOB", "FASTPS_JOINS", "FASTPS_RANK", "FASTPS_WORKERS"),
    *("FASTPS_MAX_WORKERS", "FASTPS_MAX_READERS", "FASTPS_ON_WORKER_LOSS", "FASTPS_NONFINITE", "FASTPS_SERVER", "FASTPS_SYNC"),
    *("FASTPS_PLACEMENT", "FASTPS_KEEP_MEMORY", "FASTPS_GPUS", "FASTPS_BUCKET_MB", "FASTPS_CHECKPOINT_EVERY", "FASTPS_NNODES"),
    *("FASTPS_NODE_RANK", "FASTPS_RENDEZVOUS", "FASTPS_SECRET", "FASTPS_TRUSTED_NETWORK", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "PMI_RANK", "PMI_SIZE", "JOB_COMPLETION_INDEX"),
    *("OMP_NUM_THREADS", "TERM", "COLUMNS", "PYTHONUNBUFFERED", "LANG", "LC_ALL"),
    *("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"),
)
_VALUES = ("", "0", "1", "2", "-1", "inf", "nan", "1e300", "9" * 30, "zzz", "/nowhere", "a\nb", "\udcff", "é", "x" * 200, " ")
_LIMITS = (
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_NOFILE, 44),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_STACK, 1 << 20),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_AS, 1 << 31),
)


def _draw(seed: int, tmp_path: Path) -> dict[str, Any]:
    """The environment of a seed: variables, a limit, a stream, a folder."""
    drawn = random.Random(seed)
    kinds = drawn.sample(["variable", "variable", "limit", "stream", "folder"], drawn.choice([1, 1, 2, 3]))
    found: dict[str, Any] = {"variables": {}, "limit": None, "stream": "", "folder": tmp_path}
    for kind in kinds:
        if kind == "variable":
            found["variables"][drawn.choice(_VARIABLES)] = drawn.choice(_VALUES)
        elif kind == "limit":
            found["limit"] = drawn.choice(_LIMITS)
        elif kind == "stream":
            found["stream"] = drawn.choice(["no input", "no output", "full output"])
        else:
            found["folder"] = drawn.choice([Path("/proc"), Path("/sys"), Path("/")])  # nobody may write in the first two
    return found


def _before(drawn: dict[str, Any]) -> Callable[[], None]:
    def prepare() -> None:
        if drawn["stream"] == "no input":
            os.close(0)
        elif drawn["stream"] == "no output":
            os.close(1)
        elif drawn["stream"] == "full output":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        if drawn["limit"] is not None:
            number, value = drawn["limit"]
            resource.setrlimit(number, (value, value))

    return prepare


def _check(seed: int, tmp_path: Path) -> None:
    """Run the job in one environment."""
    drawn = _draw(seed, tmp_path)
    base = {name: value for name, value in os.environ.items() if not name.startswith(("FASTPS_", "PYTEST"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastps", "run", "-n", "2", "--start-method", "spawn", *store_job.command("bsp", 3)],
        env={**base, "FASTPS_TIMEOUT": "20", "PYTHONPATH": str(Path(__file__).parents[2]), **drawn["variables"]},
        cwd=drawn["folder"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_before(drawn),
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)  # ends once nobody has the pipe any more
    except subprocess.TimeoutExpired as late:
        stacks.show([process.pid, *stacks.descendants(process.pid)], f"seed {seed} hangs: {drawn}")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise AssertionError(f"seed {seed}: it hangs: {drawn}\n{late.stdout!r}") from None
    text, code = output.decode(errors="replace"), process.returncode
    where = f"seed {seed}: exit code {code}: {drawn}\n{text}"
    assert "Traceback" not in text, where
    if code == 0:
        assert "output" in drawn["stream"] or text.count("trained to") == 2, where
    else:
        assert code in (1, 2), where
        assert "fastps" in text, where
    deadline = time.monotonic() + 10
    while (left := _of_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"{where}\nleft running: {left}"


def _of_session(number: int) -> list[str]:
    """The command lines of the processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            columns = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if columns[3:4] == [str(number).encode()] and columns[0] != b"Z":
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def test_a_run_inside_a_replaced_worker_begins_a_job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherited FASTPS_JOINS, and its worker 0 waited for a job that nobody would begin."""
    monkeypatch.setenv("FASTPS_JOINS", "1")
    assert "FASTPS_JOINS" not in Launcher(["true"], 2)._variables(0, 0)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(_FEW))
def test_a_job_trains_or_says_why_not(seed: int, tmp_path: Path) -> None:
    _check(_SEED + seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * _MANY)
def test_a_job_trains_or_says_why_not_in_many_environments(tmp_path: Path) -> None:
    failures = []
    for seed in range(_SEED + _FEW, _SEED + _FEW + _MANY):
        try:
            _check(seed, tmp_path)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {_MANY}:\n" + "\n".join(failures)
