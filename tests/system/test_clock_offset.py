"""Offsets between clocks: the true offset is within the stated error, whatever the ways take and however the clocks drift."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.system.clock_offset import DRIFT, Offset, OffsetEstimator, offsets_at, sample

offsets = st.integers(-(10**17), 10**17)
drifts = st.integers(-int(1e6 * DRIFT), int(1e6 * DRIFT))  # ppm
ways = st.integers(0, 3_000_000_000)
words = st.integers(-(2**63), 2**63 - 1)


class TwoClocks:
    """Clocks that differ by an offset and a drift of so many ppm."""

    def __init__(self, offset_ns: int, drift_ppm: int) -> None:
        self._offset_ns, self._drift_ppm = offset_ns, drift_ppm

    def offset(self, now_ns: int) -> int:
        return self._offset_ns + self._drift_ppm * now_ns // 1_000_000

    def other(self, now_ns: int) -> int:
        return now_ns + self.offset(now_ns)

    def exchange(self, sent_ns: int, there_ns: int, held_ns: int, back_ns: int) -> tuple[int, int, int, int]:
        heard_ns = sent_ns + there_ns
        answered_ns = heard_ns + held_ns
        return sent_ns, self.other(heard_ns), self.other(answered_ns), answered_ns + back_ns


@given(offset_ns=offsets, drift_ppm=drifts, sent_ns=st.integers(0, 10**15), there_ns=ways, held_ns=ways, back_ns=ways)
def test_the_offset_is_within_the_error_however_unequal_the_ways_are(
    offset_ns: int, drift_ppm: int, sent_ns: int, there_ns: int, held_ns: int, back_ns: int
) -> None:
    clocks = TwoClocks(offset_ns, drift_ppm)
    found = sample(*clocks.exchange(sent_ns, there_ns, held_ns, back_ns))
    assert found is not None
    assert abs(found.offset_ns - clocks.offset(found.at_ns)) <= found.error_ns
    assert abs(found.round_trip_ns - there_ns - back_ns) <= DRIFT * held_ns + 2
    assert found.error_ns <= (there_ns + back_ns) / 2 + 2 * DRIFT * (there_ns + held_ns + back_ns) + 4


@given(offset_ns=offsets, drift_ppm=drifts, trips=st.lists(st.tuples(ways, ways, ways), min_size=1, max_size=80), age_ns=ways)
def test_the_best_sample_is_within_its_error_at_any_age(
    offset_ns: int, drift_ppm: int, trips: list[tuple[int, int, int]], age_ns: int
) -> None:
    clocks, estimator, now_ns = TwoClocks(offset_ns, drift_ppm), OffsetEstimator(), 0
    least = []
    for trip in trips:
        times = clocks.exchange(now_ns, *trip)
        assert estimator.add(*times)
        least.append(trip[0] + trip[2])
        now_ns = times[3]
    now_ns += age_ns
    best = estimator.best(now_ns)
    assert best is not None
    assert abs(best.offset_ns - clocks.offset(now_ns)) <= best.error_at(now_ns)
    assert estimator.round_trip_ns <= min(least[-64:]) + DRIFT * 3e9 + 2


@given(times=st.tuples(words, words, words, words))
def test_times_of_any_origin_are_refused_or_fit_the_board(times: tuple[int, int, int, int]) -> None:
    found = sample(*times)
    if found is not None:
        assert all(-(2**63) <= each < 2**63 for each in (found.at_ns, found.offset_ns, found.error_ns, found.round_trip_ns))


@pytest.mark.parametrize("times", [
    pytest.param((100, 0, 0, 99), id="an answer before the question"),
    pytest.param((0, 5_000, 4_000, 10), id="an answer before it was heard"),
    pytest.param((0, 0, 1_000_000, 10), id="held for longer than the exchange took"),
])  # fmt: skip
def test_impossible_times_are_no_sample(times: tuple[int, int, int, int]) -> None:
    estimator = OffsetEstimator()
    assert not estimator.add(*times)
    assert estimator.best(0) is None and estimator.round_trip_ns == -1


def test_a_new_sample_wins_once_the_old_one_may_have_drifted_too_far() -> None:
    estimator = OffsetEstimator()
    estimator.add(0, 1_000, 1_000, 100)
    estimator.add(1_000_000_000, 1_000_001_500, 1_000_001_500, 1_000_002_000)
    assert [found.offset_ns for now in (5_000_000, 1_000_002_000) if (found := estimator.best(now))] == [950, 500]
    estimator.forget()
    assert estimator.best(0) is None


@given(
    base_ns=st.integers(0, 10**17),
    offset_ns=offsets,
    pieces=st.lists(st.tuples(st.integers(1, 10**10), drifts, st.integers(0, 10**6), st.integers(-100, 100)), max_size=12),
    outside=st.tuples(ways, ways),
)
def test_a_line_through_samples_is_within_its_error(
    base_ns: int, offset_ns: int, pieces: list[tuple[int, int, int, int]], outside: tuple[int, int]
) -> None:
    """The clocks drift another way in every piece. Each sample is off by some percent of its error."""
    at, true = [base_ns], [offset_ns]
    for length_ns, drift_ppm, _, _ in pieces:
        at.append(at[-1] + length_ns)
        true.append(true[-1] + drift_ppm * length_ns // 1_000_000)
    errors = [1_000, *(piece[2] for piece in pieces)]
    shares = [50, *(piece[3] for piece in pieces)]
    samples = [
        Offset(when, offset + error * share // 100, error + 1, 0)
        for when, offset, error, share in zip(at, true, errors, shares, strict=True)
    ]
    known = list(zip(at, true, strict=True))
    middles = [((a + b) // 2, c + (d - c) * ((a + b) // 2 - a) // (b - a)) for (a, c), (b, d) in pairwise(known)]
    asked = [(at[0] - outside[0], true[0]), *known, *middles, (at[-1] + outside[1], true[-1])]
    found, bounds = offsets_at(samples[::-1], np.array([when for when, _ in asked], np.int64))
    assert (np.abs(found - np.array([offset for _, offset in asked], np.int64)) <= bounds + 1).all()
