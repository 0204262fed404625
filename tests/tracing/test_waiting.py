"""Who waited for whom, on traces whose waits have a known cause."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from fastps.job.specs import parse_policy
from fastps.tracing.file import PUSH_DTYPE, STEP_DTYPE, Lines, Trace
from fastps.tracing.waiting import waiting_matrix
from tests.report.traces import FOLD, MS, asp, bsp, header

TIMES = ("begin_ns", "computed_ns", "posted_ns", "pushed_ns", "granted_ns", "end_ns")


def test_under_bsp_all_wait_for_the_slowest_and_the_rest_for_no_worker() -> None:
    trace = bsp([10, 30, 10, 20], 50)
    found = waiting_matrix(trace)
    waited = [int((steps["granted_ns"] - steps["pushed_ns"]).sum()) for steps in map(trace.steps_of, range(4))]
    assert found.sum(axis=1).tolist() == waited, "each wait counts once"
    assert (found.argmax(axis=1)[[0, 2, 3]] == 1).all()
    assert found[0, 1] == pytest.approx(50 * 20 * MS, rel=0.05)
    assert found[3, 1] == pytest.approx(50 * 10 * MS, rel=0.05)
    assert found[1, :4].sum() == 0 and found[1, 4] == 50 * FOLD // 2, "the slowest waits for the fold alone"
    assert (np.diag(found[:, :4]) == 0).all()


def test_under_asp_no_worker_waits() -> None:
    assert waiting_matrix(asp([5, 15], 20)).sum() == 0


def test_one_worker_waits_for_no_worker() -> None:
    found = waiting_matrix(bsp([5], 20))
    assert found.shape == (1, 2) and found[0, 0] == 0 and found[0, 1] > 0


def _bounded() -> Trace:
    """Two workers under ssp:1: worker 0 has pushed at 10 and 20 ms and waits for worker 1, which pushes at 50 ms first.

    Worker 2 is as fast as worker 0, and posts within its wait.
    """
    times = {
        0: [(0, 10, 10, 11, 11, 12), (12, 20, 20, 21, 53, 54)],
        1: [(0, 50, 50, 51, 51, 52), (52, 100, 100, 101, 101, 102)],
        2: [(0, 11, 11, 12, 12, 13), (13, 52, 52, 53, 53, 54)],
    }
    steps: Lines = np.zeros(6, STEP_DTYPE)
    for place, (worker, number) in enumerate((worker, number) for worker in times for number in range(2)):
        for name, value in zip(TIMES, times[worker][number], strict=True):
            steps[name][place] = 1000 * MS + MS * value
        steps["worker"][place], steps["step"][place], steps["written"][place] = worker, number, 1
    return Trace(header("ssp:1", 3), steps, np.zeros(0, PUSH_DTYPE))


def test_under_a_bound_a_worker_waits_for_the_one_that_is_behind_and_not_for_the_last_that_posts() -> None:
    found = waiting_matrix(_bounded())
    assert found[0, 1] == (50 - 21) * MS
    assert found[0, 3] == (53 - 50) * MS
    assert found[0, 2] == 0, "it posts later, and no grant depends on it"


def test_elsewhere_a_worker_waits_for_the_last_that_posts_before_the_grant() -> None:
    trace = _bounded()
    found = waiting_matrix(replace(trace, header={**trace.header, "policy": asdict(parse_policy("r2sp:1"))}))
    assert found[0, 2] == (52 - 21) * MS


def test_a_wait_for_a_worker_that_never_posts_again_counts_for_it() -> None:
    trace = _bounded()
    left = trace.steps[(trace.steps["worker"] != 1) | (trace.steps["step"] == 1)].copy()
    mine = left["worker"] == 1
    left["step"][mine] = 0
    for name in TIMES:
        left[name][mine] += 1000 * MS
    found = waiting_matrix(replace(trace, steps=left))
    assert found[0, 1] == (53 - 21) * MS, "worker 1 posted only after the grant"
