"""What the nodes bring to an exchange besides their sums: the buffers of their workers' models, and their workers' counters.

A block of bytes for each node. Blocks of other nodes are checked as they are read.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from fastps.errors import ProtocolError
from fastps.job.limits import ROOM_HEADER_BYTES
from fastps.kernels.shm.arena import Arena
from fastps.store.lane_room import ORDER, USED, VALID, LaneRooms, Slot, words_of
from fastps.store.observer import ROW_BYTES, WorkerStatistics, statistics_of

_MOST_WORKERS = 1 << 16  # of a node, in the order of all


def buffers_size(rooms: LaneRooms) -> int:
    """The bytes of this node's block of buffers."""
    return sum(int(words_of(slot)[USED]) for slot in rooms.kept())


def buffers_of(rooms: LaneRooms) -> bytes:
    """This node's block of buffers: what its workers have published, one after the other."""
    return b"".join(slot[: int(words_of(slot)[USED])].tobytes() for slot in rooms.kept())


def put_buffers(rooms: LaneRooms, blocks: Mapping[int, bytes], own: int) -> None:
    """Write the other nodes' buffers into the rooms, and the order of all of them. The caller holds the shard lock.

    Raises ProtocolError for a block that no node brings, or for more slots than there are.
    """
    for lane, slot in enumerate(rooms.own):
        words_of(slot)[ORDER] = own * _MOST_WORKERS + lane
    free: Iterator[Slot | None] = iter(rooms.others)
    for slot in rooms.others:
        words_of(slot)[VALID] = 0
    for node, block in blocks.items():
        for index, found in enumerate(_slots(block) if node != own else ()):
            room = next(free, None)
            if room is None or len(found) > len(room):
                raise ProtocolError(f"expected buffers of at most {len(rooms.others)} workers of other nodes, found more")
            room[: len(found)] = found
            words_of(room)[ORDER] = node * _MOST_WORKERS + index


def _slots(block: bytes) -> Iterator[Slot]:
    """The slots in a block."""
    data, at = np.frombuffer(block, np.uint8), 0
    while at < len(data):
        head = data[at : at + ROOM_HEADER_BYTES]
        used = int(words_of(head)[USED]) if len(head) == ROOM_HEADER_BYTES else 0
        if not ROOM_HEADER_BYTES <= used <= len(data) - at:
            raise ProtocolError(f"expected the buffers of a worker, found {used} bytes of {len(data) - at}")
        yield data[at : at + used]
        at += used


def counters_of(arena: Arena) -> bytes:
    """This node's block of counters: a row for each worker's lane."""
    return b"".join(row.pack() for row in statistics_of(arena))


def counters_size(workers: int) -> int:
    """The bytes of a block of counters of so many workers."""
    return ROW_BYTES * workers


def read_counters(blocks: Mapping[int, bytes]) -> list[WorkerStatistics]:
    """The rows of all workers, by node, with their ranks in the whole job. Raises ProtocolError."""
    found: list[WorkerStatistics] = []
    for _, block in sorted(blocks.items()):
        first = len(found)
        for at in range(0, len(block), ROW_BYTES):
            found.append(WorkerStatistics.unpack(block[at : at + ROW_BYTES], first))
    return found
