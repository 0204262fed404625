"""What one side of the edges between two nodes observes: bytes, beats, the other node's figures, and the offset of its clock.

A watch lives longer than an edge: a lost edge is opened again, and the counts go on. Every beat has the time at which it left,
the other side's last stamp, and when that was heard. So both sides learn the offset of their clocks, as with NTP.
"""

import struct
from collections import deque
from collections.abc import Callable

from fastps.membership.node_board import NodeFigures
from fastps.system.clock_offset import OffsetEstimator

_ECHO = struct.Struct("<qq")
_STAMPS = 64  # of the last beats; an echo names one of them
Message = Callable[[int, int, int, int, int], None]


class EdgeWatch:
    """The watch over the edges to one node.

    `figures` gives what this node says of itself in its next beat. `message` records a message of a trace: kind, peer, step,
    and its beginning and end in ns; None without a trace.

    >>> here, there = EdgeWatch(), EdgeWatch(lambda: NodeFigures(workers=2))
    >>> here.sends(1_000)
    >>> there.hears(here.beat(), 1_000, 6_010)  # the other clock is 5,000 ns ahead, and the way takes 10 ns
    >>> there.sends(6_030)
    >>> here.hears(there.beat(), 6_030, 1_040)
    >>> here.clock.best(1_040).offset_ns, here.told.workers
    (5000, 2)
    """

    def __init__(self, figures: Callable[[], NodeFigures] = NodeFigures, peer: int = 0, message: Message | None = None) -> None:
        self._figures, self._peer, self._message = figures, peer, message
        self.told: NodeFigures | None = None  # the other node's figures in its last beat
        self.told_ns = 0  # when they came
        self.clock = OffsetEstimator()  # of the other node's clock to this one
        # Bytes. Each has one writing thread.
        self.headers_sent = self.headers_received = self.floats_sent = self.floats_received = 0
        self.losses = 0  # of other nodes, as the home on this one has said
        self._stamps: deque[int] = deque(maxlen=_STAMPS)
        self._heard = (0, 0)  # the other side's last stamp, and when it came

    @property
    def sent_bytes(self) -> int:
        """All bytes that were sent, without those that the link adds."""
        return self.headers_sent + self.floats_sent

    @property
    def received_bytes(self) -> int:
        """All bytes that have come, without those that the link adds."""
        return self.headers_received + self.floats_received

    def beat(self) -> bytes:
        """The contents of the next beat."""
        return _ECHO.pack(*self._heard) + self._figures().pack()

    def sends(self, stamp_ns: int) -> None:
        """Note the time at which a beat leaves."""
        self._stamps.append(stamp_ns)

    def hears(self, contents: bytes, stamp_ns: int, now_ns: int) -> None:
        """Take a beat of the other side: its contents, its stamp, and when it came. Ignores what no watch says."""
        if len(contents) < _ECHO.size:
            return
        echo_ns, heard_ns = _ECHO.unpack_from(contents)
        self._heard = (stamp_ns, now_ns)
        if echo_ns in self._stamps:
            self.clock.add(echo_ns, heard_ns, stamp_ns, now_ns)
        if (told := NodeFigures.unpack(contents[_ECHO.size :])) is not None:
            self.told, self.told_ns = told, now_ns

    def begin(self) -> None:
        """Forget the other agent: a new one speaks for the node, perhaps on another machine."""
        self.clock.forget()
        self._stamps.clear()
        self._heard = (0, 0)
        self.told, self.told_ns = None, 0

    def message(self, kind: int, step: int, begin_ns: int, end_ns: int) -> None:
        """Record a message between the two nodes, if this job is traced."""
        if self._message is not None:
            self._message(kind, self._peer, step, begin_ns, end_ns)
