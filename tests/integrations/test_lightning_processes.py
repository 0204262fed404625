"""A Trainer's workers as processes: who starts them, and how a death, an error, Ctrl-C and SIGTERM end all of them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs import needs
from tests.integrations.programs import command, program, run, run_text
from tests.support.processes import runs, wait_until

needs("lightning", "torchmetrics")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lightning_digits"
_TRAIN = """
import os, sys, time, torch
from pathlib import Path
from lightning.pytorch import Trainer
from fastps.integrations.lightning import FastpsStrategy
from tests.integrations.lightning_modules import _QUIET, Line, loader
import fastps

class Module(Line):
    def on_train_batch_start(self, batch, index):
        Path(f"pid-{self.global_rank}").write_text(str(os.getpid()))
        act(self)

def act(module):
    pass

DEVICES, SYNC, EPOCHS = 2, "bsp", 1
"""
_FIT = """
trainer = Trainer(strategy=FastpsStrategy(SYNC), devices=DEVICES, accelerator="cpu", **{**_QUIET, "max_epochs": EPOCHS})
module = Module()
trainer.fit(module, loader(), loader(8))
found = f"step {trainer.global_step}, {module.net.weight.sum().item():.6f}"
print(f"rank {trainer.global_rank} of {trainer.world_size}, {found}", flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs run, which find these tests there."""
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return tmp_path


def _start(folder: Path, text: str) -> "subprocess.Popen[str]":
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command("alone", program(text, folder)), cwd=folder, **options)


def _pids(folder: Path, workers: int = 2) -> list[int]:
    """The process ids of all workers, once they train."""
    files = [folder / f"pid-{rank}" for rank in range(workers)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), 200, "the workers do not train")
    return [int(file.read_text()) for file in files]


def _await_end(pids: list[int]) -> None:
    wait_until(lambda: not any(map(runs, pids)), 20, f"some of these still run: {pids}")


def _lines(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d of \d, step \d+, -?[\d.]+", text))


# -- launchers ------------------------------------------------------------------------------------------


def test_script_starts_its_workers_itself_and_fits_twice(folder: Path) -> None:
    ended = run_text(_TRAIN + _FIT + _FIT, folder, "alone")
    assert ended.returncode == 0, ended.stderr
    lines = _lines(ended.stdout)
    assert len(lines) == 4 and len({line.split(", ", 1)[1] for line in lines}) == 1, ended.stdout
    assert lines[0].startswith("rank 0 of 2, step 8")


def test_processes_of_multiprocessing_bring_weights_and_metrics_back(folder: Path) -> None:
    """Of a server of forks, for which the launcher does what Lightning does for "spawn"."""
    guarded = _FIT.replace("FastpsStrategy(SYNC)", "FastpsStrategy(SYNC, start_method='forkserver')").replace("\n", "\n    ")
    ended = run_text(_TRAIN + 'if __name__ == "__main__":' + guarded, folder, "alone")
    assert ended.returncode == 0, ended.stderr
    assert len(_lines(ended.stdout)) == 1 and _lines(ended.stdout)[0].startswith("rank 0 of 2, step 0"), ended.stdout
    weight = float(_lines(ended.stdout)[0].rsplit(" ", 1)[1])
    assert abs(weight - 4) < 2, "the sum of the four weights, which begins at 0.45 and ends at 4"


@pytest.mark.parametrize("launcher", ["fastps run", "torchrun"])
def test_launchers_number_of_workers_counts(launcher: str, folder: Path) -> None:
    ended = run_text(_TRAIN + "DEVICES = 1" + _FIT, folder, launcher)
    assert ended.returncode == 0, ended.stderr
    lines = _lines(ended.stdout)
    assert [line[:19] for line in lines] == ["rank 0 of 2, step 8", "rank 1 of 2, step 8"], ended.stdout


def test_example_differs_from_plain_lightning_in_three_lines_and_learns(folder: Path) -> None:
    plain, main = ((EXAMPLE / name).read_text().splitlines() for name in ("plain.py", "main.py"))
    changed = [line for line in main[1:] if line and line not in plain]
    assert len(changed) <= 3, changed
    assert all(line in main or line.strip() == "devices=1," for line in plain[1:])
    ended = run([sys.executable, str(EXAMPLE / "main.py"), "5"], folder)
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(r"accuracy ([\d.]+) after 5 epochs, 95 steps a worker\n", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) > 0.9


# -- ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("act", "sync_and_epochs"), [
    ("time.sleep(0.01)", '"asp", 1000'),
    ("time.sleep(600) if module.global_rank == 1 else torch.distributed.barrier()", '"bsp", 1'),
], ids=["in their steps", "in a collective"])  # fmt: skip
def test_killed_worker_ends_the_others_with_the_named_error(act: str, sync_and_epochs: str, folder: Path) -> None:
    process = _start(folder, _TRAIN.replace("pass", act).replace('"bsp", 1', sync_and_epochs) + _FIT)
    pids = _pids(folder)
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "WorkerDiedError: worker 1" in stderr, stderr
    assert time.monotonic() - began < 20
    _await_end(pids)


def test_error_of_one_worker_is_quoted_by_the_others(folder: Path) -> None:
    act = "if module.global_rank == 1: raise ValueError('the data of worker 1 is bad')"
    ended = run_text(_TRAIN.replace("pass", act) + _FIT, folder, "alone")
    assert ended.returncode == 1
    assert "WorkerDiedError: worker 1" in ended.stderr and "ValueError: the data of worker 1 is bad" in ended.stderr


def test_worker_that_ends_before_it_trains_is_named(folder: Path) -> None:
    early = "if os.environ.get('LOCAL_RANK') == '1': sys.exit(7)\n"
    ended = run_text(_TRAIN + early + _FIT, folder, "alone")
    assert ended.returncode == 1
    found = re.search(r"WorkerDiedError: worker 1 \(process \d+\) ended with exit code 7 before it met", ended.stderr)
    assert found, ended.stderr


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["Ctrl-C", "SIGTERM"])
def test_signal_ends_all_workers(number: signal.Signals, to_all: bool, folder: Path) -> None:
    text = _TRAIN.replace("pass", "time.sleep(0.01)").replace('"bsp", 1', '"dssp:3,15", 1000')
    process = _start(folder, text + _FIT)
    pids = _pids(folder)
    for pid in pids if to_all else pids[:1]:
        os.kill(pid, number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    _await_end(pids)


def test_workers_end_with_a_killed_main_process(folder: Path) -> None:
    process = _start(folder, _TRAIN.replace("pass", "time.sleep(600)") + _FIT)
    pids = _pids(folder)
    process.kill()
    process.communicate()
    _await_end(pids)
