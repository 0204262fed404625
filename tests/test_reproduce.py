"""fastps reproduce: rows are well made, quick ones hold, and one that does not hold is said not to."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastps.errors import UsageError
from fastps.reproduce import ROWS, Effort, Row, choose, reproduce
from fastps.reproduce.expectations import Between, InOrder, Near
from fastps.reproduce.show import markdown

KEYS = ["id", "paper", "claim", "expected", "measured", "tolerance", "ok", "note"]
QUICK = [
    "dssp/table-1-speed",
    "dssp/theorem-2",
    "dssp/figure-2",
    "psp-sgd/table-1-times",
    "rudra/figure-4",
    "rudra/table-1-order",
    "r2sp/figure-7a-times",
    "r2sp/figure-8-bsp-r2sp",
    "r2sp/worst-staleness",
    "r2sp/table-2",
    "backup-workers/figure-3",
    "backup-workers/figure-6",
    "backup-workers/table-1",
]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastps.cli", "reproduce", *arguments], capture_output=True, text=True, timeout=100
    )


def test_the_five_papers_have_rows_of_their_own_ids() -> None:
    assert list(dict.fromkeys(row.paper for row in ROWS)) == ["dssp", "psp-sgd", "rudra", "r2sp", "backup-workers"]
    assert len({row.id for row in ROWS}) == len(ROWS) >= 30
    for row in ROWS:
        assert re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", row.id) and row.source and row.claim.endswith((".", ")")) and row.expect


@pytest.mark.parametrize("name", QUICK)
def test_quick_rows_hold(name: str) -> None:
    (verdict,) = reproduce(choose([name]), Effort(quick=True))
    assert verdict.ok, verdict.note


def test_a_real_gradient_row_holds() -> None:
    (verdict,) = reproduce(choose(["rudra/figure-5"]), Effort(quick=True))
    assert verdict.ok and verdict.measured["n=30, alpha_0"] > 0.85


@pytest.mark.parametrize("wrong", [Near({"bsp": 3.0}, 0.1), InOrder(("bsp", "dssp:3,15")), Between({"ssp:3": (0, 1)})])
def test_a_wrong_expectation_is_reported_as_not_ok(wrong: Any) -> None:
    row = replace(choose(["dssp/table-1-speed"])[0], expect=(wrong,))
    (verdict,) = reproduce([row], Effort(quick=True))
    assert not verdict.ok and not verdict.as_json()["ok"]
    assert verdict.note.startswith("not reproduced: ") and "No reason is known." in verdict.note


def test_a_number_that_is_missing_or_none_is_not_ok() -> None:
    row = Row(id="a/b", source="", claim="", measure=lambda effort: {}, expect=(Near({"x": 1.0}, 10.0),))
    for measured in ({}, {"x": float("nan")}):
        assert not row.judge(measured).ok
        assert not replace(row, expect=(Between({"x": (0, 1)}),)).judge(measured).ok
        assert not replace(row, expect=(InOrder(("x", "y"), slack=0.5),)).judge({**measured, "y": 1.0}).ok
    assert row.judge({"x": float("nan")}).as_json()["measured"] == {"x": None}


def test_the_reason_is_shown_only_where_a_row_does_not_hold() -> None:
    row = Row(id="a/b", source="", claim="", measure=lambda effort: {}, expect=(Near({"x": 1.0}, 0.1),), why_not="It rained.")
    assert "It rained." in row.judge({"x": 2.0}).note
    assert row.judge({"x": 1.0}).note == ""


def test_json_has_its_keys_and_the_table_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    document = tmp_path / "rows.md"
    found = command(
        "dssp/figure-2",
        "r2sp/figure-4a",
        "dssp/table-1-as-printed",
        "--quick",
        "--json",
        str(file),
        "--markdown",
        str(document),
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(file.read_text())
    assert report["command"] == "reproduce"
    rows = report["rows"]
    assert [row["id"] for row in rows] == ["dssp/table-1-as-printed", "dssp/figure-2", "r2sp/figure-4a"], "the table's order"
    for row in rows:
        assert [key for key in KEYS if key not in row] == []
    assert {row["id"]: row["ok"] for row in rows}["dssp/table-1-as-printed"] is False
    assert "reproduced 2 of 3 rows" in found.stdout
    assert document.read_text().count("| ok |\n") + document.read_text().count("| **no** |\n") == 3 + 2, "and two headings"


def test_an_unknown_id_is_refused_and_the_list_measures_nothing() -> None:
    with pytest.raises(UsageError, match="found 'dssp/none'"):
        choose(["dssp/none"])
    assert [row.paper for row in choose(["rudra"])] == ["rudra"] * len(choose(["rudra"]))
    refused = command("nobody")
    assert refused.returncode == 2 and "--list" in refused.stderr
    listed = command("--list")
    assert listed.returncode == 0 and f"{len(ROWS)} rows" in listed.stdout


def test_the_document_of_a_verdict_says_what_was_expected() -> None:
    text = markdown(reproduce(choose(["r2sp/table-2"]), Effort(quick=True)), "fastps reproduce r2sp/table-2 --quick")
    assert "g3.4x: 1264" in text and "gives 1 of 1 rows" in text and "*table-2*: Assumed:" in text
