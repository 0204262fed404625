"""What nodes bring besides sums: blocks are read as they were made, and others are refused."""

import numpy as np
import pytest

from fastps.errors import ProtocolError
from fastps.job.limits import ROOM_HEADER_BYTES
from fastps.network.gathering import buffers_of, buffers_size, counters_of, counters_size, put_buffers, read_counters
from fastps.store.lane_room import ORDER, USED, VALID, LaneRooms, words_of
from tests.store.test_lane_room import _store


def _fill(rooms: LaneRooms, lane: int, value: int, size: int) -> None:
    rooms.own[lane][ROOM_HEADER_BYTES : ROOM_HEADER_BYTES + size] = value
    words_of(rooms.own[lane])[[VALID, USED]] = 1, ROOM_HEADER_BYTES + size


def test_buffers_of_other_nodes_come_into_the_rooms_in_the_order_of_nodes() -> None:
    with _store(2, 3 * 256) as one, _store(2, 3 * 256) as two:
        here, there = LaneRooms(one, 256), LaneRooms(two, 256)
        _fill(there, 0, 5, 16)
        _fill(there, 1, 6, 32)
        block = buffers_of(there)
        assert len(block) == buffers_size(there) == 2 * ROOM_HEADER_BYTES + 48
        put_buffers(here, {0: b"", 2: block}, 1)
        found = [slot for slot in here.others if words_of(slot)[VALID]]
        assert [int(slot[ROOM_HEADER_BYTES]) for slot in found] == [5, 6]
        order = [int(words_of(slot)[ORDER]) for slot in (*here.own, *found)]
        assert order == sorted(order)
        put_buffers(here, {}, 1)
        assert not any(words_of(slot)[VALID] for slot in here.others), "those that left are gone"


@pytest.mark.parametrize("used", [0, 64, 10_000])
def test_a_block_that_no_node_brings_is_refused(used: int) -> None:
    with _store(1, 3 * 256) as store:
        block = np.zeros(ROOM_HEADER_BYTES + 8, np.uint8)
        words_of(block)[USED] = used
        with pytest.raises(ProtocolError, match="expected the buffers of a worker"):
            put_buffers(LaneRooms(store, 256), {0: block.tobytes()}, 1)
        words_of(block)[USED] = len(block)
        with pytest.raises(ProtocolError, match="at most 2 workers of other nodes, found more"):
            put_buffers(LaneRooms(store, 256), {0: 3 * block.tobytes()}, 1)


def test_counters_are_of_all_workers_by_rank() -> None:
    with _store(2, ROOM_HEADER_BYTES) as store, store.attach(1):
        block = counters_of(store.arena)
        assert len(block) == counters_size(2)
        rows = read_counters({3: block, 0: block})
        assert [(row.rank, row.state) for row in rows] == [
            (0, "not attached"), (1, "live"), (2, "not attached"), (3, "live")
        ]  # fmt: skip
    with pytest.raises(ProtocolError, match="expected a row of"):
        read_counters({0: block[:-1]})
    with pytest.raises(ProtocolError, match="expected the counters of a worker"):
        read_counters({0: b"\xff" * counters_size(1)})
