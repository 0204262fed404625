"""Push and pull in separate threads while the next gradient is computed: Rudra-adv* (section 3.3).

The push thread sends one gradient at a time: it sends the next only after the last was delivered, so gradients are never summed
on the way. The pull thread receives versions without a pause. The newest received one stays pinned until the worker takes it by
swapping pins. The caller passes the push and the transfer as functions.
"""

import threading
from collections.abc import Callable

from fastps.errors import damaged
from fastps.kernels.protocol.lane import Lane
from fastps.system.clock import Clock

_LOOK_NS = 200_000  # the interval at which the pull thread polls for a new version


class Background:
    """The push and pull threads of one worker. `transfer` makes the injected transfer of a pull."""

    def __init__(self, lane: Lane, transfer: Callable[[], object], clock: Clock) -> None:
        self._lane = lane
        self._transfer = transfer
        self._clock = clock
        self._changed = threading.Condition()
        self._delivery: Callable[[], None] | None = None
        self._failure: BaseException | None = None
        self._ready: tuple[int, int] | None = None
        self._ends = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=f"fastps-{name}", daemon=True)
            for name, loop in (("push", self._send_loop), ("pull", self._pull_loop))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, deliver: Callable[[], None]) -> None:
        """Hand the next gradient to the push thread, once the last was delivered. Raises the exception of its delivery."""
        self.wait_until_delivered()
        with self._changed:
            self._delivery = deliver
            self._changed.notify_all()

    def wait_until_delivered(self) -> None:
        """Wait until no gradient is in flight. Raises the exception of a thread that failed."""
        with self._changed:
            while self._delivery is not None and self._failure is None:
                self._changed.wait(0.05)
            if self._failure is not None:
                raise self._failure

    def newest(self) -> int | None:
        """Swap to the newest weights that were received. Return their buffer, or None if there are no newer ones."""
        with self._changed:
            if self._ready is None:
                return None
            buffer, version = self._ready
            self._lane.take_prefetched(buffer, version)
            self._ready = None
        return buffer

    def close(self) -> None:
        """End both threads. A gradient in flight is delivered first, unless a thread failed."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _send_loop(self) -> None:
        while True:
            with self._changed:
                while self._delivery is None and not self._ends:
                    self._changed.wait()
                deliver = self._delivery
            if deliver is None:
                return
            deliver()
            with self._changed:
                self._delivery = None
                self._changed.notify_all()

    def _pull_loop(self) -> None:
        """Fetch each new version once. It replaces an older version that the worker has not taken, when it is received."""
        version = self._lane.version
        while not self._ends:
            if self._lane.arena.shard_version(0) == version:
                self._clock.sleep_ns(_LOOK_NS)
                continue
            buffer, version = self._lane.prefetch()
            if buffer < 0:
                raise damaged("the commit word")
            self._transfer()
            with self._changed:
                self._lane.keep_prefetched(buffer)
                self._ready = (buffer, version)
