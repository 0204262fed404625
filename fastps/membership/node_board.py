"""The board of a job of several nodes: a row of figures for each node, in shared memory beside the leaf arena of a node.

The node's agent writes it, and any process of the same user reads it: `fastps top`, `fastps.observe`, a script. A row has a
checksum, so that a reader never takes half of a new row for a row. On node 0 the board has all nodes, elsewhere only its own.
Where each node is a replica, it has a row for each worker of the job behind those of the nodes.
"""

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

from fastps.errors import ArenaError
from fastps.membership import rendezvous
from fastps.system import shared_memory
from fastps.system.clock import SYSTEM_CLOCK, Clock

STATES = ("joining", "live", "left", "lost")
_FIGURES = struct.Struct("<IQQQQ68s")
FIGURES_BYTES = _FIGURES.size
_MAGIC = b"fastps-nodes-v3\0"
_HEAD = struct.Struct("<16sIII")
_HEAD_BYTES = 64
_ROW = struct.Struct("<iB68s5Q10q")
_CHECKSUM = struct.Struct("<I")
_FRAME = struct.Struct("<II")  # of a worker's row: its checksum and its length
_ROW_BYTES = 256
_PAGE_BYTES = 4096
_TRIES = 100
_ASK_S = 0.2
assert _CHECKSUM.size + _ROW.size <= _ROW_BYTES


@dataclass(frozen=True)
class NodeFigures:
    """What a node says of itself in each beat; see NodeStatistics. The machine's name is cut to 68 bytes.

    >>> NodeFigures.unpack(NodeFigures(4, 120, 0, 10, 20, "node0").pack()).steps
    120
    """

    workers: int = 0
    steps: int = 0
    wait_ns: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    host: str = ""

    def pack(self) -> bytes:
        """FIGURES_BYTES bytes."""
        *numbers, host = astuple(self)
        return _FIGURES.pack(*numbers, host.encode()[:68])

    @staticmethod
    def unpack(data: bytes) -> "NodeFigures | None":
        """The figures in bytes of any origin; None if they have another length."""
        if len(data) != FIGURES_BYTES:
            return None
        workers, steps, wait_ns, sent_bytes, received_bytes, host = _FIGURES.unpack(data)
        return NodeFigures(workers, steps, wait_ns, sent_bytes, received_bytes, _printable(host))


@dataclass(frozen=True)
class NodeStatistics:
    """A row of the board: a node as its own beats and the home on node 0 describe it. Times are in nanoseconds.

    Attributes:
        node: the node's number.
        host: the machine's name.
        state: "joining" before the node's first push, "live", "left" once it makes no more steps, or "lost".
        workers: the workers of the node.
        steps: the versions that the node has made.
        wait_ns: the time that the node's agent spent in exchanges: sending, waiting for other nodes, and receiving.
        sent_bytes, received_bytes: over all links of the node.
        pushes: the pushes of the node that the home has; -1 where the home is on another node.
        lag: how many pushes the node is behind the foremost node; -1 where the home is on another node.
        folded, dropped: pushes of the node that the home has folded, and those that came too late.
        staleness_sum, staleness_max: over the folded pushes, in versions of the home.
        heard_ns: when these figures came, on this machine's monotonic clock.
        round_trip_ns: the least round trip of the last beats; -1 before the first, and for node 0.
        clock_offset_ns: the node's monotonic clock less node 0's.
        clock_error_ns: the bound of the error of that; -1 before it is known.

    >>> NodeStatistics(node=1, state="live", folded=4, staleness_sum=2).staleness_mean
    0.5
    """

    node: int
    host: str = ""
    state: str = "joining"
    workers: int = 0
    steps: int = 0
    wait_ns: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    pushes: int = -1
    lag: int = -1
    folded: int = 0
    dropped: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    heard_ns: int = 0
    round_trip_ns: int = -1
    clock_offset_ns: int = 0
    clock_error_ns: int = -1

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the folded pushes; 0 before the first."""
        return self.staleness_sum / self.folded if self.folded else 0.0

    def _pack(self) -> bytes:
        numbers = (getattr(self, name) for name in _NUMBERS)
        data = _ROW.pack(self.node, STATES.index(self.state), self.host.encode()[:68], *numbers)
        return _CHECKSUM.pack(zlib.crc32(data)) + data

    @staticmethod
    def _unpack(data: bytes) -> "NodeStatistics | None":
        """The row, or None for bytes that are half of one row and half of another."""
        body = data[_CHECKSUM.size : _CHECKSUM.size + _ROW.size]
        if _CHECKSUM.unpack_from(data)[0] != zlib.crc32(body):
            return None
        node, state, host, *numbers = _ROW.unpack(body)
        return NodeStatistics(node, _printable(host), STATES[state], *numbers)


_NUMBERS = [each.name for each in fields(NodeStatistics)][3:]  # behind node, host and state


def _printable(name: bytes) -> str:
    """A host's name that another process wrote."""
    text = name.rstrip(b"\0").decode("utf-8", "replace")
    return "".join(each if each.isprintable() else "?" for each in text)


