"""Reading ahead: order, depth, errors, and a thread that ends."""

import threading
import time
from collections.abc import Iterator

import pytest

from fastps.lab.demo.prefetch import prefetch
from tests.support.processes import wait_until


def _noted(made: list[int], count: int) -> Iterator[int]:
    """Items, each of which is noted when it is made."""
    for index in range(count):
        made.append(index)
        yield index


def test_items_come_in_order_and_no_more_than_the_depth_ahead() -> None:
    made: list[int] = []
    with prefetch(_noted(made, 100), depth=3) as ahead:
        assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
        wait_until(lambda: len(made) >= 8)
        time.sleep(0.1)
        assert len(made) == 8, "five were taken, and three wait"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastps-prefetch")]


def test_an_error_comes_when_its_item_is_due() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is on fire")

    with prefetch(items()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(OSError, match="on fire"):
            next(ahead)


def test_making_overlaps_with_using() -> None:
    made: list[int] = []
    with prefetch(_noted(made, 20)) as ahead:
        for index in ahead:
            wait_until(lambda index=index: len(made) >= min(index + 2, 20))  # the next is made while this one is used
