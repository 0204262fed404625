"""`fastps advise --train`: the recorded script's losses at equal virtual time stand beside the predicted speeds."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastps.errors import UsageError
from fastps.lab.virtual.learning import _fastest_of_each, _loss_at, add_losses
from tests.support import commands

REPORTS = """
import sys, time
import fastps, torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
torch.manual_seed(fastps.rank())
for _ in range(int(sys.argv[1])):
    inputs = torch.randn(16, 4)
    time.sleep(0.004 if fastps.rank() == 0 else 0.001)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.report_loss(loss.item(), 16)
    optimizer.step()
optimizer.close()
"""


def row(sync: str, recommended: bool = False) -> dict[str, Any]:
    return {"sync": sync, "recommended": recommended}


def test_the_fastest_of_each_discipline_the_recommended_and_the_recorded_one_are_run() -> None:
    rows = [row("asp"), row("ssp:4"), row("ssp:3", True), row("dssp:3,15"), row("ssp:1"), row("bsp"), row("ssp:2")]
    assert [each["sync"] for each in _fastest_of_each(rows, "ssp:2")] == ["asp", "ssp:4", "ssp:3", "dssp:3,15", "bsp", "ssp:2"]


@pytest.mark.parametrize(("points", "loss"), [
    ([(1.0, 9.0), (9.5, 3.0), (9.9, 1.0), (10.5, 0.0)], 2.0),  # the last tenth of 10 s
    ([(1.0, 9.0), (5.0, 4.0), (12.0, 0.0)], 4.0),  # nothing in it: the last before
    ([(12.0, 7.0)], 7.0),  # nothing before: the first
])  # fmt: skip
def test_the_loss_is_the_mean_of_the_last_tenth_of_equal_time(points: list[tuple[float, float]], loss: float) -> None:
    assert _loss_at({"loss_over_time": points}, 10.0) == loss
    assert _loss_at(None, 10.0) is None


@pytest.mark.parametrize(("replay", "message"), [
    (None, "expected a trace of a script"),
    ({"script": {"name": "other.py", "arguments": []}}, "the recorded script.*found 'train.py'; give --train other.py if"),
    ({"script": {"name": "train.py", "arguments": ["--delete", "a b"]}}, "'train.py'; give --train '.*--delete.*a b.*' if"),
    ({"script": {"name": "train.py", "arguments": []}}, "--train: expected a script's file, found no train.py"),
])  # fmt: skip
def test_another_script_than_the_recorded_one_is_refused(replay: dict | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        add_losses([row("bsp")], SimpleNamespace(header={"replay": replay}), "train.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_recorded_script_learns_in_virtual_time_under_the_given_disciplines(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "run.trace"
    script.write_text(REPORTS)
    commands.done("run", "-n", "2", "--sync", "bsp", "--trace", str(trace), str(script), "40")
    command = ("advise", str(trace), "--sync", "asp,adv*:1", "--train", f"{script} 40")
    rows = {each["sync"]: each for each in commands.rows(*command) if each["kind"] == "prediction"}
    assert all(0 < rows[spec]["loss"] < 5 and rows[spec]["loss_at_s"] > 0.1 for spec in ("asp", "adv*:1"))
    script.write_text(REPORTS.replace("    optimizer.report_loss(loss.item(), 16)\n", ""))
    assert "to report its losses" in commands.refused(*command)
