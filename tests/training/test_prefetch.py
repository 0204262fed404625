"""Reading ahead: order, depth, errors, and a thread that ends."""

import threading
import time
from collections.abc import Iterator

import pytest

from fastps.training.prefetch import prefetch


def test_items_come_in_order_and_no_more_than_the_depth_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for index in range(100):
            made.append(index)
            yield index

    with prefetch(items(), depth=3) as ahead:
        assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
        time.sleep(0.1)
        # Five were taken, and three wait.
        assert len(made) == 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastps-prefetch")]


def test_an_error_comes_when_its_item_is_due() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is on fire")

    with prefetch(items()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(OSError, match="on fire"):
            next(ahead)


@pytest.mark.timing
def test_making_overlaps_with_using() -> None:
    def items() -> Iterator[int]:
        for index in range(20):
            time.sleep(0.01)
            yield index

    began = time.monotonic()
    with prefetch(items()) as ahead:
        for _ in ahead:
            time.sleep(0.01)
    assert time.monotonic() - began < 0.35, "20 of each take 0.4 s one after the other"
