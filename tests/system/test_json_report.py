"""The JSON of every command."""

import csv
import json
import sys
from pathlib import Path

import pytest

from fastps.errors import UsageError
from fastps.system.json_report import write_csv, write_json


def test_file_has_the_command_the_version_the_machine_and_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    write_json("bench lane", [{"name": "post"}], str(file))
    found = json.loads(file.read_text())
    assert set(found) == {"command", "version", "machine", "rows"}
    assert (found["command"], found["rows"]) == ("bench lane", [{"name": "post"}])


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """JSON has neither; Python's own reader would take them, others refuse the file."""
    file = tmp_path / "rows.json"
    write_json("simulate", [{"loss": float("inf"), "of_shard": (float("nan"), 1.5)}], str(file))
    assert json.loads(file.read_text(), parse_constant=pytest.fail)["rows"] == [{"loss": None, "of_shard": [None, 1.5]}]


def test_a_dash_writes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_json("bench lane", [], "-")
    assert json.loads(capsys.readouterr().out)["rows"] == []


def test_report_that_cannot_be_written_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^--json /dev/full: cannot be written: No space left on device; choose"):
        write_json("bench lane", [], "/dev/full")
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(UsageError, match="expected an open standard output, found a closed one"):
        write_json("bench lane", [], "-")


def test_rows_as_csv_have_a_column_for_each_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"sync": "dssp:3,15", "least": {"speed": 1.5}, "loss": float("nan")},
        {"sync": "asp", "steps": [[0, 1]], "ok": True},
    ]
    write_csv(rows, str(tmp_path / "rows.csv"))
    with (tmp_path / "rows.csv").open() as file:
        found = list(csv.DictReader(file))
    assert found == [
        {"sync": "dssp:3,15", "least.speed": "1.5", "loss": "", "steps": "", "ok": ""},
        {"sync": "asp", "least.speed": "", "loss": "", "steps": "[[0, 1]]", "ok": "True"},
    ]
    write_csv([{"a": 1}], "-")
    assert capsys.readouterr().out == "a\n1\n"
    with pytest.raises(UsageError, match="--csv /dev/full: cannot be written: No space left on device; choose another file"):
        write_csv(rows, "/dev/full")
