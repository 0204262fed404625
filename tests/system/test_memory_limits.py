"""The free memory is that of the tightest limit, of either version of control groups, and the OOM killer is named."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fastps.system import memory_limits
from tests.support.scripts import program

MIB = 1 << 20
Group = Callable[..., Path]
HOG = """
import sys
from fastps.processes.launcher import Launcher
outcome = Launcher([sys.executable, sys.argv[1]], 2, start_method="spawn").run()
print([worker.ending for worker in outcome.workers if worker.was_out_of_memory])
"""


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Make the folder of a control group, in a tree that stands for the kernel's."""
    monkeypatch.setattr(memory_limits, "_ROOT", tmp_path)
    monkeypatch.setattr(memory_limits, "_VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(memory_limits, "_OWN", tmp_path / "cgroup")
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 5\n")

    def make(path: str, **files: str) -> Path:
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(text)
        return folder

    return make


def _is_in(tmp_path: Path, *lines: str) -> None:
    (tmp_path / "cgroup").write_text("\n".join([*lines, "1:name=systemd:/x", "an odd line"]))


def test_the_tightest_group_of_all_levels_counts_and_page_cache_is_free(tmp_path: Path, group: Group) -> None:
    _is_in(tmp_path, "0::/slice/job")
    group("slice/job", max="max\n", current=f"{10 * MIB}")
    slice_ = group("slice", max=f"{64 * MIB}", current=f"{60 * MIB}", stat=f"anon 7\ninactive_file {20 * MIB}\nodd\n")
    assert memory_limits.available_bytes() == (24 * MIB, f"limit of the control group {str(slice_)!r}")
    group("slice/job", max=f"{8 * MIB}")
    assert memory_limits.available_bytes()[0] == 0, "more is used than the limit allows"


def test_groups_of_version_1_count_too(tmp_path: Path, group: Group) -> None:
    _is_in(tmp_path, "4:cpu,memory:/docker/7", "0::/")
    outer = group("memory/docker", limit_in_bytes=f"{64 * MIB}", usage_in_bytes=f"{50 * MIB}", stat=f"total_active_file {MIB}")
    group("memory/docker/7", limit_in_bytes="9223372036854771712", usage_in_bytes="0")
    assert memory_limits.available_bytes() == (15 * MIB, f"limit of the control group {str(outer)!r}")


def test_a_container_that_sees_its_group_at_the_root_has_its_limit(tmp_path: Path, group: Group) -> None:
    _is_in(tmp_path, "4:memory:/only/on/the/host")
    root = group("memory", limit_in_bytes=f"{3 * MIB}", usage_in_bytes=f"{MIB}", oom_control="under_oom 0\noom_kill 2\n")
    assert memory_limits.available_bytes() == (2 * MIB, f"limit of the control group {str(root)!r}")
    assert memory_limits.oom_kills() == 2


@pytest.mark.parametrize("lines", [(), ("0::/nowhere",), ("4:memory:/../..",)])
def test_without_a_limit_the_machines_free_memory_counts(lines: tuple[str, ...], tmp_path: Path, group: Group) -> None:
    _is_in(tmp_path, *lines)
    free, limit = memory_limits.available_bytes()
    assert 0 < free <= psutil.virtual_memory().total and limit == "free memory of the machine"


def test_kills_are_those_of_the_own_group(tmp_path: Path, group: Group) -> None:
    _is_in(tmp_path, "0::/slice/job")
    group("slice", events="oom 9\noom_kill 9\n")
    group("slice/job", events="low 0\nmax 12\noom 2\noom_kill 3\n")
    assert memory_limits.oom_kills() == 3
    assert memory_limits.oom_reason() == ", by the kernel's OOM killer"


def test_where_no_group_counts_kills_those_of_the_machine_are_a_probable_reason(tmp_path: Path, group: Group) -> None:
    _is_in(tmp_path, "0::/slice/job")
    assert memory_limits.oom_kills() == 5
    assert memory_limits.oom_reason() == ", probably by the kernel's OOM killer"
    (tmp_path / "vmstat").unlink()
    assert memory_limits.oom_kills() == 0


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real control group of 300 MiB."""
    for base, limit in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        folder = base / f"fastps-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                (folder / limit).write_text(str(300 * MIB))
                yield folder
                return
        except OSError:
            continue
        finally:
            while (folder / "cgroup.procs").read_text():  # an ended process leaves its group a moment later
                os.sched_yield()
            folder.rmdir()
    pytest.skip("no memory control group can be made here")


@pytest.mark.slow
def test_a_worker_that_the_oom_killer_ended_is_named_so(limited: Path, tmp_path: Path) -> None:
    text = "import os, time\nhog = b'x' * (400 << 20) if os.environ['FASTPS_RANK'] == '1' else time.sleep(60)\n"
    python, script = program(tmp_path, text)
    entering = f'echo $$ > {limited}/cgroup.procs && exec "$@"'
    done = subprocess.run(["sh", "-c", entering, "sh", python, "-c", HOG, script], capture_output=True, text=True)
    assert "ended by SIGKILL, by the kernel's OOM killer" in done.stdout, done
    assert done.stdout.count("SIGKILL") == 1, "the launcher ended the other worker"
