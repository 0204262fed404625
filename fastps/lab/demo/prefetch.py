"""Reading ahead: a thread prepares the next batches while the worker computes (Rudra, section 3.2: the learner's I/O thread).

It serves iterables other than a torch DataLoader, which has workers of its own.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def prefetch(items: Iterable[Item], depth: int = 2) -> Iterator[Iterator[Item]]:
    """Iterate over `items` while a thread prepares the next `depth` of them. An error is raised when its item is due.

    >>> with prefetch(range(5), depth=2) as ahead:
    ...     list(ahead)
    [0, 1, 2, 3, 4]
    """
    with ThreadPoolExecutor(1, thread_name_prefix="fastps-prefetch") as pool:
        taken = _take(pool, iter(items), depth)
        try:
            yield taken
        finally:
            pool.shutdown(cancel_futures=True)


def _take(pool: ThreadPoolExecutor, items: Iterator[Item], depth: int) -> Iterator[Item]:
    """Yield items in order; each one taken starts the preparation of another."""
    end = object()
    ahead: deque[Future[Item | object]] = deque(pool.submit(next, items, end) for _ in range(depth))
    while (item := ahead.popleft().result()) is not end:
        ahead.append(pool.submit(next, items, end))
        yield item  # type: ignore[misc]
