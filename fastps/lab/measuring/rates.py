"""What the edge between a node and node 0 can do: rates one way and both ways at once, and round trips.

Node 0 measures, and the other node responds. Both use an ordinary Edge, so the figures are those that a job gets: headers and
chunks over Gloo, with beats between them.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from fastps.errors import TimeoutExceededError
from fastps.job.wire import CHUNK_BYTES
from fastps.network.edge import RECEIVES_UNDER_WAY, Edge
from fastps.network.link import LinkLostError, Memory
from fastps.network.messages import Header, Kind
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline

SMALL_BYTES = 100_000
_ECHO, _UP, _DOWN, _BOTH = range(4)  # what the responder does; the weight of a PUSH header
_ENOUGH_NS = 500_000_000  # a transfer of this length measures a rate
_MOST_BYTES = 1 << 30
_REPEATS = 3
_ROUND_TRIPS, _ROUND_TRIPS_NS = 200, 1_000_000_000  # the most of both
_LISTEN_S = 0.5
_ANSWER_S = 60.0


@dataclass(frozen=True)
class LinkRates:
    """What one edge can do, as node 0 sees it."""

    up_bytes_s: float  # the rate to node 0, and from there, one at a time
    down_bytes_s: float
    both_bytes_s: float  # the rate in each direction while both are used
    together_bytes_s: float  # the same while all other nodes use their edges, too
    round_trip_ns: int  # of a header and its answer: median, and 95th percentile
    round_trip_p95_ns: int
    small_round_trip_ns: int  # of 100 kB and as much in answer, each after a header; median


def measure(edges: Sequence[Edge], clock: Clock = SYSTEM_CLOCK) -> list[LinkRates]:
    """Measure the edges of node 0 in turn, then all at once, and end the responders. Raises LinkLostError."""
    meters = [_Meter(edge, clock) for edge in edges]
    alone = [meter.alone() for meter in meters]
    most = max(size for _, size in alone)
    with ThreadPoolExecutor(len(edges)) as pool:
        together = list(pool.map(lambda meter: meter.rate(_BOTH, most), meters))
    for edge in edges:
        edge.send_header(Header(Kind.LEAVE))
    return [replace(found, together_bytes_s=rate) for (found, _), rate in zip(alone, together, strict=True)]


class _Meter:
    """Measures one edge, from node 0's side."""

    def __init__(self, edge: Edge, clock: Clock) -> None:
        self._edge, self._clock = edge, clock

    def alone(self) -> tuple[LinkRates, int]:
        """The rates of this edge while no other is used, and the bytes that were enough to measure both ways at once."""
        headers = sorted(self._round_trips(0))
        small = int(statistics.median(self._round_trips(SMALL_BYTES)))
        (up, _), (down, _), (both, size) = (self._best_size(mode) for mode in (_UP, _DOWN, _BOTH))
        middle, late = int(statistics.median(headers)), headers[int(0.95 * (len(headers) - 1))]
        return LinkRates(up, down, both, both, middle, late, small), size

    def _round_trips(self, size: int) -> Iterator[int]:
        memories = [np.zeros(size, np.uint8)] if size else []
        self._round_trip(size, memories)  # the first one warms up
        over = Deadline(self._clock.now_ns(), _ROUND_TRIPS_NS)
        for _ in range(_ROUND_TRIPS):
            yield self._round_trip(size, memories)
            if over.is_over(self._clock.now_ns()):
                return

    def _round_trip(self, size: int, memories: list[Memory]) -> int:
        began_ns = self._clock.now_ns()
        self._edge.send_header(Header(Kind.PUSH, weight=_ECHO, samples=size))
        self._edge.send(memories)
        _next(self._edge, Kind.WEIGHTS)
        self._edge.receive(memories)
        return self._clock.now_ns() - began_ns

    def _best_size(self, mode: int) -> tuple[float, int]:
        """The best rate with enough bytes to measure it, and how many those are."""
        size = CHUNK_BYTES
        while size < _MOST_BYTES and size / self.rate(mode, size) * 1e9 < _ENOUGH_NS:
            size *= 2
        return max(self.rate(mode, size) for _ in range(_REPEATS)), size

    def rate(self, mode: int, size: int) -> float:
        """Bytes a second, in each direction that `mode` uses."""
        began_ns = self._clock.now_ns()
        self._edge.send_header(Header(Kind.PUSH, weight=mode, samples=size))
        _transfer(self._edge, size, sends=mode in (_DOWN, _BOTH), receives=mode in (_UP, _BOTH))
        _next(self._edge, Kind.WEIGHTS)
        return size / (self._clock.now_ns() - began_ns) * 1e9


def respond(edge: Edge) -> None:
    """Do what node 0 asks for until it has measured. Raises LinkLostError."""
    while True:
        header = edge.next_header(_LISTEN_S)
        if header is None:
            continue
        if header.kind == Kind.LEAVE:
            return
        mode, size = header.weight, header.samples
        if mode == _ECHO:
            memories = [np.zeros(size, np.uint8)] if size else []
            edge.receive(memories)
            edge.send_header(Header(Kind.WEIGHTS))
            edge.send(memories)
            continue
        _transfer(edge, size, sends=mode in (_UP, _BOTH), receives=mode in (_DOWN, _BOTH))
        edge.send_header(Header(Kind.WEIGHTS))


def _transfer(edge: Edge, size: int, *, sends: bool, receives: bool) -> None:
    """Send and receive so many bytes in chunks, both at once if both are wanted."""
    ways: list[Callable[[], None]] = []
    if sends:
        ways.append(lambda: edge.send(_chunks(size, np.ones((1, CHUNK_BYTES), np.uint8))))
    if receives:
        ways.append(lambda: edge.receive(_chunks(size, np.zeros((RECEIVES_UNDER_WAY, CHUNK_BYTES), np.uint8))))
    if len(ways) == 1:
        ways[0]()
        return
    with ThreadPoolExecutor(1) as other:
        begun = other.submit(ways[1])
        ways[0]()
        begun.result()


def _chunks(size: int, ring: Memory) -> Iterator[Memory]:
    return (ring[number % len(ring)] for number in range(size // CHUNK_BYTES))


def _next(edge: Edge, kind: Kind) -> None:
    header = edge.next_header(_ANSWER_S)
    if header is None:
        raise TimeoutExceededError(f"expected the other node's answer within {_ANSWER_S:g} s, found none: is it very busy?")
    if header.kind != kind:
        raise LinkLostError(header.text or f"expected {kind.name} of the other node, found {header.kind.name}")
