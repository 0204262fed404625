"""The places of an arena's parts, for tests that overwrite them; walls around an arena, and marks between its parts.

The header's words give the places. A sanitizer checks allocations, not the parts of one mapping. So an access beyond the arena
hits a wall of inaccessible pages, and a store between two parts changes a mark.
"""

import ctypes
import mmap
import os
import struct
from typing import Any, NamedTuple

from fastps.system import shared_memory

_PAGE = mmap.PAGESIZE
_WALL_BYTES = 1 << 30  # larger than most wild offsets; never resident in memory
_NOBODY, _SHARED, _ANONYMOUS, _FIXED, _NO_RESERVE = 0, 0x01, 0x22, 0x10, 0x4000
_LINE, _LANE_BYTES, _SEAT_BYTES, _FATE_BYTES, _DOMAIN_BYTES = 64, 768, 192, 32, 512
_WORK_BYTES = 192 + 40 * 1024
_ROSTER_BYTES = 2048  # scheduler state of a few workers; the rest of its pages is for more workers
_MARK = 0xC5


class Header(NamedTuple):
    """The words of fps_header, in order."""

    magic: int
    abi: int
    n_lanes: int
    n_buffers: int
    n_slots: int
    ring_size: int
    n_groups: int
    n_parameters: int
    presence_words: int
    rule: int
    state_planes: int
    n_shards: int
    checks_finite: int
    gradient_type: int
    pad: int
    ema_decay: float
    buffer_floats: int
    domains_offset: int
    statistics_offset: int
    statistics_bytes: int
    work_offset: int
    work_bytes: int
    segments_offset: int
    lanes_offset: int
    lane_bytes: int
    seats_offset: int
    fates_offset: int
    scheduler_offset: int
    scheduler_bytes: int
    weights_offset: int
    weights_bytes: int
    state_offset: int
    state_bytes: int
    state_steps_bytes: int
    slots_offset: int
    slot_bytes: int
    slot_presence_offset: int
    slot_versions_offset: int
    slot_gradient_offset: int
    extra_offset: int
    extra_bytes: int
    total_bytes: int


_HEADER = struct.Struct("<Q14Id26Q")
Places = dict[str, list[tuple[int, int]]]
"""By name, the (offset, length) in bytes of each part of that kind."""


def header_of(memory: Any) -> Header:
    """The header's words."""
    return Header(*_HEADER.unpack(bytes(memoryview(memory)[: _HEADER.size])))


def places_of(header: Header) -> Places:
    """The parts that processes write, by name. Weights and optimizer state are left out: any bits there are a valid float."""
    lanes = [header.lanes_offset + lane * header.lane_bytes for lane in range(header.n_lanes)]
    slots = [header.slots_offset + slot * header.slot_bytes for slot in range(header.n_lanes * header.n_slots)]
    shards = range(header.n_shards)
    return {
        "header": [(0, _HEADER.size)],
        "domain": [(header.domains_offset + _DOMAIN_BYTES * shard, _DOMAIN_BYTES) for shard in shards],
        "work": [(header.work_offset + header.work_bytes * shard, 192 + 40 * 4) for shard in shards],
        "segments": [(header.segments_offset, 24 * header.n_parameters)],
        "lane": [(lane, _LANE_BYTES) for lane in lanes],
        "descriptors": [(lane + _LANE_BYTES, _LINE * header.ring_size) for lane in lanes],
        "seat": [(lane + header.seats_offset + _SEAT_BYTES * shard, _SEAT_BYTES) for lane in lanes for shard in shards],
        "fates": [(lane + header.fates_offset, _FATE_BYTES * header.ring_size) for lane in lanes],
        "statistics": [(header.statistics_offset + header.statistics_bytes * shard, 8 * 800) for shard in shards],
        "scheduler": [
            (header.scheduler_offset + header.scheduler_bytes * copy, _ROSTER_BYTES) for copy in range(2 * header.n_shards)
        ],
        "rule's steps": [(header.state_offset + header.state_bytes * buffer, 8 * header.n_parameters) for buffer in range(3)],
        "slot's header": [(slot, header.slot_gradient_offset) for slot in slots],
        "gradient": [(slot + header.slot_gradient_offset, 256) for slot in slots],
    }


def gaps_of(header: Header) -> list[tuple[int, int]]:
    """(begin, end) of the unused gaps between parts."""
    ends = {
        header.domains_offset: _HEADER.size,
        header.work_offset: header.domains_offset + header.n_shards * _DOMAIN_BYTES,
        header.lanes_offset: header.segments_offset + 24 * header.n_parameters,
        header.statistics_offset: header.lanes_offset + header.n_lanes * header.lane_bytes,
        header.scheduler_offset: header.statistics_offset + header.n_shards * header.statistics_bytes,
    }
    for shard in range(header.n_shards):
        begin = header.work_offset + shard * header.work_bytes
        ends[begin + header.work_bytes] = begin + _WORK_BYTES
    for copy in range(2 * header.n_shards):
        begin = header.scheduler_offset + copy * header.scheduler_bytes
        ends[begin + header.scheduler_bytes] = begin + max(_ROSTER_BYTES, header.scheduler_bytes - 1024)
    for buffer in range(header.n_buffers):
        begin = header.weights_offset + buffer * header.weights_bytes
        ends[begin + header.weights_bytes] = begin + 4 * header.buffer_floats
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
    """Map every arena of this process between two walls, from `begin` to `end`."""

    def __init__(self) -> None:
        self._map_shared = shared_memory.map_shared
        self._mapped: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Map arenas between walls from now on."""
        shared_memory.map_shared = self._map  # type: ignore[assignment]

    def end(self) -> None:
        """Unmap the arenas; no code may read them afterwards."""
        shared_memory.map_shared = self._map_shared
        for address, length in self._mapped:
            _libc.munmap(address, length)
        self._mapped.clear()

    def _map(self, descriptor: int, *, writable: bool = True) -> Any:
        self._map_shared(descriptor, writable=writable)  # for its checks
        size = os.fstat(descriptor).st_size
        length = 2 * _WALL_BYTES + -(-size // _PAGE) * _PAGE
        address = _libc.mmap(None, length, _NOBODY, _ANONYMOUS | _NO_RESERVE, -1, 0)
        inner = address + _WALL_BYTES
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        assert _libc.mmap(inner, size, protection, _SHARED | _FIXED, descriptor, 0) == inner
        self._mapped.append((address, length))
        memory = memoryview((ctypes.c_ubyte * size).from_address(inner)).cast("B")
        return memory if writable else memory.toreadonly()
