"""Runs that were repeated: what they measured, as a median with the least and the most, and what may be said of it.

The disciplines take turns: a round is one run of each, and a ratio is taken within its round, because the speed of a machine
that others use moves from minute to minute.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from fastps.errors import UsageError

Row = dict[str, Any]
MEASURED = (
    *("seconds", "steps", "steps_per_s", "samples_per_s", "speed", "test_accuracy", "staleness_mean", "wait_share", "dropped"),
    *("sigma_mean", "zero_gap_share", "wall_seconds"),
)
"""What differs from run to run, of what a row of `fastps compare` has."""


def seeds_of(text: str) -> list[int]:
    """The seeds of a text such as 0,1,2. Raises UsageError.

    >>> seeds_of("0,1,2")
    [0, 1, 2]
    """
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UsageError(f"--seed: expected whole numbers separated by commas, found {text!r}") from None


def in_rounds(names: Sequence[Any], seeds: Sequence[int], runs: int, run: Callable[[Any, int], Row]) -> list[Row]:
    """Call `run` with each name and seed, `runs` times each, by turns; a row for each name, with the medians of its runs."""
    rounds = [[{**run(name, seed), "seed": seed} for name in names] for _ in range(runs) for seed in seeds]
    for each in rounds:
        key = "samples_per_s" if all(row.get("samples_per_s") for row in each) else "steps_per_s"
        for row in each:
            row["speed"] = row[key] / each[0][key] if each[0][key] else 0.0
    return [summarized([each[number] for each in rounds]) for number in range(len(names))]


def summarized(runs: Sequence[Row]) -> Row:
    """One row for repeated runs: medians, `least` and `most` of each figure, and `each` run's own; a single run stays as it is.

    >>> row = summarized([{"sync": "asp", "seconds": seconds, "seed": 0} for seconds in (3.0, 1.0, 2.0)])
    >>> row["seconds"], row["least"]["seconds"], row["most"]["seconds"], row["runs"]
    (2.0, 1.0, 3.0, 3)
    """
    if len(runs) == 1:
        return {**runs[0], "runs": 1}
    found = {name: [run[name] for run in runs] for name in MEASURED if name in runs[0]}
    made = {**runs[0], **{name: _median(values) for name, values in found.items()}, "runs": len(runs)}
    made["least"] = {name: min(values) for name, values in found.items()}
    made["most"] = {name: max(values) for name, values in found.items()}
    made["each"] = [{name: run[name] for name in ("seed", *found)} for run in runs]
    made["seeds"] = sorted({run["seed"] for run in runs})
    if "staleness_max" in made:
        made["staleness_max"] = max(run["staleness_max"] for run in runs)
    if "accuracy_over_time" in made:
        passes = list(zip(*(run["accuracy_over_time"] for run in runs), strict=False))  # a run that lost a worker has fewer
        made["accuracy_over_time"] = [[median(each) for each in zip(*points, strict=True)] for points in passes]
        made["accuracy_range"] = [
            [min(accuracies), max(accuracies)] for accuracies in (tuple(p[1] for p in each) for each in passes)
        ]
    return made


def _median(values: Sequence[Any]) -> Any:
    """The median; a whole number of whole numbers, where it is one."""
    found = median(values)
    return int(found) if all(isinstance(each, int) for each in values) and found == int(found) else found


def text_of(row: Mapping[str, Any], name: str, form: str) -> str:
    """A figure as text; of repeated runs with the least and the most.

    >>> text_of({"speed": 1.82, "least": {"speed": 1.66}, "most": {"speed": 1.95}}, "speed", ".2f")
    '1.82 (1.66 to 1.95)'
    """
    shown = f"{row[name]:{form}}"
    if "least" not in row:
        return shown
    least, most = f"{row['least'][name]:{form}}", f"{row['most'][name]:{form}}"
    return shown if least == most else f"{shown} ({least} to {most})"


def clearly_most(rows: Sequence[Row], name: str) -> tuple[Row, list[Row]]:
    """The row with the most of a figure, and the others whose runs reach into its own: none if it is clearly the most.

    Of single runs nothing is clear.
    """
    best = max(rows, key=lambda row: float(row[name]))
    if "least" not in best:
        return best, [row for row in rows if row is not best]
    return best, [row for row in rows if row is not best and row["most"][name] >= best["least"][name]]


def verdict(rows: Sequence[Row], name_of: Callable[[Row], str] = lambda row: str(row["sync"])) -> str:
    """A sentence on which discipline was the fastest, if the runs tell.

    >>> rows = [{"sync": name, "speed": speed} for name, speed in (("bsp", 1.0), ("asp", 2.0))]
    >>> verdict(rows)
    'In this one run asp was the fastest, 2.00 times as fast as bsp; --runs 5 tells whether it is.'
    >>> verdict([summarized([{**row, "seed": 0}, {**row, "seed": 0}]) for row in rows])
    'asp was the fastest in all 2 runs: 2.00 times as fast as bsp.'
    """
    best, others = clearly_most(rows, "speed")
    runs, name = best.get("runs", 1), name_of(best)
    if len(rows) == 1:
        return ""
    times = "" if best is rows[0] else f"{text_of(best, 'speed', '.2f')} times as fast as {name_of(rows[0])}"
    if runs == 1:
        return f"In this one run {name} was the fastest{times and ', '}{times}; --runs 5 tells whether it is."
    if others:
        both = " and ".join(filter(None, [", ".join(name_of(row) for row in [best, *others][:-1]), name_of(others[-1])]))
        return f"The runs do not tell which is the fastest: those of {both} overlap."
    return f"{name} was the fastest in all {runs} runs{times and ': '}{times}."
