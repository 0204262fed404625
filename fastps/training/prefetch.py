"""Reading ahead: a thread prepares the next batches while the worker computes (Rudra, section 3.2: the learner's I/O thread).

It serves iterables other than a torch DataLoader, which has workers of its own.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """An iterator over `items`; a thread prepares the next `depth` of them. An error is raised when its item is due.

    >>> with Prefetch(iter(range(5)), depth=2) as ahead:
    ...     list(ahead)
    [0, 1, 2, 3, 4]
    """

    def __init__(self, items: Iterable[Item], depth: int = 2) -> None:
        self._queue: queue.Queue[tuple[Item | None, BaseException | None, bool]] = queue.Queue(depth)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(iter(items),), name="fastps-prefetch", daemon=True)
        self._thread.start()

    def _read(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                if not self._put((item, None, True)):
                    return
            self._put((None, None, False))
        except BaseException as error:
            self._put((None, error, False))

    def _put(self, entry: tuple[Item | None, BaseException | None, bool]) -> bool:
        """Wait for room and add an entry. Returns False after `close`."""
        while not self._ends.is_set():
            try:
                self._queue.put(entry, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> "Prefetch[Item]":
        return self

    def __next__(self) -> Item:
        item, error, is_item = self._queue.get()
        if is_item:
            return item  # type: ignore[return-value]
        self._put((None, error, False))  # every later request raises it again
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop and join the thread."""
        self._ends.set()
        self._thread.join()

    def __enter__(self) -> "Prefetch[Item]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
