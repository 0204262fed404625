"""The page of a comparison: rows as `fastps compare` makes them."""

import json
from typing import Any

from fastps.lab.demo import repeats
from fastps.lab.demo.comparison import page_of


def _row(sync: str, speed: float, accuracy: float, **more: Any) -> dict[str, Any]:
    row = {"sync": sync, "chosen": sync, "workers": 4, "seconds": 100 / speed, "steps": 100, "steps_per_s": speed}
    row |= {"samples_per_s": 16 * speed, "test_accuracy": accuracy, "staleness_mean": 0.0, "staleness_max": 0}
    row |= {
        "wait_share": 0.4,
        "dropped": 0,
        "zero_gap_share": 0.1,
        "accuracy_over_time": [(50 / speed, accuracy / 2), (100 / speed, accuracy)],
    }
    return {**row, **more}


def _rows(*speeds: float, seeds: int = 1) -> list[dict[str, Any]]:
    """Rows of bsp and asp; `speeds` are those of asp in its rounds, whose bsp makes 10 steps a second."""
    found = iter(speeds)
    makes = {
        "bsp": lambda: _row("bsp", 10, 0.95),
        "asp": lambda: _row("asp", next(found), 0.90, staleness_mean=3.0, staleness_max=9, wait_share=0.0),
    }
    return repeats.in_rounds(list(makes), range(seeds), len(speeds) // seeds, lambda name, seed: makes[name]())


ROWS = _rows(20)


def test_one_run_is_said_to_be_one_run() -> None:
    found = [each.title for each in page_of(ROWS, "mnist5k").findings]
    assert found == [
        "In this one run asp was the fastest, 2.00 times as fast as bsp; --runs 5 tells whether it is.",
        "bsp was the most accurate: 95.0%. asp has 90.0%.",
        "Workers waited most under bsp: 40% of their time.",
        "Gradients were the stalest under asp: 3.00 versions in the mean.",
    ]


def test_a_verdict_needs_runs_that_do_not_overlap() -> None:
    (fastest, *_), levels = page_of(_rows(20, 16, 25), "").findings, {"good", "note"}
    assert fastest.title == "asp was the fastest in all 3 runs: 2.00 (1.60 to 2.50) times as fast as bsp."
    (unclear, *_) = page_of(_rows(20, 9, 25), "").findings
    assert unclear.title == "The runs do not tell which is the fastest: those of asp and bsp overlap."
    assert (fastest.level, unclear.level) == ("good", "note") and {fastest.level, unclear.level} == levels


def test_repeated_runs_are_drawn_with_their_least_and_most() -> None:
    page = page_of(_rows(20, 16, 25, 18, seeds=2), "")
    bars = next(figure for figure in page.figures if figure.name == "speed").spec["data"][0]
    assert bars["x"] == [160, 304] and bars["error_x"]["arrayminus"] == [0, 48] and bars["error_x"]["array"] == [0, 96]
    assert page.figures[0].spec["data"][1]["error_y"]["array"] == [0, 0]
    assert page.tables[0].table is not None
    assert page.tables[0].table.rows[1][4:6] == ["1.90 (1.60 to 2.50)", "90.0%"]


def test_rows_of_a_script_have_no_accuracy_and_their_last_line() -> None:
    rows = [{name: value for name, value in row.items() if name not in ("test_accuracy", "accuracy_over_time")} for row in ROWS]
    page = page_of([{**row, "last_line": "loss 0.5"} for row in rows], "train.py")
    assert [figure.name for figure in page.figures] == ["speed", "waits", "staleness"]
    assert page.facts[0].more == "loss 0.5" and page.findings[0].title.startswith("In this one run asp")


def test_a_single_run_and_equal_accuracies_have_sentences_too() -> None:
    assert [each.title for each in page_of(ROWS[:1], "").findings][:2] == [
        "bsp made 10 steps/s.",
        "No accuracy is clearly better than that of bsp: 95.0%.",
    ]


def test_every_run_has_a_line_a_bar_and_a_row() -> None:
    page = page_of([*ROWS, {**_row("auto", 15, 0.93, chosen="ssp:3"), "speed": 1.5}], "mnist5k")
    names = ["bsp", "asp", "auto, then ssp:3"]
    accuracy = page.figures[0]
    assert [line["name"] for line in accuracy.spec["data"]] == names
    assert accuracy.spec["data"][0]["y"] == [47.5, 95.0]
    assert len({(line["line"]["color"], line["line"]["dash"]) for line in accuracy.spec["data"]}) == 3
    assert [figure.name for figure in page.figures] == ["accuracy", "speed", "waits", "staleness", "gaps"]
    assert all(figure.spec["data"][0]["y"] == names for figure in page.figures[1:])
    assert page.tables[0].table is not None and [row[0] for row in page.tables[0].table.rows] == names
    json.dumps([figure.spec for figure in page.figures], allow_nan=False)