class NodeBoard:
    """The writer's side: makes the memory, and answers at the job's name until `close`. Raises ArenaError.

    >>> board = NodeBoard("nodes-of-a-doctest", 2)
    >>> board.write([NodeStatistics(0, "node0", "live", workers=4)])
    >>> [(row.node, row.state) for row in BoardView.of("nodes-of-a-doctest").rows()]
    [(0, 'live')]
    >>> board.close()
    """

    def __init__(self, job: str, rows: int, workers: int = 0) -> None:
        size = -(-(_HEAD_BYTES + (rows + workers) * _ROW_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        self._memfd = shared_memory.create(size, "the figures of the nodes")
        self._pidfd = os.pidfd_open(os.getpid())
        self._memory = np.frombuffer(shared_memory.map_shared(self._memfd), np.uint8)
        self._rows, self._workers = rows, workers
        _put(self._memory, 0, _HEAD.pack(_MAGIC, _ROW_BYTES, rows, workers))
        name = rendezvous.place_name(job, "board")
        self._listener = rendezvous.Listener(name, self._memfd, self._pidfd, b"", rendezvous.HOST_PLACE)

    def write(self, rows: Sequence[NodeStatistics]) -> None:
        """Write these rows, the first into the first place. Only one thread may write."""
        for place, row in enumerate(rows):
            _put(self._memory, _HEAD_BYTES + place * _ROW_BYTES, row._pack())

    def write_workers(self, rows: Sequence[bytes]) -> None:
        """Write the packed rows of the job's workers, by rank, as far as there is room. Only one thread may write."""
        for place, data in enumerate(rows[: self._workers]):
            framed = _FRAME.pack(zlib.crc32(data), len(data)) + data
            _put(self._memory, _HEAD_BYTES + (self._rows + place) * _ROW_BYTES, framed)

    def close(self) -> None:
        """Answer no more. A process that has mapped the board keeps its last rows."""
        self._listener.close()
        os.close(self._memfd)
        os.close(self._pidfd)


class BoardView:
    """The reader's side. Raises ArenaError for memory that is no board."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        magic, row_bytes, self._rows, self._workers = _HEAD.unpack_from(memory)
        is_whole = _HEAD_BYTES + (self._rows + self._workers) * _ROW_BYTES <= len(memory)
        if (magic, row_bytes) != (_MAGIC, _ROW_BYTES) or not is_whole:
            raise ArenaError("expected the figures of the nodes, found other memory; use one version of fastps")
        self._memory = memory

    @staticmethod
    def of(job: str, clock: Clock = SYSTEM_CLOCK) -> "BoardView | None":
        """The board of a leaf arena's job; None for a job of one node. Raises ArenaError."""
        try:
            offer = rendezvous.connect(job, "board", _ASK_S, observer=True, clock=clock)
        except (rendezvous.Absent, rendezvous.Silent, rendezvous.AbiDiffers):
            return None
        with offer:
            return BoardView(np.frombuffer(shared_memory.map_shared(offer.memfd, writable=False), np.uint8))

    def rows(self) -> list[NodeStatistics]:
        """The rows that were written so far."""
        found = (self._row(_HEAD_BYTES + place * _ROW_BYTES) for place in range(self._rows))
        return [row for row in found if row is not None]

    def workers(self) -> list[bytes]:
        """The packed rows of the job's workers that were written so far, by rank."""
        found = (self._worker(_HEAD_BYTES + (self._rows + place) * _ROW_BYTES) for place in range(self._workers))
        return [data for data in found if data]

    def _worker(self, begin: int) -> bytes:
        for _ in range(_TRIES):
            framed = self._memory[begin : begin + _ROW_BYTES].tobytes()
            checksum, length = _FRAME.unpack_from(framed)
            data = framed[_FRAME.size : _FRAME.size + length]
            if not length or zlib.crc32(data) == checksum:
                return data
        return b""

    def _row(self, begin: int) -> NodeStatistics | None:
        for _ in range(_TRIES):
            data = self._memory[begin : begin + _ROW_BYTES].tobytes()
            if not any(data):
                return None
            if (row := NodeStatistics._unpack(data)) is not None:
                return row
        return None


def _put(memory: npt.NDArray[np.uint8], at: int, data: bytes) -> None:
    memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
