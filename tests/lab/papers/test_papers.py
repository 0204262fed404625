"""fastps reproduce: rows are well made, quick ones hold, and one that does not hold is said not to."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastps.lab.papers import ITEMS, ROWS, Effort, Item, Outcome, Row, Verdict, choose, outcomes, reproduce
from fastps.lab.papers.expectations import Between, InOrder, Near
from fastps.lab.papers.harder import harder
from fastps.lab.papers.row import Cause
from fastps.lab.papers.runs import images
from fastps.lab.papers.show import markdown
from tests.support import commands

KEYS = ["id", "paper", "claim", "expected", "measured", "tolerance", "ok", "note"]


def row_of(*expect: Any, **more: Any) -> Row:
    return Row(**{"id": "a/b", "source": "", "items": (), "claim": "", "measure": lambda effort: {}, "expect": expect, **more})


def test_the_five_papers_have_rows_of_their_own_ids() -> None:
    assert list(dict.fromkeys(row.paper for row in ROWS)) == ["dssp", "psp-sgd", "rudra", "r2sp", "backup-workers"]
    assert len({row.id for row in ROWS}) == len(ROWS) >= 30
    for row in ROWS:
        assert re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", row.id) and row.source and row.claim.endswith((".", ")")) and row.expect
        names = [item.name for item in ITEMS[row.paper]]
        assert row.items and [name for name in row.items if name not in names] == [], row.id


def test_items_have_names_of_their_own_and_those_without_rows_say_why() -> None:
    for paper, items in ITEMS.items():
        assert len({item.name for item in items}) == len(items), paper
        for item in items:
            measured = any(item.name in row.items for row in ROWS if row.paper == paper)
            assert measured or item.left_out, f"{paper}, {item.name}: no row measures it, and nothing says why"


def test_a_known_disagreement_has_a_reason_and_the_class_of_it() -> None:
    assert [row.id for row in ROWS if bool(row.why_not) != bool(row.cause)] == []


@pytest.mark.slow
def test_the_harder_task_is_made_alike_each_time_and_tests_with_other_images() -> None:
    """Copy i is of image i modulo their number: its label says so, and it resembles that image more than one 500 further on."""
    plain, data, again = images("mnist5k"), images("harder"), harder()
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert np.array_equal(getattr(data, name), getattr(again, name))
    assert data.train_images.shape == (17_000, 1, 14, 14) and data.test_images.shape == (3_600, 1, 14, 14)
    for part in ("train", "test"):
        labels, source = getattr(data, f"{part}_labels"), getattr(plain, f"{part}_labels")
        assert np.array_equal(labels, np.resize(source, len(labels)))
    halved = plain.test_images[:, 0].reshape(1000, 14, 2, 14, 2).mean((2, 4))
    parts = halved, data.test_images[:1000, 0].astype(float), data.test_images[1000:2000, 0].astype(float)
    small, first, second = ((part - part.mean()).reshape(1000, -1) for part in parts)
    for copies in (first, second):
        assert (small * copies).sum() > 1.5 * (small * np.roll(copies, 500, 0)).sum()
    assert not np.array_equal(first, second)


@pytest.fixture(scope="module")
def quick() -> list[Verdict]:
    """What `fastps reproduce --quick` makes of the rows of virtual time alone."""
    return reproduce([row for row in ROWS if not (row.learns or row.is_live)], Effort(quick=True))


@pytest.mark.slow
def test_quick_rows_are_all_made_with_all_keys_and_numbers(quick: list[Verdict]) -> None:
    assert [verdict.row.id for verdict in quick] == [row.id for row in ROWS if not (row.learns or row.is_live)]
    for verdict in quick:
        found = json.loads(json.dumps(verdict.as_json(), allow_nan=False))
        assert [key for key in KEYS if key not in found] == []
        assert found["measured"] and None not in found["measured"].values(), verdict.row.id
        assert found["ok"] or found["note"].startswith("not reproduced: "), verdict.row.id


@pytest.mark.slow
def test_quick_rows_hold_or_have_a_reason_and_not_both(quick: list[Verdict]) -> None:
    assert {verdict.row.id: verdict.note for verdict in quick if verdict.ok == bool(verdict.row.why_not)} == {}


def assert_each_changed_expectation_fails(verdict: Verdict) -> None:
    """An expectation that holds is changed by more than its tolerance, each of its numbers by itself: the row must not hold."""
    for expectation in verdict.row.expect:
        changed = expectation.contradictions()
        assert changed, f"{verdict.row.id}: {expectation} cannot be changed"
        for other in changed:
            if expectation.misses(verdict.measured):
                continue
            judged = replace(verdict.row, expect=(other,)).judge(verdict.measured)
            assert not judged.ok, f"{verdict.row.id}: {other.expected} holds as well as {expectation.expected}"


@pytest.mark.slow
def test_each_row_fails_when_its_expectation_is_changed_by_more_than_its_tolerance(quick: list[Verdict]) -> None:
    for verdict in quick:
        assert_each_changed_expectation_fails(verdict)


def test_one_number_that_misses_makes_its_row_and_its_item_no() -> None:
    row = row_of(Near({"x": 1.0, "y": 2.0}, 0.1), InOrder(("x", "y")), Between({"x": (0, 2)}), items=("Table 1",))
    item = Item(name="Table 1", says="x and y.")
    numbers = {"x": 1.0, "y": 2.0}
    assert outcomes({"a": [item]}, [row.judge(numbers)]) == {("a", "Table 1"): Outcome.HOLDS}
    assert outcomes({"a": [replace(item, left_out="z")]}, [row.judge(numbers)]) == {("a", "Table 1"): Outcome.IN_PART}
    for name in numbers:
        judged = [row.judge(numbers), row.judge({**numbers, name: 9.0})]
        assert outcomes({"a": [item]}, judged) == {("a", "Table 1"): Outcome.NO}
    assert outcomes({"a": [item]}, []) == {("a", "Table 1"): Outcome.NOT_COVERED}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the longest row takes minutes of computing, and so many times as long on a busy machine
@pytest.mark.parametrize("name", [row.id for row in ROWS if row.learns])
def test_rows_with_real_gradients_hold_or_have_a_reason(name: str) -> None:
    (row,) = choose([name])
    (verdict,) = reproduce([row], Effort(quick=not row.full_only))
    assert verdict.ok != bool(verdict.row.why_not), verdict.note
    assert_each_changed_expectation_fails(verdict)


@pytest.mark.parametrize("wrong", [Near({"bsp": 3.0}, 0.1), InOrder(("bsp", "dssp:3,15")), Between({"ssp:3": (0, 1)})])
def test_a_wrong_expectation_is_reported_as_not_ok(wrong: Any) -> None:
    row = replace(choose(["dssp/table-1-speed"])[0], expect=(wrong,))
    (verdict,) = reproduce([row], Effort(quick=True))
    assert not verdict.ok and not verdict.as_json()["ok"]
    assert verdict.note.startswith("not reproduced: ") and "No reason is known." in verdict.note


def test_a_number_that_is_missing_or_none_is_not_ok() -> None:
    row = row_of(Near({"x": 1.0}, 10.0))
    for measured in ({}, {"x": float("nan")}):
        assert not row.judge(measured).ok
        assert not replace(row, expect=(Between({"x": (0, 1)}),)).judge(measured).ok
        assert not replace(row, expect=(InOrder(("x", "y"), slack=0.5),)).judge({**measured, "y": 1.0}).ok
    assert row.judge({"x": float("nan")}).as_json()["measured"] == {"x": None}


def test_the_reason_is_shown_only_where_a_row_does_not_hold() -> None:
    row = row_of(Near({"x": 1.0}, 0.1), why_not="It rained.")
    assert "It rained." in row.judge({"x": 2.0}).note
    assert row.judge({"x": 1.0}).note == ""


def test_json_has_its_keys_and_the_table_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    document = tmp_path / "rows.md"
    found = commands.done(
        "reproduce", "dssp/figure-2", "r2sp/figure-4a", "dssp/table-1-as-printed", "--quick", "--json", str(file), "--markdown",
        str(document),
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert report["command"] == "reproduce"
    rows = report["rows"]
    assert [row["id"] for row in rows] == ["dssp/table-1-as-printed", "dssp/figure-2", "r2sp/figure-4a"], "the table's order"
    for row in rows:
        assert [key for key in KEYS if key not in row] == []
    assert {row["id"]: row["ok"] for row in rows}["dssp/table-1-as-printed"] is False
    assert "reproduced 2 of 3 rows: " in found.stdout
    assert document.read_text().count("| ok |\n") + document.read_text().count("| **no** |\n") == 3 + 2, "and two headings"


def test_a_paper_is_all_of_its_rows_and_the_list_measures_nothing() -> None:
    assert [row.paper for row in choose(["rudra"])] == ["rudra"] * len(choose(["rudra"]))
    assert f"{len(ROWS)} rows" in commands.done("reproduce", "--list").stdout


def test_the_document_of_a_verdict_says_what_was_expected() -> None:
    text = markdown(reproduce(choose(["r2sp/table-2"]), Effort(quick=True)), "fastps reproduce r2sp/table-2 --quick")
    assert "g3.4x: 1264" in text and "gives 1 of 1 rows: 1 of 1 tables, figures and claims hold in full" in text
    assert "| table-2[^r2sp-table-2] (Table II) |" in text and "\n[^r2sp-table-2]: Assumed: " in text


def test_long_cells_of_the_document_are_footnotes_and_text_is_literal() -> None:
    measured = {f"<sigma> of adv*, {n}": 1.0 for n in range(7)}
    row = row_of(Near({"x": 1.0}, 0.1), source="Table 1", items=("Table 1",), claim="A < B.")
    text = markdown([row.judge(measured)], "fastps reproduce a/b")
    assert "| b[^a-b] (Table 1) | A &lt; B. | x: 1 | 7 figures | ±0.1 | **no** |" in text
    assert r"We get: &lt;sigma> of adv\*, 0: 1; " in text


def test_the_document_names_the_class_of_each_row_that_does_not_hold() -> None:
    held, known, unknown = (
        row_of(Near({"x": x}, 0.1), id=name, cause=cause)
        for name, x, cause in (("a/held", 1, Cause.TASK), ("a/known", 2, Cause.TASK), ("a/unknown", 2, None))
    )
    text = markdown([row.judge({"x": 1.0}) for row in (held, known, unknown)], "")
    assert f"| task (1) | {Cause.TASK.value} | a/known[^a-known] |" in text
    assert "| not known (1) | no reason is known | a/unknown[^a-unknown] |" in text


def test_a_quick_effort_skips_a_row_that_fewer_seeds_do_not_decide() -> None:
    row = replace(choose(["dssp/figure-2"])[0], full_only=True)
    (quick,), (full,) = reproduce([row], Effort(quick=True)), reproduce([row], Effort())
    assert quick.skipped and "leave --quick out" in quick.note and full.ok


def test_a_row_that_cannot_be_measured_is_skipped_and_counts_for_nothing() -> None:
    row = replace(ROWS[0], missing=lambda: "no network", measure=lambda effort: {})
    (verdict,) = reproduce([row], Effort(quick=True))
    assert verdict.skipped and verdict.note == "skipped: no network."
    assert "0 of 0 rows" in markdown([verdict], "fastps reproduce") and "could not" not in markdown([verdict], "")
    assert "| skipped |" in markdown([verdict], "fastps reproduce")


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(900)  # jobs of up to 18 processes, each of which may take the 240 s that it is given
def test_live_rows_hold() -> None:
    for row in [row for row in ROWS if row.is_live and not row.missing()]:
        verdict = row.judge(row.measure(Effort(quick=True)))
        print(verdict.as_json())
        assert verdict.ok, verdict.note
