"""Where what lies in an arena, for who writes over it; and walls around an arena, and marks between its parts.

The header's words say where (kernels/shm/arena.h). A sanitizer knows memory that was allocated, not the parts of one mapping:
so an access beyond the arena ends at a wall of pages that nobody may touch, and a store between two parts changes a mark.
Refuses to know what is written.
"""

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any

from fastps.kernels.shm import offsets
from fastps.kernels.shm.offsets import SIZES
from fastps.kernels.update.fold import MAX_PUSHES
from fastps.system import shared_memory as memory_of

_PAGE = mmap.PAGESIZE
_WALL_BYTES = 1 << 30  # beyond most wild indices; nothing of it is ever in memory
_NOBODY, _SHARED, _ANONYMOUS, _FIXED, _NO_RESERVE = 0, 0x01, 0x22, 0x10, 0x4000
_HEADER_BYTES, _SEGMENT_BYTES = SIZES["header"], SIZES["segment"]
_LANE_BYTES, _LANE_SHARD_BYTES, _DESCRIPTOR_BYTES = SIZES["lane"], SIZES["lane_shard"], SIZES["descriptor"]
_OUTCOME_BYTES, _SHARD_HEADER_BYTES = SIZES["push_outcome"], SIZES["shard_header"]
_WORK_BYTES = SIZES["work"] + MAX_PUSHES * SIZES["folded_push"]
_STATE_BYTES = 2048  # of a few workers; the rest of its pages is for more
_MARK = 0xC5


Header = SimpleNamespace
"""The words of fps_header."""
Places = dict[str, list[tuple[int, int]]]
"""A name, and where such parts lie: (offset, length) in bytes."""


def header_of(memory: Any) -> Header:
    """The header's words."""
    return Header(**offsets.header_of(memory))


def places_of(header: Header) -> Places:
    """What processes write, by name. Weights and the rule's floats are left out: a stray float is a float."""
    lanes = [header.lanes_offset + lane * header.lane_bytes for lane in range(header.n_lanes)]
    slots = [header.slots_offset + slot * header.slot_bytes for slot in range(header.n_lanes * header.n_slots)]
    shards = range(header.n_shards)
    return {
        "header": [(0, _HEADER_BYTES)],
        "domain": [(header.shard_headers_offset + _SHARD_HEADER_BYTES * shard, _SHARD_HEADER_BYTES) for shard in shards],
        "work": [
            (header.work_offset + header.work_bytes * shard, SIZES["work"] + 4 * SIZES["folded_push"]) for shard in shards
        ],
        "segments": [(header.segments_offset, _SEGMENT_BYTES * header.n_parameters)],
        "lane": [(lane, _LANE_BYTES) for lane in lanes],
        "descriptors": [(lane + _LANE_BYTES, _DESCRIPTOR_BYTES * header.ring_size) for lane in lanes],
        "seat": [
            (lane + header.lane_shards_offset + _LANE_SHARD_BYTES * shard, _LANE_SHARD_BYTES)
            for lane in lanes
            for shard in shards
        ],
        "fates": [(lane + header.push_outcomes_offset, _OUTCOME_BYTES * header.ring_size) for lane in lanes],
        "readers": [
            (header.reader_words_offset, SIZES["readers"] + header.n_readers * header.n_shards * SIZES["reader_shard"])
        ],
        "statistics": [(header.statistics_offset + header.statistics_bytes * shard, 8 * 800) for shard in shards],
        "scheduler": [
            (header.scheduler_offset + header.scheduler_bytes * copy, _STATE_BYTES) for copy in range(2 * header.n_shards)
        ],
        "rule's steps": [(header.state_offset + header.state_bytes * buffer, 8 * header.n_parameters) for buffer in range(3)],
        "slot's header": [(slot, header.slot_gradient_offset) for slot in slots],
        "gradient": [(slot + header.slot_gradient_offset, 256) for slot in slots],
    }


def gaps_of(header: Header) -> list[tuple[int, int]]:
    """(begin, end) of what lies between parts, and nobody uses."""
    ends = {
        header.shard_headers_offset: _HEADER_BYTES,
        header.work_offset: header.shard_headers_offset + header.n_shards * _SHARD_HEADER_BYTES,
        header.lanes_offset: header.segments_offset + _SEGMENT_BYTES * header.n_parameters,
        header.reader_words_offset: header.lanes_offset + header.n_lanes * header.lane_bytes,
        header.statistics_offset: header.reader_words_offset
        + SIZES["readers"]
        + header.n_readers * header.n_shards * SIZES["reader_shard"],
        header.scheduler_offset: header.statistics_offset + header.n_shards * header.statistics_bytes,
    }
    for shard in range(header.n_shards):
        begin = header.work_offset + shard * header.work_bytes
        ends[begin + header.work_bytes] = begin + _WORK_BYTES
    for copy in range(2 * header.n_shards):
        begin = header.scheduler_offset + copy * header.scheduler_bytes
        ends[begin + header.scheduler_bytes] = begin + max(_STATE_BYTES, header.scheduler_bytes - 1024)
    for buffer in range(header.n_buffers):
        begin = header.weights_offset + buffer * header.weights_bytes
        ends[begin + header.weights_bytes] = begin + (6 if header.shown_type else 4) * header.buffer_floats
    for buffer in range(3):
        begin = header.state_offset + buffer * header.state_bytes
        ends[begin + header.state_bytes] = begin + header.state_steps_bytes + 4 * header.state_planes * header.buffer_floats
    return [(begin, end) for end, begin in ends.items() if begin < end]


def mark(memory: Any, gaps: list[tuple[int, int]]) -> None:
    """Write marks into the gaps."""
    for begin, end in gaps:
        memoryview(memory)[begin:end] = bytes([_MARK]) * (end - begin)


def changed(memory: Any, gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The gaps whose marks have changed."""
    return [(begin, end) for begin, end in gaps if bytes(memoryview(memory)[begin:end]).strip(bytes([_MARK]))]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Walls:
    """Between `begin` and `end` every arena that this process maps lies between two walls."""

    def __init__(self) -> None:
        self._map_shared = memory_of.map_shared
        self._mapped: list[tuple[int, int]] = []

    def begin(self) -> None:
        """From now on."""
        memory_of.map_shared = self._map  # type: ignore[assignment]

    def end(self) -> None:
        """Arenas that were mapped are gone: nobody may read them any more."""
        memory_of.map_shared = self._map_shared
        for address, length in self._mapped:
            _libc.munmap(address, length)
        self._mapped.clear()

    def _map(self, descriptor: int, *, writable: bool = True) -> Any:
        self._map_shared(descriptor, writable=writable)  # its checks
        size = os.fstat(descriptor).st_size
        length = 2 * _WALL_BYTES + -(-size // _PAGE) * _PAGE
        address = _libc.mmap(None, length, _NOBODY, _ANONYMOUS | _NO_RESERVE, -1, 0)
        inner = address + _WALL_BYTES
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        assert _libc.mmap(inner, size, protection, _SHARED | _FIXED, descriptor, 0) == inner
        self._mapped.append((address, length))
        memory = memoryview((ctypes.c_ubyte * size).from_address(inner)).cast("B")
        return memory if writable else memory.toreadonly()
