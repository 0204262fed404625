"""Random numbers, their functions, and the models of a step's time: against published values and the standard library."""

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest

from fastps.kernels.simulation import compute_time
from fastps.kernels.simulation.compute_time import ComputeTimes, exponential, logarithm, normal_quantile, random_word, uniform

MS = 1_000_000
ONE = np.ones(1)
INVERSE = statistics.NormalDist().inv_cdf


def test_words_are_those_of_splitmix64() -> None:
    # The first outputs for seed 1234567 as published with the reference implementation (splitmix64.c, S. Vigna).
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [random_word(1234567, counter) for counter in range(5)] == published


def test_uniform_numbers_never_reach_an_end() -> None:
    found = [uniform(7, counter) for counter in range(20_000)]
    assert min(found) > 0 and max(found) < 1
    assert statistics.fmean(found) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("ours", "librarys", "rel", "at_zero", "places"), [
    (logarithm, math.log, 5e-16, 1e-16, (1e-300, 1e-9, 0.3, 0.7071, 1 - 1e-12, 1.0, 1.5, math.e, 1e9, 1e300)),
    (exponential, math.exp, 1e-15, 0.0, (-700.0, -30.5, -1.0, -1e-9, 0.0, 0.1, 1.0, 2.5, 30.0, 700.0)),
    (normal_quantile, INVERSE, 1e-13, 1e-15, (1e-15, 1e-6, 0.02, 0.075, 0.3, 0.5, 0.925, 0.999, 1 - 1e-12)),
], ids=["logarithm", "exponential", "normal quantile"])  # fmt: skip
def test_functions_agree_with_the_librarys(ours: Any, librarys: Any, rel: float, at_zero: float, places: Any) -> None:
    for place in places:
        assert ours(place) == pytest.approx(librarys(place), rel=rel, abs=at_zero), place


@pytest.mark.parametrize(("kind", "spread", "median", "mean"), [
    ("normal", 2.0 * MS, 10.0, 10.0),
    ("lognormal", 0.3, 10.0, 10.0 * math.exp(0.3**2 / 2)),
    ("pareto", 3.0, 10.0 * 2 ** (1 / 3), 15.0),
])  # fmt: skip
def test_models_have_the_median_and_mean_of_their_distributions(kind: str, spread: float, median: float, mean: float) -> None:
    times = ComputeTimes(kind, 10.0 * MS, spread, ONE, 3)
    found = [times.draw(0) / MS for _ in range(40_000)]
    assert statistics.median(found) == pytest.approx(median, rel=0.01)
    assert statistics.fmean(found) == pytest.approx(mean, rel=0.02)


def test_a_draw_depends_on_seed_worker_and_number_only() -> None:
    both = ComputeTimes("lognormal", 10.0 * MS, 0.3, np.ones(2), 5)
    alone = ComputeTimes("lognormal", 10.0 * MS, 0.3, np.ones(2), 5)
    interleaved = [both.draw(worker) for _ in range(50) for worker in (0, 1)]
    assert interleaved[1::2] == [alone.draw(1) for _ in range(50)]
    assert interleaved[0::2] != interleaved[1::2]
    other = ComputeTimes("lognormal", 10.0 * MS, 0.3, np.ones(2), 6)
    assert [other.draw(0) for _ in range(50)] != interleaved[0::2]


def test_factors_multiply_and_a_normal_time_is_never_below_one() -> None:
    times = ComputeTimes("constant", 10.0, 0.0, np.array([1.0, 3.0, 0.5]), 1)
    assert [times.draw(worker) for worker in range(3)] == [10, 30, 5]
    wild = ComputeTimes("normal", 10.0, 1000.0, ONE, 1)
    assert min(wild.draw(0) for _ in range(100)) == 1
    tail = ComputeTimes("pareto", 1e9, 0.01, ONE, 1)
    assert max(tail.draw(0) for _ in range(100)) == compute_time.LONGEST_NS


def test_replayed_times_come_in_order_and_again() -> None:
    replay = np.array([5, 6, 7, 20], np.int64), np.array([0, 3, 4], np.int64)
    times = ComputeTimes("replay", 0.0, 0.0, np.array([1.0, 2.0]), 0, replay=replay)
    assert [times.draw(0) for _ in range(5)] == [5, 6, 7, 5, 6]
    assert [times.draw(1) for _ in range(2)] == [40, 40]


def test_bursts_slow_the_share_of_time_that_they_last() -> None:
    times = ComputeTimes("constant", 1.0 * MS, 0.0, ONE, 9, bursts=(30.0 * MS, 10.0 * MS, 5.0))
    found = [times.draw(0, now_ns=step * MS) for step in range(40_000)]
    assert set(found) == {MS, 5 * MS}
    assert found.count(5 * MS) / len(found) == pytest.approx(0.25, abs=0.02)
    slow = sum(a != b for a, b in itertools.pairwise(found)) / 2
    assert slow == pytest.approx(len(found) / 40, rel=0.15), "bursts come one every 40 ms"


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (("weibull", 10.0, 1.0), {}, "expected a kind of constant, normal"),
    (("constant", 0.0, 0.0), {}, "expected a time of 1 to"),
    (("pareto", 10.0, 0.0), {}, "a Pareto shape of more than 0"),
    (("normal", 10.0, -1.0), {}, "expected a spread of 0"),
    (("normal", 10.0, math.nan), {}, "expected a spread of 0"),
    (("constant", 10.0, 0.0), {"bursts": (1.0, 1.0, 2.0)}, "at least 1 us apart"),
    (("constant", 10.0, 0.0), {"replay": (np.zeros(1, np.int64), np.array([0, 1]))}, "go with the kind 'replay'"),
    (("replay", 0.0, 0.0), {"replay": (np.zeros(1, np.int64), np.array([0, 0]))}, "at least one time to replay"),
])  # fmt: skip
def test_wrong_models_are_refused_in_one_sentence(
    arguments: tuple[str, float, float], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ComputeTimes(*arguments, ONE, 0, **options)  # type: ignore[arg-type]
