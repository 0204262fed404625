"""What a worker has started ends with it if it fails; nothing stays as a zombie."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from tests.support.processes import runs
from tests.support.scripts import program

BEGIN = """
import os, pathlib, signal, subprocess, sys, time
folder, rank, fresh = pathlib.Path({folder!r}), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
def start(name, **how):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"], **how)
    (folder / name).write_text(str(child.pid))
def wait_for(name):
    while not (folder / name).exists(): time.sleep(0.02)
"""


def _launcher(folder: Path, script: str, options: JobOptions, workers: int = 2) -> Launcher:
    return Launcher(program(folder, BEGIN.format(folder=str(folder)) + script), workers, options=options, env="torchrun")


def _runs(folder: Path, name: str) -> bool:
    return runs(int((folder / name).read_text()))


def _running_at_the_replacement(folder: Path, script: str, *names: str) -> dict[str, bool]:
    """Which of these processes run once the worker that was killed is replaced. Ends the others', which this program adopts."""
    seen: dict[str, bool] = {}

    def look() -> None:
        if (folder / "replaced").exists() and not seen:
            seen.update({name: _runs(folder, name) for name in names})
            (folder / "looked").touch()

    try:
        assert _launcher(folder, script, JobOptions(restarts=1)).run(look).exit_code == 0
    finally:
        for name in names:
            if name.startswith("others"):
                os.kill(int((folder / name).read_text()), signal.SIGKILL)
                os.waitpid(int((folder / name).read_text()), 0)
    return seen


def test_the_children_of_a_killed_worker_end_with_it_and_those_of_others_do_not(tmp_path: Path) -> None:
    script = (
        "if rank == '0':\n    start('others'); start('others_daemon', start_new_session=True)\n    wait_for('looked')\n"
        "elif fresh:\n    wait_for('others_daemon'); start('child'); start('daemon', start_new_session=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nelse:\n    (folder / 'replaced').touch(); wait_for('looked')\n"
    )
    seen = _running_at_the_replacement(tmp_path, script, "child", "daemon", "others", "others_daemon")
    assert seen == {"child": False, "daemon": False, "others": True, "others_daemon": True}


def test_orphan_ends_with_the_worker_that_its_variables_name_however_long_it_has_run(tmp_path: Path) -> None:
    script = (
        "def orphan(name):\n"
        "    command = f'echo $$ > {folder}/{name}.tmp; mv {folder}/{name}.tmp {folder}/{name}; exec sleep 300'\n"
        "    subprocess.run(['setsid', '-f', 'sh', '-c', command])\n"
        "if rank == '0':\n    wait_for('early'); time.sleep(0.5); orphan('others'); wait_for('looked')\n"
        "elif fresh:\n    orphan('early'); wait_for('others'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "else:\n    (folder / 'replaced').touch(); wait_for('looked')\n"
    )
    assert _running_at_the_replacement(tmp_path, script, "early", "others") == {"early": False, "others": True}


def test_a_job_that_a_signal_ends_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))\n"
        "start('child' + rank); start('daemon' + rank, start_new_session=True)\n"
        "if rank == '0':\n    wait_for('daemon1'); os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(300)\n"
    )
    assert _launcher(tmp_path, script, JobOptions()).run().exit_code == 143
    assert not [name for name in ("child0", "daemon0", "child1", "daemon1") if _runs(tmp_path, name)]


def test_orphans_that_end_are_no_zombies(tmp_path: Path) -> None:
    script = (
        "subprocess.run([sys.executable, '-S', '-c', 'import os; os.fork() or os._exit(0) if not os.fork() else 0'])\n"
        "(folder / 'orphaned').touch()\nwait_for('reaped')\n"
    )
    other = subprocess.Popen([sys.executable, "-S", "-c", "0"], process_group=0)  # a child of this program, which waits for it
    before = {child.pid for child in psutil.Process().children()}  # this program's own, which it waits for
    looks = []

    def look() -> None:
        if (tmp_path / "orphaned").exists():
            zombies = {child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE}
            looks.append(zombies - before)
            if len(looks) > 3 and not looks[-1]:
                (tmp_path / "reaped").touch()

    assert _launcher(tmp_path, script, JobOptions(), workers=1).run(look).exit_code == 0
    assert other.wait() == 0
