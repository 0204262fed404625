"""The straggler report: its arithmetic on hand-made histograms, the paper's own shape, and a whole small run."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.lab import stragglers
from fastps.lab.plots import shown_of
from fastps.lab.stragglers import Arrival, arrivals, cdf, interpolated, mean_s, power_law, quantile_s, splits, width_ns
from tests.support import commands, processes

MEASURED = [(50, 137.5e3), (100, 76.2e3)]  # Figure 5's two numbers in the text


def _least(time_ns: int) -> int:
    """The least time of the bucket, eight an octave."""
    shift = max(0, time_ns.bit_length() - 4)
    return time_ns >> shift << shift


def _histogram(times_s: Sequence[float]) -> list[tuple[int, int]]:
    return sorted(Counter(_least(int(time * 1e9)) for time in times_s).items())


def _around(mean: float, versions: int = 200) -> list[tuple[int, int]]:
    """Times of that mean, spread by a tenth."""
    return _histogram(np.linspace(0.9 * mean, 1.1 * mean, versions).tolist())


def _paper_means() -> list[float]:
    """Figure 4 in words: most between 1.4 s and 1.8 s, the last few growing exponentially."""
    return [1.4 + 0.4 * k / 96 for k in range(1, 97)] + [1.8 * 1.25**extra for extra in (1, 2, 3, 4)]


# -- histograms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_ns", [0, 1, 7, 8, 15, 16, 17, 31, 32, 1000, 123_456_789, 310_000_000_000])
def test_a_time_lies_in_its_bucket(time_ns: int) -> None:
    least = _least(time_ns)
    assert least <= time_ns < least + width_ns(least)
    assert width_ns(least) == 1 or 8 * width_ns(least) <= least


def test_means_and_quantiles_are_off_by_no_more_than_a_bucket() -> None:
    times = np.random.default_rng(5).lognormal(-5, 0.7, 5000)
    histogram = _histogram(times.tolist())
    assert mean_s(histogram) == pytest.approx(times.mean(), rel=1 / 16)
    for share in (0.0, 0.2, 0.5, 0.8, 0.95, 0.99, 1.0):
        assert quantile_s(histogram, share) == pytest.approx(np.quantile(times, share), rel=1 / 8)


def test_an_empty_histogram_has_no_times() -> None:
    assert (mean_s([]), quantile_s([], 0.5), cdf([])) == (0.0, 0.0, [])


def test_a_cdf_rises_to_one_and_leaves_out_empty_buckets() -> None:
    points = cdf([(8, 1), (9, 0), (16, 3)])
    assert points == [(9e-9, 0.25), (18e-9, 1.0)]


def test_arrivals_number_from_one_and_leave_out_what_never_came() -> None:
    rows = arrivals([[(1000, 4)], [(2000, 4)], []])
    assert [(row.k, row.count) for row in rows] == [(1, 4), (2, 4)]
    row = rows[1]
    assert 2e-6 <= row.median_s <= row.p80_s <= row.p95_s <= row.p99_s <= 2.25e-6


def test_no_arrivals_are_an_error() -> None:
    with pytest.raises(fastps.UsageError, match="expected the arrivals of a synchronous run, found none"):
        arrivals([[], []])


# -- iterations ------------------------------------------------------------------------------------


def test_the_exponent_is_the_papers() -> None:
    (fewer, more_iterations), (more, fewer_iterations) = MEASURED
    exponent = math.log(more_iterations / fewer_iterations) / math.log(more / fewer)
    assert abs(stragglers.PAPER_EXPONENT - exponent) < 0.005
    assert power_law(100)(50) == pytest.approx(more_iterations / fewer_iterations, rel=0.005)
    assert power_law(7)(7) == 1


def test_measured_iterations_lie_on_straight_lines() -> None:
    law = interpolated([(4, 10.0), (1, 40.0), (2, 20.0)])
    assert [law(waited_for) for waited_for in range(6)] == [None, 40.0, 20.0, 15.0, 10.0, None]
    assert interpolated([(3, 7.0)])(3) == 7.0


@pytest.mark.parametrize("points", [[], [(2, 5.0), (2, 6.0)], [(0, 5.0)], [(2, 0.0)], [(2, math.nan)], [(2, math.inf)]])
def test_impossible_measurements_are_an_error(points: list[tuple[int, float]]) -> None:
    with pytest.raises(fastps.UsageError):
        interpolated(points)


# -- splits ----------------------------------------------------------------------------------------


def test_equal_workers_need_no_backups() -> None:
    rows = arrivals([_around(1.0)] * 8)
    assert [(split.waited_for, split.backups) for split in splits(rows, power_law(8))] == [(8 - b, b) for b in range(8)]


def test_of_equal_times_the_one_with_fewer_backups_is_first() -> None:
    rows = arrivals([_around(1.0)] * 3)
    assert [split.backups for split in splits(rows, power_law(3, exponent=0.0))] == [0, 1, 2]


@pytest.mark.parametrize("law", [power_law(100), interpolated(MEASURED)])
def test_the_papers_shape_gives_the_papers_split(law: stragglers.Iterations) -> None:
    """Figure 6: with 100 workers N = 96, b = 4 is best."""
    rows = arrivals([_histogram([mean]) for mean in _paper_means()])
    exact = [Arrival(row.k, 1, mean, mean, mean, mean, mean, []) for row, mean in zip(rows, _paper_means(), strict=True)]
    best, *others = splits(exact, law)
    assert (best.waited_for, best.backups) == (96, 4)
    assert best.time == pytest.approx(best.iteration_s * best.iterations)
    assert all(best.time < other.time for other in others)
    # Buckets are coarse, so that the best may be off by a few, yet not by much in time.
    found = splits([*arrivals([_around(mean) for mean in _paper_means()])], law)[0]
    assert 92 <= found.waited_for <= 96


def test_the_last_gradients_of_the_papers_figure_3() -> None:
    """80 % of the 98th gradients come in under 2 s, and 30 % of the last do; the greatest time is 310 s."""
    almost, last = (_histogram([1.5] * early + [3.0] * (99 - early) + [310.0]) for early in (80, 30))
    rows = arrivals([almost, last])
    for row, share in zip(rows, (0.8, 0.3), strict=True):
        assert max(part for seconds, part in row.cdf if seconds < 2) == pytest.approx(share)
        assert row.cdf[-1][0] == pytest.approx(310, rel=1 / 8)
    assert rows[0].p80_s < 2 < rows[1].median_s


def test_splits_without_known_iterations_are_left_out() -> None:
    rows = arrivals([_around(1.0)] * 4)
    assert {split.waited_for for split in splits(rows, interpolated([(2, 90.0), (4, 50.0)]))} == {2, 3, 4}
    assert splits(rows, interpolated([(9, 1.0)])) == []


def test_a_picture_shows_few_of_many_and_always_the_last() -> None:
    assert shown_of(list(range(1, 6))) == [1, 2, 3, 4, 5]
    assert shown_of(list(range(1, 101))) == [1, 51, 91, 97, 98, 99, 100]


# -- whole runs ------------------------------------------------------------------------------------


def test_a_store_counts_what_the_arithmetic_expects() -> None:
    workers, steps = 3, 20

    def work(store: fastps.Store, rank: int) -> None:
        with store.attach(rank) as worker:
            for _ in range(steps):
                worker.step({"w": np.ones(8)})

    with fastps.Store.create({"w": np.ones(8, np.float32)}, fastps.SGD(lr=0.1), workers=workers) as store:
        processes.results(processes.start_each(lambda rank: work(store, rank), workers), 30)
        found = store.arena.histograms(0)["arrivals_ns"]
    assert all(_least(least) == least for histogram in found for least, _ in histogram)
    rows = arrivals(found)
    assert [(row.k, row.count) for row in rows] == [(k, steps - 1) for k in (1, 2, 3)]  # the first version has no beginning
    assert rows[0].mean_s <= rows[1].mean_s <= rows[2].mean_s


@pytest.mark.slow
def test_the_command_prints_tables_draws_and_writes_rows(tmp_path: Path) -> None:
    picture = tmp_path / "arrivals.png"
    command = ["stragglers", "--data", "digits", "--workers", "2", "--epochs", "1"]
    command += ["--straggler", "0:2", "--iterations", "1:900,2:500", "--plot", str(picture), "--json", "-"]
    outcome = commands.done(*command)
    assert "estimated to converge first: wait for" in outcome.stderr
    assert picture.stat().st_size > 1000
    document = json.loads(outcome.stdout)
    assert document["command"] == "stragglers"
    rows = document["rows"]
    assert [row["kind"] for row in rows] == ["run", "arrival", "arrival", "split", "split"]
    assert {"sync", "workers", "seconds", "test_accuracy", "wait_share", "dropped"} <= set(rows[0])
    assert rows[0]["push_dtype"] == "float32"
    assert [row["k"] for row in rows[1:3]] == [1, 2]
    assert rows[1]["cdf"][-1][1] == 1
    assert {row["iterations"] for row in rows[3:]} == {900, 500}
    assert [row["rank"] for row in rows[3:]] == [1, 2]
    assert rows[3]["time"] <= rows[4]["time"]
