"""The JSON of every command."""

import json
from pathlib import Path

import pytest

from fastps.system.json_report import write_json


def test_file_has_the_command_the_version_the_machine_and_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    write_json("bench lane", [{"name": "post"}], str(file))
    found = json.loads(file.read_text())
    assert set(found) == {"command", "version", "machine", "rows"}
    assert (found["command"], found["rows"]) == ("bench lane", [{"name": "post"}])


def test_a_dash_writes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_json("bench lane", [], "-")
    assert json.loads(capsys.readouterr().out)["rows"] == []
