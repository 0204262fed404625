"""Metrics of a run, against values computed by hand."""

from fastps.lab.demo.metrics import staleness_row
from fastps.simulation.simulate import zero_gap_share


def test_staleness_of_no_push_is_a_row_of_zeros() -> None:
    assert set(staleness_row([]).values()) == {0}


def test_staleness_counts_each_push() -> None:
    row = staleness_row([(0, 3), (2, 1)])
    assert (row["min"], row["mean"], row["max"], row["count"]) == (0, 0.5, 2, 4)


def test_gaps_under_a_hundredth_of_an_iteration_are_zero_gaps() -> None:
    shards = [{"gaps_ns": [(0, 3), (9_999_999, 1)]}, {"gaps_ns": [(10_000_000, 4)]}]
    assert zero_gap_share(shards, iteration_s=1.0) == 0.5
