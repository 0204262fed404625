"""The process that `fastps.evaluator` starts, and the command `fastps evaluate`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.evaluation.rows import metrics_of, read
from tests.evaluation.judged import build_model, evaluate, step
from tests.support import commands, processes

SCRIPT = """
import sys, torch
def build_model(): return torch.nn.Linear(1, 1, bias=False)
def evaluate(model): return {"loss": model.weight, "arguments": len(sys.argv)}
def other(model): raise ValueError("of the script")
if __name__ == "__main__": raise SystemExit("the main part ran")
"""


def _job() -> str:
    return f"evaluator-{os.getpid()}"


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script_of_test.py").write_text(SCRIPT)
    return str(tmp_path / "script_of_test.py")


def _until_asked(job: str, ready: Callable[[], object]) -> int:
    """Publish losses of 1 until the training is asked to stop; the last version."""
    with fastps.Publisher(torch.nn.Linear(1, 1, bias=False), job) as publisher:
        ready()
        while not publisher.stop_asked:
            publisher.publish({"weight": torch.ones(1, 1)}, tag={"a": 1})
            time.sleep(0.005)
        return publisher.version


def test_a_process_evaluates_beside_a_training_that_it_stops(tmp_path: Path) -> None:
    """Only what a new process imports, it has; this is one of those that take seconds."""
    model, generator = build_model(), torch.Generator().manual_seed(1)
    inner, best = torch.optim.SGD(model.parameters(), lr=0.0), tmp_path / "best.pt"
    options: Any = {"metric": "batches", "mode": "min", "patience": 2, "best": best, "idle": False}
    with fastps.Publisher(model, _job()) as publisher:
        with fastps.evaluator(build_model, evaluate, _job(), tmp_path / "rows", **options) as evaluator:
            assert os.getpgid(evaluator.process_id) == evaluator.process_id, "Ctrl-C is for the trainer alone"
            assert evaluator.rows() == [] and evaluator.best is None
            processes.wait_until(lambda: evaluator.rows(), 60)
            while not publisher.stop_asked:
                step(model, inner, generator)
                publisher.publish()
                time.sleep(0.01)
            expected = {name: value.item() for name, value in evaluate(model).items()}
    rows = evaluator.rows()
    assert rows[-1]["version"] == publisher.version and metrics_of(rows[-1]) == expected
    assert evaluator.best == rows[0] and torch.load(best)["norm.num_batches_tracked"].item() == rows[0]["batches"]
    evaluator.close()


def _fail(model: torch.nn.Module) -> dict[str, float]:
    raise LookupError("no data")


@pytest.mark.slow  # each process imports torch
def test_what_ends_the_process_is_raised_where_it_is_closed(tmp_path: Path) -> None:
    with fastps.Publisher(build_model(), _job()):
        with pytest.raises(LookupError, match="no data"):
            with fastps.evaluator(build_model, _fail, _job(), tmp_path / "rows"):
                pass
        evaluator = fastps.evaluator(build_model, evaluate, _job(), tmp_path / "rows")
        os.kill(evaluator.process_id, signal.SIGKILL)
        with pytest.raises(
            fastps.Error, match=r"the evaluator .*SIGKILL.*: expected it to end with the job; its rows are whole"
        ):
            evaluator.close()
        with pytest.raises(ZeroDivisionError):
            with fastps.evaluator(build_model, _fail, _job(), tmp_path / "rows"):
                raise ZeroDivisionError


@pytest.mark.slow
def test_it_ends_with_the_process_that_started_it_after_the_last_version(tmp_path: Path) -> None:
    def start(ready: Callable[[], object]) -> None:
        with fastps.Publisher(build_model(), job) as publisher:
            evaluator = fastps.evaluator(build_model, evaluate, job, tmp_path / "rows", every=1000)
            (tmp_path / "id").write_text(str(evaluator.process_id))
            processes.wait_until(lambda: evaluator.rows(), 60)
            publisher.publish()
            ready()
            time.sleep(60)

    job = _job()
    child = processes.start_ready(start)
    number = int((tmp_path / "id").read_text())
    assert processes.runs(number)
    processes.kill(child)
    processes.wait_until(lambda: not processes.runs(number), 30)
    assert [row["version"] for row in read(tmp_path / "rows")[0]] == [0, 1]


@pytest.mark.slow
def test_a_training_that_begins_and_ends_before_it_looks_leaves_no_row(tmp_path: Path) -> None:
    with fastps.evaluator(build_model, evaluate, _job(), tmp_path / "rows") as evaluator:
        pass
    assert evaluator.rows() == []


def test_it_is_refused_in_virtual_time_and_with_wrong_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(fastps.UsageError, match="patience: expected metric and mode"):
        fastps.evaluator(build_model, evaluate, _job(), tmp_path / "rows", patience=3)
    monkeypatch.setattr("fastps.job.environment.is_virtual", lambda: True)
    with pytest.raises(fastps.UnsupportedError, match="an evaluator in virtual time"):
        fastps.evaluator(build_model, evaluate, _job(), tmp_path / "rows")


def test_importing_fastps_loads_nothing_of_it() -> None:
    code = "import sys, fastps; print([each for each in sys.modules if 'evaluation' in each])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_command_evaluates_until_the_job_ends(script: str, tmp_path: Path) -> None:
    job, rows, best = _job(), tmp_path / "rows", tmp_path / "best.pt"
    child = processes.start_ready(lambda ready: _until_asked(job, ready))
    choice = ("--metric", "loss", "--mode", "min", "--best", str(best), "--patience", "2", "--rows", str(rows))
    done = commands.done("evaluate", script, "--job", job, *choice, "--no-idle", "--json", "-", "--", "--a", "b")
    (last,) = processes.results([child], 60)
    found = json.loads(done.stdout)["rows"]
    assert found == read(rows)[0] and found[-1]["version"] == last
    assert found[-1]["loss"] == 1.0 and found[-1]["arguments"] == 3 and found[-1]["tag"] == {"a": 1}
    assert torch.load(best)["weight"].item() <= 1.0
    lines = done.stderr.splitlines()
    assert lines[-2].startswith(f"version {last}: loss 1, arguments 3 (") and "asked to stop)" in lines[-2]
    assert lines[-1].startswith("best: version ") and lines[-1].endswith(f"; {best}")


def test_the_commands_rows_are_its_output(script: str) -> None:
    job = _job()
    child = processes.start_ready(lambda ready: _until_asked(job, ready))
    choice = ("--metric", "loss", "--mode", "min", "--patience", "1")
    done = commands.done("evaluate", script, "--job", job, "--rows", "-", "--no-idle", *choice)
    processes.results([child], 60)
    assert [json.loads(line)["arguments"] for line in done.stdout.splitlines()][:2] == [1, 1]


def test_an_error_of_the_script_ends_the_command_and_not_the_training(script: str) -> None:
    with fastps.Publisher(torch.nn.Linear(1, 1, bias=False), _job()) as publisher:
        ended = commands.fastps("evaluate", script, "--job", _job(), "--evaluate", "other")
        assert ended.returncode == 1 and "ValueError: of the script" in ended.stderr
        assert publisher.publish() == 1


@pytest.mark.slow
def test_ctrl_c_ends_the_command_without_a_word_and_leaves_whole_rows(script: str, tmp_path: Path) -> None:
    with fastps.Publisher(torch.nn.Linear(1, 1, bias=False), _job()):
        command = [sys.executable, "-m", "fastps", "evaluate", script, "--job", _job(), "--rows", str(tmp_path / "rows")]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
            processes.wait_until(lambda: read(tmp_path / "rows")[0], 60)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate()
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors
