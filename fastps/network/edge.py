"""An edge joins the agent of a node with that of node 0. One of its two links carries headers, the other carries floats.

A receive of the next header is always under way, so the end of the peer's process is noticed at once. Missing beats reveal a
peer that is stopped or cut off. The floats of a message follow its header on the other link, in chunks. Receives begin several
chunks early, because a sender waits for its receiver.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise

import numpy as np

from fastps.errors import ProtocolError
from fastps.job.wire import CHUNK_BYTES
from fastps.network.link import Link, LinkLostError, Memory, RefusedError, TimedOutError
from fastps.network.messages import HEADER_BYTES, Header, Kind
from fastps.network.monitoring.watch import EdgeWatch
from fastps.system.clock import SYSTEM_CLOCK, Clock

BEAT_S = 0.5
CHUNK_FLOATS = CHUNK_BYTES // 4
SENDS_UNDER_WAY = 17  # the most sends at a time; their memory must not change
RECEIVES_UNDER_WAY = 9  # the most receives at a time
_RECENTLY_NS = int(2e9 * BEAT_S)
_LARGE_ONES_ARE_LOST = "; small messages pass and large ones do not: compare the MTU of both ends"
MOST_HEADERS = 1000  # that wait for this side; a peer that follows the protocol sends few before it waits for an answer


class Edge:
    """One side of an edge. Only one thread at a time may call `next_header`, `send` or `receive`; any thread may call the rest.

    A peer that sends nothing for `timeout_s` is lost. `clock` gives the stamps of headers.
    """

    is_over: Callable[[], bool] | None = None  # says whether the peer's process has ended; None where that cannot be told
    is_silent = False  # nothing can come any more: the peer has closed the edge, has ended, or was silent for the timeout
    failure = ""  # the reason that the peer gave when it failed

    def __init__(self, control: Link, data: Link, timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._control, self._data = control, data
        self._timeout_s = timeout_s
        self._clock = clock
        self.watch = EdgeWatch()  # its owner may put the watch over an earlier edge to the same peer here
        self._inbox: queue.SimpleQueue[Header | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._ends = threading.Event()
        self._has_timed_out = False
        self._heard_ns = 0  # when the last header came
        self._loss = ""
        self._threads = [
            threading.Thread(target=loop, name=f"fastps-{name}", daemon=True)
            for name, loop in (("edge-listener", self._listen), ("edge-beats", self._beat))
        ]
        for thread in self._threads:
            thread.start()

    def send_header(self, header: Header) -> None:
        """Send a header. Raises LinkLostError."""
        self.check()
        self._send_header(header)

    def _send_header(self, header: Header) -> None:
        try:
            with self._sending:
                now_ns = self._clock.now_ns()
                if header.kind == Kind.BEAT:
                    self.watch.sends(now_ns)
                memory = np.frombuffer(header.pack(now_ns), np.uint8).copy()  # torch wants memory that it may write
                self._control.wait(self._control.send(memory), self._timeout_s)
                self.watch.headers_sent += len(memory)
        except LinkLostError as error:
            self._lose(str(error))
            raise

    def next_header(self, timeout_s: float) -> Header | None:
        """The next header of the peer, or None after the timeout. Raises LinkLostError with the peer's reason, if any."""
        try:
            header = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            header = None
            self.check()
        if header is None and self._loss:
            raise LinkLostError(self._loss)
        return header

    def check(self) -> None:
        """Raise LinkLostError if the edge is lost, RefusedError if the peer has said that it failed."""
        if self.failure:
            raise RefusedError(self.failure)
        if self._loss:
            raise LinkLostError(self._loss)

    @property
    def may_return(self) -> bool:
        """Whether the connection was lost at once, and the peer still runs."""
        return not self._has_timed_out and self.is_over is not None and not self.is_over()

    def _listen(self) -> None:
        memory = np.zeros(HEADER_BYTES, np.uint8)
        try:
            while not self._ends.is_set():
                self._control.wait(self._control.receive(memory), self._timeout_s)
                self._heard_ns = now_ns = self._clock.now_ns()
                self.watch.headers_received += len(memory)
                header = Header.unpack(memory.tobytes())
                if header.kind == Kind.BEAT:
                    self.watch.hears(header.beat, header.sent_ns, now_ns)
                    continue
                if header.kind == Kind.LOST:
                    self.watch.losses += 1
                    continue
                if header.kind == Kind.FAILED:
                    self.failure = header.reason
                if header.kind == Kind.REOPEN:
                    self._lose("the other side opens another edge")
                    return
                if self._inbox.qsize() >= MOST_HEADERS:
                    raise ProtocolError(f"expected at most {MOST_HEADERS} messages that nobody has read, found more")
                self._inbox.put(header)
                if header.kind in (Kind.FAILED, Kind.REFUSED):
                    return
        except (LinkLostError, ProtocolError) as error:
            self._has_timed_out = isinstance(error, TimedOutError)
            self._lose(str(error))
            self.is_silent = True

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            try:
                self._send_header(Header(Kind.BEAT, beat=self.watch.beat()))
            except LinkLostError:
                return

    def _lose(self, reason: str) -> None:
        self._loss = self._loss or reason
        self._inbox.put(None)

    def send(self, chunks: Iterable[Memory]) -> None:
        """Send chunks in this order. Each is taken from the iterator just before its send, so it may be computed then.

        At that time all sends but those of the SENDS_UNDER_WAY - 1 chunks before it have ended.
        """
        under_way: deque[object] = deque()
        for chunk in chunks:
            under_way.append(self._data.send(chunk))
            self.watch.floats_sent += len(chunk)
            if len(under_way) >= SENDS_UNDER_WAY:
                self._wait(under_way.popleft())
        for transfer in under_way:
            self._wait(transfer)

    def receive(self, chunks: Iterable[Memory]) -> None:
        """Receive into memory in this order; sizes are those of the peer's `send`."""
        deque(self.receiving(chunks), maxlen=0)

    def receiving(self, chunks: Iterable[Memory]) -> Iterator[None]:
        """Begin to receive as `receive` does. The result yields whenever the next chunk has arrived."""
        rest = iter(chunks)
        under_way = deque(map(self._receive, islice(rest, RECEIVES_UNDER_WAY)))
        return self._arriving(under_way, rest)

    def _receive(self, chunk: Memory) -> tuple[object, int]:
        return self._data.receive(chunk), len(chunk)

    def _arriving(self, under_way: deque[tuple[object, int]], rest: Iterator[Memory]) -> Iterator[None]:
        while under_way:
            transfer, size = under_way.popleft()
            self._wait(transfer)
            self.watch.floats_received += size
            del transfer  # a transfer that is held keeps a lost link open
            yield
            under_way.extend(map(self._receive, islice(rest, 1)))

    def _wait(self, transfer: object) -> None:
        try:
            self._data.wait(transfer, self._timeout_s)
        except TimedOutError as error:
            beats_come = self._clock.now_ns() - self._heard_ns < _RECENTLY_NS
            self._lose(reason := f"{error}{_LARGE_ONES_ARE_LOST if beats_come else ''}")
            raise TimedOutError(reason) from error
        except LinkLostError as error:
            self._lose(str(error))
            raise

    def ask_to_reopen(self) -> None:
        """Say that this edge is lost and another one is wanted. Floats cannot travel any more.

        No memory is written from now on, once the caller holds no transfer.
        """
        self._data.close()
        is_lost_already = bool(self._loss)
        self._lose("this side has closed the edge")
        if not (is_lost_already and self.is_silent):
            with contextlib.suppress(LinkLostError):
                self._send_header(Header(Kind.REOPEN))

    def abandon(self) -> None:
        """Close a lost edge. Does not wait for the threads, which end soon. May be called twice."""
        if not self._ends.is_set():
            self.ask_to_reopen()
            self._ends.set()
            self._control.close()

    def close(self) -> None:
        """End the threads and close both links. Headers sent before have arrived, or never will."""
        self._ends.set()
        self._control.close()
        self._data.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._timeout_s + 1)


def chunk_ranges(first: int, last: int) -> Iterator[tuple[int, int]]:
    """The ranges of the chunks of the floats [first, last).

    >>> list(chunk_ranges(0, CHUNK_FLOATS + 3))
    [(0, 262144), (262144, 262147)]
    """
    return pairwise([*range(first, last, CHUNK_FLOATS), last])


def chunks_of(memory: Memory) -> list[Memory]:
    """Split the bytes of floats into chunks.

    >>> [len(chunk) for chunk in chunks_of(np.zeros(CHUNK_BYTES + 12, np.uint8))]
    [1048576, 12]
    """
    return [memory[4 * first : 4 * last] for first, last in chunk_ranges(0, len(memory) // 4)]
