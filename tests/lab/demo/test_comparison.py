"""The page of a comparison: rows as `fastps compare` makes them."""

import json
from typing import Any

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


ROWS = [_row("bsp", 10, 0.95), _row("asp", 20, 0.90, staleness_mean=3.0, staleness_max=9, wait_share=0.0)]


def test_the_fastest_and_the_most_accurate_are_said_in_sentences() -> None:
    found = [each.title for each in page_of(ROWS, "mnist5k").findings]
    assert found == [
        "asp was the fastest: 2.00 times as many samples a second as bsp.",
        "bsp was the most accurate: 95.0%. asp has 90.0%.",
        "Workers waited most under bsp: 40% of their time.",
        "Gradients were the stalest under asp: 3.00 versions in the mean.",
    ]


def test_a_single_run_and_equal_accuracies_have_sentences_too() -> None:
    assert [each.title for each in page_of(ROWS[:1], "").findings][:2] == [
        "bsp was the fastest, at 160 samples/s.",
        "The fastest was also as accurate as any: 95.0%.",
    ]


def test_every_run_has_a_line_a_bar_and_a_row() -> None:
    page = page_of([*ROWS, _row("auto", 15, 0.93, chosen="ssp:3")], "mnist5k")
    names = ["bsp", "asp", "auto, then ssp:3"]
    accuracy = page.figures[0]
    assert [line["name"] for line in accuracy.spec["data"]] == names
    assert accuracy.spec["data"][0]["y"] == [47.5, 95.0]
    assert len({(line["line"]["color"], line["line"]["dash"]) for line in accuracy.spec["data"]}) == 3
    assert [figure.name for figure in page.figures] == ["accuracy", "speed", "waits", "staleness", "gaps"]
    assert all(figure.spec["data"][0]["y"] == names for figure in page.figures[1:])
    assert page.tables[0].table is not None and [row[0] for row in page.tables[0].table.rows] == names
    json.dumps([figure.spec for figure in page.figures], allow_nan=False)
