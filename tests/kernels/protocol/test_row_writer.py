"""Rows collected into a slot: each once, in the order of their first values, with the sum of the values."""

import itertools
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.kernels.protocol.row_writer import RowWriter
from fastps.kernels.shm.arena import Arena
from fastps.kernels.shm.offsets import header_of
from tests.support.plain_arena import BSP, Job, planned

pytestmark = pytest.mark.unit

TABLES = [(50, 3, 0, 0, 0), (7, 16, 1, 0, 0)]


def _arena() -> tuple[mmap.mmap, Arena]:
    job = Job(2, BSP, segments=[(0, 0, 0), (16, 0, 0)], tables=TABLES)
    return job.memory, job.arena


@given(st.lists(st.integers(0, 49), max_size=200), st.integers(0, 2**31))
def test_collected_rows_are_the_sums_of_their_values(numbers: list[int], seed: int) -> None:
    memory, arena = _arena()
    values = np.random.default_rng(seed).standard_normal((len(numbers), 3)).astype(np.float32)
    count = RowWriter(arena, 1).collect(1, 0, np.array(numbers, np.int64), values)
    order = list(dict.fromkeys(numbers))
    assert count == len(order)
    (begin, _), (place, _) = arena.table_slot_ranges(1, 1, 0, count)
    assert np.frombuffer(memory, np.int64, 1, begin)[0] == count
    assert np.frombuffer(memory, np.uint32, count, begin + 64).tolist() == order
    found = np.frombuffer(memory, np.float32, 3 * count, place).reshape(count, 3)
    expected = np.zeros((50, 3), np.float32)
    for number, value in zip(numbers, values, strict=True):
        expected[number] += value
    assert np.array_equal(found, expected[order])


def test_slots_and_tables_lie_apart() -> None:
    _, arena = _arena()
    ranges = []
    for lane in range(2):
        for slot in range(2):
            for table, (rows, *_) in enumerate(TABLES):
                ranges += arena.table_slot_ranges(lane, slot, table, rows)
    ranges.sort()
    assert all(begin + length <= following for (begin, length), (following, _) in itertools.pairwise(ranges))
    assert ranges[-1][0] + ranges[-1][1] <= arena.total_bytes


def test_numbers_out_of_range_and_wrong_places_are_told() -> None:
    _, arena = _arena()
    writer = RowWriter(arena, 0)
    assert writer.outside(0, np.array([0, 49], np.int64)) == -1
    assert writer.outside(0, np.array([0, 50], np.int64)) == 1
    assert writer.outside(1, np.array([-1], np.int64)) == 0
    with pytest.raises(IndexError, match="expected a table of 0 to 1, found 2"):
        writer.outside(2, np.array([0], np.int64))
    with pytest.raises(IndexError, match="expected a slot of 0 to 1, found 2"):
        writer.collect(2, 0, np.array([0], np.int64), np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="expected 1 rows of 3 values, found 1 rows of 2"):
        writer.collect(0, 0, np.array([0], np.int64), np.zeros((1, 2), np.float32))


@pytest.mark.parametrize("tables", [[(0, 3, 0, 0, 0)], [(5, 0, 0, 0, 0)], [(5, 3, 0, 0, 1)], [(1 << 32, 3, 0, 0, 0)]])
def test_a_table_of_impossible_measures_is_refused(tables: list[tuple[int, int, int, int, int]]) -> None:
    with pytest.raises(ValueError, match="expected a table of 1 to 2147483648 rows"):
        planned(parameters=2, tables=tables)


def test_descriptions_of_tables_that_were_written_over_are_refused() -> None:
    memory, _ = _arena()
    offset = header_of(memory)["tables_offset"]
    memory[offset : offset + 8] = (5_000).to_bytes(8, "little")
    with pytest.raises(ValueError, match="the arena's tables are damaged"):
        Arena(memory)
