"""Which work on streams is ordered: vector clocks of streams, and the accesses of memory that no event orders.

Two accesses of the same bytes, one of them a write, need an order: the stream's own, or events that were recorded behind the
one and waited for before the other. An order that only happens to be right in one run does not count, so one run finds a
missing event however the work was interleaved.
"""

from dataclasses import dataclass, field

from fastps.device.interface import DeviceError
from fastps.kernels.cuda.launch_args import Span

Clock = dict[int, int]
"""For each stream: how many pieces of its work are known to be done."""


class HazardError(DeviceError):
    """Two pieces of work use the same memory, one of them writes it, and nothing orders them."""


def merge(into: Clock, other: Clock) -> None:
    """Add what the other clock knows.

    >>> clock = {1: 2}
    >>> merge(clock, {1: 1, 2: 5})
    >>> clock
    {1: 2, 2: 5}
    """
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


@dataclass(slots=True)
class _Access:
    begin: int
    end: int
    writes: bool
    stream: int
    count: int
    text: str


@dataclass
class Accesses:
    """The accesses of one allocation that later ones must be ordered behind.

    >>> accesses = Accesses("slots")
    >>> accesses.add((0, 8), True, 1, {1: 1}, "copy")
    >>> accesses.add((4, 4), False, 2, {1: 1, 2: 1}, "fold")
    >>> accesses.add((4, 4), True, 3, {1: 1, 3: 1}, "hasty")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fastps.lab.gpus.hazards.HazardError: slots: 'hasty' writes bytes 4 to 8, which 'fold' reads: expected an event between...
    """

    name: str
    _found: list[_Access] = field(default_factory=list)

    def add(self, span: Span, writes: bool, stream: int, clock: Clock, text: str) -> None:
        """Add an access of `span` (offset, size) by the newest piece of `stream`, which knows `clock`. Raises HazardError."""
        begin, end = span[0], span[0] + span[1]
        kept = []
        for other in self._found:
            overlaps = other.begin < end and begin < other.end
            if overlaps and (writes or other.writes) and clock.get(other.stream, 0) < other.count:
                verbs = ("reads", "writes")
                raise HazardError(
                    f"{self.name}: {text!r} {verbs[writes]} bytes {begin} to {end}, which {other.text!r}"
                    f" {verbs[other.writes]}: expected an event between them, found none"
                )
            is_covered = begin <= other.begin and other.end <= end
            if not (is_covered and (writes or (not other.writes and other.stream == stream))):
                kept.append(other)
        kept.append(_Access(begin, end, writes, stream, clock[stream], text))
        self._found = kept
