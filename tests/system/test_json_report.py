"""The JSON of every command."""

import json
import sys
from pathlib import Path

import pytest

from fastps.errors import UsageError
from fastps.system.json_report import write_json


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
