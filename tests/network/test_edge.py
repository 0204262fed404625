"""Edges over real links, both sides in this process: order, losses, silence, and what a failed peer says."""

import contextlib
import time

import numpy as np
import pytest

from fastps.network.edge import CHUNK_BYTES, MOST_HEADERS, chunks_of
from fastps.network.link import LinkLostError
from fastps.network.messages import Header, Kind
from tests.network.conftest import Pair, both


def test_headers_come_in_order_and_beats_are_not_among_them(pair: Pair) -> None:
    leaf, home = pair.edges
    for step in range(5):
        leaf.send_header(Header(Kind.PUSH, weight=step))
    assert home.next_header(0.7) is not None
    assert [header.weight for _ in range(4) if (header := home.next_header(1.0)) is not None] == [1, 2, 3, 4]
    assert home.next_header(0.7) is None, "only beats"


def test_floats_arrive_as_they_were_sent_in_both_directions_at_once(pair: Pair) -> None:
    random = np.random.default_rng(3)
    sent = [random.integers(0, 256, 20 * CHUNK_BYTES + 12, np.uint8) for _ in range(2)]
    found = [np.zeros_like(memory) for memory in sent]

    def exchange(side: int) -> None:
        pair.edges[side].send(chunks_of(sent[side]))
        pair.edges[side].receive(chunks_of(found[side]))

    def answer(side: int) -> None:
        pair.edges[side].receive(chunks_of(found[side]))
        pair.edges[side].send(chunks_of(sent[side]))

    both(lambda side: exchange(side) if side == 0 else answer(side))
    assert np.array_equal(found[0], sent[1])
    assert np.array_equal(found[1], sent[0])


def test_a_side_that_closes_is_missed_at_once(pair: Pair) -> None:
    leaf, home = pair.edges
    leaf.close()
    began = time.monotonic()
    with pytest.raises(LinkLostError):
        home.next_header(10.0)
    assert time.monotonic() - began < 2
    with pytest.raises(LinkLostError):
        home.send_header(Header(Kind.PUSH))


def test_a_side_that_is_silent_is_lost_after_the_timeout(pair: Pair) -> None:
    leaf, home = pair.edges
    leaf._ends.set()  # its beats end, and its links stay open
    began = time.monotonic()
    with pytest.raises(LinkLostError):
        home.next_header(10.0)
    assert 0.9 < time.monotonic() - began < 4


def test_what_a_failed_side_says_is_the_reason(pair: Pair) -> None:
    leaf, home = pair.edges
    leaf.send_header(Header(Kind.FAILED, text="the disk is full"))
    leaf.close()
    header = home.next_header(5.0)
    assert header is not None and header.text == "the disk is full"
    with pytest.raises(LinkLostError, match="the disk is full"):
        home.check()
    assert home.failure == "the disk is full"


def test_bytes_that_are_no_header_end_the_edge(pair: Pair) -> None:
    home = pair.edges[1]
    control = pair.links[0][0]
    control.wait(control.send(np.full(512, 7, np.uint8)), 2.0)
    with pytest.raises(LinkLostError, match="expected a message of fastps"):
        home.next_header(5.0)


def test_more_headers_than_a_side_reads_end_the_edge(pair: Pair) -> None:
    """A peer that floods cannot fill this side's memory."""
    leaf, home = pair.edges
    with contextlib.suppress(LinkLostError):
        for _ in range(MOST_HEADERS + 1):
            leaf.send_header(Header(Kind.NULL))
    deadline = time.monotonic() + 10
    with pytest.raises(LinkLostError, match="expected at most"):
        while time.monotonic() < deadline:
            home.check()
            time.sleep(0.01)


def test_both_sides_learn_the_offset_of_their_clocks_and_count_bytes(pair: Pair) -> None:
    """Both are on this machine, so the true offset is 0."""
    leaf, home = pair.edges
    deadline = time.monotonic() + 10
    while not all(edge.watch.offset(time.monotonic_ns()) and edge.watch.headers_received >= 2 * 512 for edge in pair.edges):
        assert time.monotonic() < deadline, "no beat was answered"
        time.sleep(0.05)
    sent = np.zeros(CHUNK_BYTES + 12, np.uint8)
    both(lambda side: leaf.send(chunks_of(sent)) if side == 0 else home.receive(chunks_of(sent.copy())))
    for edge in pair.edges:
        now_ns = time.monotonic_ns()
        found = edge.watch.offset(now_ns)
        assert found is not None and abs(found.offset_ns) <= found.error_at(now_ns) < 1e9
        assert edge.watch.headers_sent >= 2 * 512
    assert (leaf.watch.floats_sent, home.watch.floats_received) == (len(sent), len(sent))
    assert (home.watch.floats_sent, leaf.watch.floats_received) == (0, 0)
