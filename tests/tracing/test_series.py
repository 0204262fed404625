"""Series over the time of a trace."""

from dataclasses import replace

import numpy as np
import pytest

from fastps.tracing.file import STEP_DTYPE, Lines
from fastps.tracing.series import PHASES, edges_of, gaps_ns, leads, phase_shares, span_of
from fastps.tracing.summary import time_rows
from tests.report.traces import FOLD, MS, PULL, PUSH, asp, bsp


def test_shares_of_intervals_add_up_to_the_time_of_each_phase() -> None:
    trace = bsp([10, 30], 40)
    begin_ns, end_ns = span_of(trace)
    borders = np.linspace(begin_ns, end_ns, 18)
    for worker in (0, 1):
        edges = edges_of(trace.steps_of(worker))
        shares = phase_shares(edges, borders)
        assert shares.shape == (len(PHASES), 17) and (shares >= 0).all() and (shares.sum(axis=0) <= 1 + 1e-9).all()
        spent = (shares * np.diff(borders)).sum(axis=1)
        assert spent == pytest.approx(np.diff(edges, axis=1).sum(axis=0), rel=1e-6)
    assert phase_shares(edges_of(trace.steps[:0]), borders).sum() == 0


def test_a_step_that_was_cut_short_has_no_wait_and_no_pull() -> None:
    steps: Lines = np.zeros(2, STEP_DTYPE)
    steps["begin_ns"], steps["computed_ns"], steps["posted_ns"], steps["pushed_ns"] = 10, 20, 30, 40
    steps["posted_ns"][1] = 90  # under overlap: posted later, by another thread
    assert edges_of(steps).tolist() == [[10, 20, 30, 40, 40, 40], [10, 20, 40, 40, 40, 40]]


def test_gaps_are_the_times_between_versions() -> None:
    trace = asp([10], 30)
    assert len(gaps_ns(trace)) == 29
    assert np.median(gaps_ns(trace)) == pytest.approx(10 * MS + PUSH + FOLD + PULL, rel=0.1)
    assert len(gaps_ns(replace(trace, pushes=trace.pushes[:0]))) == 0


def test_leads_grow_where_nothing_bounds_them_and_a_lost_worker_counts_no_more() -> None:
    times, lead = leads(asp([10, 20], 50))
    assert len(times) == 100 and lead[0] == 1 and 20 <= lead.max() <= 27
    _, level = leads(bsp([10, 10, 10], 30, {1: 10}, unfinished=[1]))
    assert level.max() == 1, "the others do not lead one that is gone"


def test_parts_of_the_time_add_up_to_the_steps() -> None:
    trace = bsp([10, 30], 40)
    for worker, row in enumerate(time_rows(trace)):
        steps = trace.steps_of(worker)
        assert sum(row.values()) == pytest.approx((steps["end_ns"] - steps["begin_ns"]).sum() / 1e6)
        assert row["core"] == pytest.approx(row["blocked"])
    unknown = trace.steps.copy()
    unknown["queue_ns"] = -1
    assert time_rows(replace(trace, steps=unknown))[0]["queue"] is None
