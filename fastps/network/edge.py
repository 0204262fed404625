"""An edge: what joins a leaf's agent with the home's, on two links. One carries headers and beats, the other carries floats.

A receive of the next header is always under way, so the end of the peer's process is seen at once; a peer that is stopped, or
cut off, is told by its missing beats. The floats of a message follow its header on the other link, in chunks, and many receives
are begun ahead, because a sender waits for its receiver.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from fastps.errors import ProtocolError
from fastps.network.link import Link, LinkLostError, Memory
from fastps.network.messages import HEADER_BYTES, Header, Kind
from fastps.system.clock import Clock

BEAT_S = 0.5
CHUNK_BYTES = 1 << 20
SENDS_UNDER_WAY = 17  # the most whose memory must stay as it is
RECEIVES_UNDER_WAY = 9  # the most that are begun and have not been taken


class Edge:
    """One side of an edge. One thread at a time may call `hear`, `send` and `receive`; any thread may call the rest.

    Args:
        timeout_s: a peer that sends nothing for this long is lost.
    """

    def __init__(self, control: Link, data: Link, clock: Clock, timeout_s: float) -> None:
        self._control, self._data = control, data
        self._clock = clock
        self._timeout_s = timeout_s
        self._inbox: queue.SimpleQueue[Header | None] = queue.SimpleQueue()
        self._speaking = threading.Lock()
        self._ends = threading.Event()
        self._loss = ""
        self._failure = ""
        self._threads = [
            threading.Thread(target=loop, name=f"fastps-{name}", daemon=True)
            for name, loop in (("edge-listener", self._listen), ("edge-beats", self._beat))
        ]
        for thread in self._threads:
            thread.start()

    # -- headers -----------------------------------------------------------------------------------

    def say(self, header: Header) -> None:
        """Send a header. Raises LinkLostError."""
        self.check()
        self._say(header)

    def _say(self, header: Header) -> None:
        memory = np.frombuffer(header.pack(), np.uint8).copy()  # torch wants memory that it may write
        try:
            with self._speaking:
                self._control.wait(self._control.send(memory), self._timeout_s)
        except LinkLostError as error:
            self._lose(str(error))
            raise

    def hear(self, timeout_s: float) -> Header | None:
        """The next header of the peer, or None after the timeout. Raises LinkLostError; its text is the peer's if it failed."""
        try:
            header = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            header = None
            self.check()
        if header is None and self._loss:
            raise LinkLostError(self._loss)
        return header

    def check(self) -> None:
        """Raise LinkLostError if the edge is lost, or if the peer has said that it failed."""
        if self._failure or self._loss:
            raise LinkLostError(self._failure or self._loss)

    @property
    def failure(self) -> str:
        """What the peer said when it failed, or an empty text."""
        return self._failure

    def _listen(self) -> None:
        memory = np.zeros(HEADER_BYTES, np.uint8)
        try:
            while not self._ends.is_set():
                self._control.wait(self._control.receive(memory), self._timeout_s)
                header = Header.unpack(memory.tobytes())
                if header.kind == Kind.BEAT:
                    continue
                if header.kind == Kind.FAILED:
                    self._failure = header.text
                self._inbox.put(header)
                if header.kind in (Kind.LEAVE, Kind.FAILED, Kind.REFUSED):
                    return
        except (LinkLostError, ProtocolError) as error:
            self._lose(str(error))

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            try:
                self._say(Header(Kind.BEAT))
            except LinkLostError:
                return

    def _lose(self, reason: str) -> None:
        self._loss = self._loss or reason
        self._inbox.put(None)

    # -- floats ------------------------------------------------------------------------------------

    def send(self, chunks: Iterable[Memory]) -> None:
        """Send memory in this order. A chunk is taken from the iterator when it is sent, so it may be computed then.

        When a chunk is taken, the sends of all but the SENDS_UNDER_WAY - 1 chunks before it have ended.
        """
        self._transfer(self._data.send(chunk) for chunk in chunks)

    def receive(self, chunks: Iterable[Memory]) -> None:
        """Receive into memory in this order; sizes are those of the peer's `send`."""
        for _ in self.receiving(chunks):
            pass

    def receiving(self, chunks: Iterable[Memory]) -> Iterator[None]:
        """Receive as `receive` does, and yield whenever the next chunk has arrived."""
        under_way: deque[object] = deque()
        for chunk in chunks:
            under_way.append(self._data.receive(chunk))
            if len(under_way) >= RECEIVES_UNDER_WAY:
                self._wait(under_way.popleft())
                yield
        for transfer in under_way:
            self._wait(transfer)
            yield

    def _transfer(self, transfers: Iterator[object]) -> None:
        under_way: deque[object] = deque()
        for transfer in transfers:
            under_way.append(transfer)
            if len(under_way) >= SENDS_UNDER_WAY:
                self._wait(under_way.popleft())
        for transfer in under_way:
            self._wait(transfer)

    def _wait(self, transfer: object) -> None:
        try:
            self._data.wait(transfer, self._timeout_s)
        except LinkLostError as error:
            self._lose(str(error))
            raise

    def close(self) -> None:
        """End the threads and close both links. Messages that were said before have arrived, or never will."""
        self._ends.set()
        self._control.close()
        self._data.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._timeout_s + 1)


def chunks_of(memory: Memory) -> list[Memory]:
    """The memory in parts of CHUNK_BYTES; the last may be shorter.

    >>> [len(chunk) for chunk in chunks_of(np.zeros(CHUNK_BYTES + 3, np.uint8))]
    [1048576, 3]
    """
    return [memory[begin : begin + CHUNK_BYTES] for begin in range(0, len(memory), CHUNK_BYTES)]
