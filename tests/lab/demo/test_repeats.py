"""Repeated runs: taken by turns, ratios within a round, medians with the least and the most."""

from typing import Any

import pytest

from fastps.lab.demo import repeats


def test_disciplines_take_turns_and_ratios_are_of_one_round() -> None:
    calls: list[tuple[str, int]] = []

    def run(name: str, seed: int) -> dict[str, Any]:
        calls.append((name, seed))
        machine = len(calls)  # which slows down all the time
        return {"sync": name, "steps_per_s": (2.0 if name == "asp" else 1.0) / machine, "seconds": float(machine)}

    rows = repeats.in_rounds(["bsp", "asp"], [3, 4], 2, run)
    assert calls == [(name, seed) for _ in range(2) for seed in (3, 4) for name in ("bsp", "asp")]
    assert [row["speed"] for row in rows] == [1.0, pytest.approx((2 * 3 / 4 + 2 * 5 / 6) / 2)]
    assert rows[1]["least"]["speed"] == 1.0 and rows[1]["most"]["speed"] == pytest.approx(2 * 7 / 8)
    assert rows[0]["seeds"] == [3, 4] and [each["seed"] for each in rows[0]["each"]] == [3, 4, 3, 4]
    assert (rows[0]["seconds"], rows[0]["runs"]) == (4.0, 4)


def test_accuracies_over_time_are_medians_with_a_range_for_each_pass() -> None:
    runs = [{"seed": 0, "accuracy_over_time": [[number, 0.1 * number], [2.0 * number, 0.5]]} for number in (1, 2, 4)]
    row = repeats.summarized(runs)
    assert row["accuracy_over_time"] == [[2, 0.2], [4.0, 0.5]]
    assert row["accuracy_range"] == [[0.1, 0.4], [0.5, 0.5]]


def test_the_most_is_clear_only_where_no_other_run_reaches_it() -> None:
    def row(name: str, *speeds: float) -> dict[str, Any]:
        return repeats.summarized([{"sync": name, "speed": speed, "seed": 0} for speed in speeds])

    slow, fast, wide = row("a", 1.0, 1.1), row("b", 2.0, 2.2), row("c", 1.5, 2.05)
    assert repeats.clearly_most([slow, fast], "speed") == (fast, [])
    assert repeats.clearly_most([slow, fast, wide], "speed") == (fast, [wide])
    assert repeats.verdict([slow, fast, wide]) == "The runs do not tell which is the fastest: those of b and c overlap."
