"""The board of nodes: what one process writes, others read whole; other bytes are no rows."""

import contextlib
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.errors import ArenaError
from fastps.membership.node_board import FIGURES_BYTES, STATES, BoardView, NodeBoard, NodeFigures, NodeStatistics
from tests.support import processes

signed = st.integers(-(2**63), 2**63 - 1)
unsigned = st.integers(0, 2**64 - 1)


@given(workers=st.integers(0, 2**32 - 1), steps=unsigned, wait_ns=unsigned, sent=unsigned, host=st.text(max_size=40))
def test_figures_are_what_was_packed(workers: int, steps: int, wait_ns: int, sent: int, host: str) -> None:
    found = NodeFigures.unpack(NodeFigures(workers, steps, wait_ns, sent, 7, host).pack())
    assert found is not None
    assert (found.workers, found.steps, found.wait_ns, found.sent_bytes, found.received_bytes) == (
        workers, steps, wait_ns, sent, 7,
    )  # fmt: skip
    assert found.host.isprintable() and (found.host == host or not host.isprintable() or len(host.encode()) > 68)


@given(st.binary(max_size=200))
def test_bytes_of_any_origin_are_figures_or_none(data: bytes) -> None:
    found = NodeFigures.unpack(data)
    assert (found is not None) == (len(data) == FIGURES_BYTES)
    assert found is None or found.host.isprintable(), "a terminal may show it"


@given(state=st.sampled_from(STATES), numbers=st.lists(signed, min_size=10, max_size=10), steps=unsigned)
def test_another_process_reads_what_was_written(state: str, numbers: list[int], steps: int) -> None:
    names = (
        "pushes", "lag", "folded", "dropped", "staleness_sum", "staleness_max", "heard_ns", "round_trip_ns",
        "clock_offset_ns", "clock_error_ns",
    )  # fmt: skip
    row = NodeStatistics(3, "node3", state, 2, steps, **dict(zip(names, numbers, strict=True)))
    assert NodeStatistics._unpack(row._pack()) == row


def test_a_reader_in_another_process_sees_whole_rows_only() -> None:
    """Every number of a row is the same, so half of a new row shows."""
    job = f"board-{os.getpid()}"
    with contextlib.closing(NodeBoard(job, 2)) as board:
        assert BoardView.of(job + "-x") is None
        board.write([_row(0, 1)])
        reader, count = processes.start(lambda: _read(job)), 1
        while processes.runs(reader.process_id):
            count += 1
            board.write([_row(0, count), _row(1, count)])
        [(looks, changes)] = processes.results([reader], 30)
    assert looks > 100 and changes > 10
    assert BoardView.of(job) is None


def _row(node: int, count: int) -> NodeStatistics:
    return NodeStatistics(node, "x" * (count % 60), "live", *[count] * 15)


def _read(job: str) -> tuple[int, int]:
    view = BoardView.of(job)
    assert view is not None
    looks, seen = 0, set()
    while len(seen) < 50 or looks < 2000:
        for row in view.rows():
            assert row == _row(row.node, row.workers), "half of one row, and half of another"
            seen.add(row.workers)
        looks += 1
    return looks, len(seen)


def test_a_row_of_other_bytes_is_left_out() -> None:
    job = f"board-damaged-{os.getpid()}"
    with contextlib.closing(NodeBoard(job, 3)) as board:
        board.write([_row(0, 5), _row(1, 5)])
        view = BoardView.of(job)
        assert view is not None and [row.node for row in view.rows()] == [0, 1]
        board._memory[64 + 256 + 50] ^= 1
        assert [row.node for row in view.rows()] == [0]


def test_other_memory_is_no_board() -> None:
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(ArenaError, match="expected the figures of the nodes, found other memory"):
        BoardView(memory)


def test_the_mean_staleness_is_that_of_folded_pushes() -> None:
    row = replace(_row(0, 4), folded=0)
    assert row.staleness_mean == 0.0
    assert replace(row, folded=8, staleness_sum=4).staleness_mean == 0.5
