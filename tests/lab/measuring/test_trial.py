"""Whether more workers would pay: what the trials find, and what is said of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastps.lab.measuring import trial
from fastps.lab.measuring.trial import Trial, verdict
from tests.support import commands

ALONE = Trial(1, 100.0, 200.0, 10.0, 0.0, 0.0, 400_000_000)
FOUR = Trial(4, 190.0, 200.0, 10.0, 0.0, 0.05, 900_000_000, "asp", "the fastest")

SCRIPT = """
import time, torch, fastps
model = torch.nn.Linear(4, 1)
opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
while True:
    time.sleep(0.02)  # a data pipeline
    opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
"""


@pytest.mark.parametrize(("four", "said"), [
    (FOUR, "More workers help: 4 make 1.9 times the steps of 1"),
    (replace(FOUR, steps_per_s=105.0), "More workers do not help: 4 make 1.1 times the steps of 1"),
    (FOUR, "The cores bound 4 workers"),
    (replace(FOUR, core_ms=20.0), "Memory or caches bound 4 workers: a step needs 20.0 ms of a core, and 10.0 ms in one"),
    (replace(FOUR, steps_per_s=120.0, wait_share=0.4), "Waiting bounds 4 workers: they wait for each other for 40%"),
    (replace(FOUR, steps_per_s=120.0, blocked_ms=30.0), "The data pipeline, files or sleeps bound 4 workers"),
    (replace(FOUR, steps_per_s=120.0), "Nothing bounds 4 workers yet: 60% of what the free cores can do"),
    (FOUR, "4 workers take 900 MB of memory (1: 400 MB); their trace advises --sync asp: the fastest."),
])  # fmt: skip
def test_three_sentences_say_whether_more_workers_help_what_bounds_them_and_what_they_take(four: Trial, said: str) -> None:
    sentences = verdict([ALONE, four])
    assert len(sentences) == 3
    assert said in "\n".join(sentences)


@pytest.mark.slow
@pytest.mark.timing  # workers that others keep from a core wait for each other, and then this is what bounds them
@pytest.mark.timeout(300)
def test_a_script_that_sleeps_for_its_data_is_told_that_more_workers_help(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    outcome = commands.done("doctor", "--script", "--json", str(tmp_path / "rows"), str(tmp_path / "train.py"))
    assert "More workers help: 4 make" in outcome.stdout and "The data pipeline, files or sleeps bound" in outcome.stdout
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    assert [row["workers"] for row in rows] == [1, 2, 4]
    assert rows[2]["steps_per_s"] > 1.5 * rows[0]["steps_per_s"]
    assert all(row["memory_bytes"] > 20_000_000 and row["blocked_ms"] > 10 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_memory_of_a_script_of_few_steps_is_known(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("while True", "for _ in range(60)"))
    commands.done("doctor", "--script", "--json", str(tmp_path / "rows"), str(tmp_path / "train.py"))
    assert all(row["memory_bytes"] > 20_000_000 for row in json.loads((tmp_path / "rows").read_text())["rows"])


def test_others_that_use_the_cores_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.psutil, "cpu_percent", lambda interval: 5.0)
    assert trial.others_use() == ""
    monkeypatch.setattr(trial.psutil, "cpu_percent", lambda interval: 60.0)
    assert trial.others_use().startswith("Other programs use 60% of the cores")


@pytest.mark.slow
@pytest.mark.parametrize(("script", "said"), [
    ("print('no step of fastps')", "expected a script that makes 200 steps of fastps or more, found none: does it wrap"),
    ("raise SystemExit(3)", "expected a script that trains with -n 1, found that worker 0 ended (exit code 3)"),
])  # fmt: skip
def test_a_script_that_cannot_be_tried_is_refused(tmp_path: Path, script: str, said: str) -> None:
    (tmp_path / "train.py").write_text(script)
    outcome = commands.fastps("doctor", "--script", str(tmp_path / "train.py"))  # which says first what it tries
    assert (outcome.returncode, "Traceback" in outcome.stderr) == (2, False)
    assert said in " ".join(outcome.stderr.split()), outcome.stderr
