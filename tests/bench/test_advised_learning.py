"""The check of advice against learning: its gradients are torch's, its updates the simulation's, and its table counts."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastps.bench import advised_learning as bench

SETTING = bench.Setting("digits", 4, "equal", 0.9)


@pytest.mark.slow
def test_the_gradient_is_torchs() -> None:
    task = bench.perceptron("digits")
    weights = task.first_weights(3)
    chosen = np.arange(20)
    first, first_bias, second, second_bias = (torch.tensor(part, requires_grad=True) for part in task._parts(weights))
    hidden = torch.relu(torch.tensor(task.x[chosen]) @ first + first_bias)
    scores = hidden @ second + second_bias
    torch.nn.functional.cross_entropy(scores, torch.tensor(task.y[chosen])).backward()
    expected = torch.cat([part.grad.reshape(-1) for part in (first, first_bias, second, second_bias)])
    np.testing.assert_allclose(task.gradient(weights, chosen), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("scheme", ["bsp", "backup:1", "asp", "softsync:2", "r2sp:0.8,tune=true"])
def test_each_push_is_in_one_update_with_the_version_that_its_worker_read(scheme: str) -> None:
    updates = list(bench.updates_of(scheme, SETTING, 1))
    seen = set()
    for version, (_, pushes) in enumerate(updates):
        for worker, step, read, samples in pushes:
            assert read <= version and samples >= 1
            assert (worker, step) not in seen
            seen.add((worker, step))
    assert len(seen) >= 0.6 * bench.BUDGET[4]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bsp", "asp,momentum=worker"])
def test_the_best_rate_is_better_than_its_neighbours(scheme: str) -> None:
    seconds, rate = bench.best_time(scheme, SETTING, [1], bench.first_rate(scheme, SETTING))
    assert 0 < seconds < 30
    for other in (rate / bench.FACTOR, rate * bench.FACTOR):
        assert bench.mean_time(scheme, SETTING, other, [1]) >= seconds


def test_too_large_a_rate_never_gets_there() -> None:
    assert math.isinf(bench.seconds_to_target("asp", SETTING, 10.0, 1, math.inf))


def test_the_table_says_how_far_advice_is_from_the_best() -> None:
    times = {"bsp": 10.0, "backup:1": 5.0, "asp": 5.4}
    row = {"task": "digits", "workers": 4, "kind": "equal", "momentum": 0.9, "times": times, "advised": "asp", "auto": "bsp"}
    rows = [{**row, "auto_untuned_s": 10.0}, {**row, "advised": "bsp", "auto_untuned_s": 10.0}]
    text = bench.table(rows)
    assert "| `backup:1` | 0.50 | `asp` | 1.08 | 0.54 | `bsp` | 1.00 |" in text
    assert text.endswith("Within 10 % of the best in 1 of 2 settings, more than 5 % behind bsp in 0.")


def test_the_command_goes_on_from_the_rows_that_are_there(tmp_path: Path) -> None:
    times = {"bsp": 10.0}
    row = {"task": "digits", "workers": 4, "kind": "equal", "momentum": 0.9, "times": times, "advised": "bsp", "auto": "bsp"}
    (tmp_path / "rows.json").write_text(json.dumps([{**row, "auto_untuned_s": 10.0}]))
    command = [sys.executable, "-m", "fastps.bench.advised_learning", "--json", str(tmp_path / "rows.json"), "--most", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "Within 10 % of the best in 1 of 1 settings" in shown.stdout


def test_another_scheme_is_measured_at_bsps_rate_and_advice_knows_of_it() -> None:
    row = {"task": "digits", "workers": 4, "kind": "half slow", "momentum": 0.0, "times": {"bsp": 30.0, "asp": 15.0}}
    lines = bench.beside_bsp("bsp,tune=true", [{**row, "rates": {"bsp": 0.4}}], [1]).splitlines()
    _, *cells, _ = (cell.strip() for cell in lines[2].split("|"))
    assert cells[:4] == ["digits", "4", "half slow", "0.0"] and cells[5:7] == ["0.50", "`bsp,tune=true`"]
    assert 0 < float(cells[4]) < 1 and float(cells[7]) == pytest.approx(max(1.0, float(cells[4]) / 0.5), abs=0.02)
    assert lines[-1].endswith("of 1 settings.")
