"""A watch: both sides learn the offset from beats, and what a hostile peer says in them changes nothing else."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from fastps.membership.node_board import NodeFigures
from fastps.network.monitoring.watch import EdgeWatch
from tests.system.test_clock_offset import TwoClocks, drifts, offsets

words = st.integers(-(2**63), 2**63 - 1)
trips = st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 10**9), st.integers(0, 10**8)), min_size=2, max_size=20)


@given(offset_ns=offsets, drift_ppm=drifts, trips=trips)
def test_both_sides_learn_the_offset(offset_ns: int, drift_ppm: int, trips: list[tuple[int, int, int]]) -> None:
    clocks, now_ns = TwoClocks(offset_ns, drift_ppm), 0
    here, there = EdgeWatch(), EdgeWatch(lambda: NodeFigures(workers=3, host="node1"))
    for there_ns, held_ns, back_ns in trips:
        times = clocks.exchange(now_ns, there_ns, held_ns, back_ns)
        here.sends(times[0])
        there.hears(here.beat(), times[0], times[1])
        there.sends(times[2])
        here.hears(there.beat(), times[2], times[3])
        now_ns = times[3] + 1_000_000  # in a shorter pause the other clock, of whole ns, may stand still
    found, back = here.clock.best(now_ns), there.clock.best(clocks.other(now_ns))
    assert found is not None and back is not None
    assert abs(found.offset_ns - clocks.offset(now_ns)) <= found.error_at(now_ns)
    assert abs(back.offset_ns + clocks.offset(now_ns)) <= back.error_at(clocks.other(now_ns)) + 2
    assert here.told == NodeFigures(workers=3, host="node1")


@given(beats=st.lists(st.tuples(st.binary(max_size=160), words, words), max_size=20), own=st.lists(words, max_size=5))
def test_beats_of_any_origin_are_survived(beats: list[tuple[bytes, int, int]], own: list[int]) -> None:
    watch = EdgeWatch()
    for stamp in own:
        watch.sends(stamp)
    for contents, stamp, now_ns in beats:
        watch.hears(contents, stamp, now_ns)
        assert len(watch.beat()) == 120
        found = watch.clock.best(now_ns)
        assert found is None or abs(found.offset_ns) < 2**62


def test_an_echo_of_a_stamp_that_was_never_sent_is_ignored() -> None:
    watch = EdgeWatch()
    watch.sends(100)
    watch.hears(struct.pack("<qq", 101, 500), 510, 120)
    assert watch.clock.best(200) is None
    watch.hears(struct.pack("<qq", 100, 500), 510, 120)
    assert watch.clock.best(200) is not None
    watch.begin()
    assert watch.clock.best(200) is None and watch.told is None


def test_messages_are_recorded_for_a_trace_only() -> None:
    found: list[tuple[int, ...]] = []
    EdgeWatch(peer=2, message=lambda *words: found.append(words)).message(1, 7, 10, 20)
    EdgeWatch().message(1, 7, 10, 20)
    assert found == [(1, 2, 7, 10, 20)]
