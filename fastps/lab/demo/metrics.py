"""Staleness of a run as a row."""

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def staleness_row(histogram: Sequence[tuple[int, int]]) -> Row:
    """Min, mean, median, max, deviation and count of a shard's staleness, as in Table 1 of Chen et al. 2017 for each layer.

    >>> staleness_row([(1, 2), (4, 2)])
    {'min': 1, 'mean': 2.5, 'median': 2.5, 'max': 4, 'deviation': 1.5, 'count': 4}
    """
    count = sum(number for _, number in histogram)
    if not count:
        return {"min": 0, "mean": 0.0, "median": 0.0, "max": 0, "deviation": 0.0, "count": 0}
    values = [float(value) for value, number in histogram for _ in range(number)]
    return {
        "min": histogram[0][0],
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "max": histogram[-1][0],
        "deviation": statistics.pstdev(values),
        "count": count,
    }
