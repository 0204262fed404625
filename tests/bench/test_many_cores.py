"""What many cores show within some minutes: the order of the runs, what the minutes leave out, and a run that is real."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastps.bench import many_cores


def test_runs_follow_one_another_until_the_minutes_are_over_and_the_rest_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s, limits = [0.0], []

    def measure(run: Sequence[str], repeats: int, limit_s: float) -> list[dict[str, Any]]:
        limits.append(limit_s)
        now_s[0] += 50
        return [{"bench": run[0], "name": "fastps"}]

    monkeypatch.setattr(many_cores.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(many_cores.within, "__defaults__", (measure,))
    file = tmp_path / "rows.json"
    assert many_cores.main(["--minutes", "1", "--workers", "2,4", "--json", str(file)]) == 0
    assert limits == [60.0]
    rows = json.loads(file.read_text())["rows"]
    assert [row["bench"] for row in rows] == ["step", "step", "train", *["step"] * 4, "readers"]
    assert rows[1]["missing"] == "10 s were left, expected at least 15 s: raise --minutes"
    assert capsys.readouterr().out.splitlines()[0].endswith("--parameters 1e6 --workers 2 --repeats 3: 1 rows")


@pytest.mark.slow
def test_a_run_that_fails_or_takes_too_long_is_a_row_with_its_reason() -> None:
    [row] = many_cores.measure(("step", "--against", "nobody"), 1, 60)
    assert "nobody" in row["missing"]
    [row] = many_cores.measure(("step",), 1, 0.01)
    assert row["missing"] == "it did not end within 0 s"


@pytest.mark.slow
def test_a_real_run_has_its_sides() -> None:
    rows = many_cores.measure((*many_cores.STEP, "--parameters", "25e3", "--workers", "2", "--smoke"), 1, 120)
    assert {row["name"] for row in rows} >= {"fastps", "limit", "gloo", "hogwild"}
