"""The lane's ring against a model: contents, order, full ring, wrap-around, and two processes at once."""

import mmap
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.kernels.combining.ring import Ring
from tests.support import processes
from tests.support.sizes import sample_and_full


@pytest.mark.parametrize("size", [0, 3, 12])
def test_size_must_be_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Ring(bytearray(4096), size)


def test_memory_must_hold_the_ring() -> None:
    with pytest.raises(ValueError, match="at least"):
        Ring(bytearray(Ring.bytes_for(8) - 1), 8)


@given(size=st.sampled_from([1, 2, 4, 8]), posts=st.lists(st.booleans(), max_size=200))
def test_any_order_of_posts_and_takes_agrees_with_a_queue(size: int, posts: list[bool]) -> None:
    ring = Ring(bytearray(Ring.bytes_for(size)), size)
    model: deque[tuple[int, int]] = deque()
    for step, is_post in enumerate(posts):
        if is_post:
            assert ring.post(step, step % 3) == (len(model) < size)
            if len(model) < size:
                model.append((step, step % 3))
        else:
            assert ring.take() == (model.popleft() if model else None)
        assert len(ring) == len(model)


def _in_two_processes(size: int, count: int, seed: int) -> tuple[int, int]:
    """Produce in a child, consume here; returns how often the ring was found full and how often empty."""
    memory = mmap.mmap(-1, Ring.bytes_for(size))
    child = processes.start(lambda: Ring(memory, size).produce(count, seed))
    empty = Ring(memory, size).consume(count, seed)
    [full] = processes.results([child], 60)
    return full, empty


@sample_and_full(100_000, 10_000_000, "descriptors")
@pytest.mark.timeout(300)  # two that spin take turns by whole time slices on a machine that has no core for each
def test_two_processes_exchange_millions_of_descriptors_in_order(descriptors: int) -> None:
    seed = random.Random(20261121).getrandbits(60)
    _, empty = _in_two_processes(256, descriptors, seed)
    assert empty > 0, "the ring was never empty: the test did not meet that case"


@pytest.mark.slow
@pytest.mark.timeout(110)
@pytest.mark.parametrize("size", [1, 2])
def test_small_rings_are_full_and_wrap_all_the_time(size: int) -> None:
    full, _ = _in_two_processes(size, 30_000, seed=size)
    assert full > 0, "expected the producer to find the ring full at least once"


def test_consumer_notices_a_wrong_descriptor() -> None:
    memory = bytearray(Ring.bytes_for(4))
    Ring(memory, 4).produce(3, seed=1)
    with pytest.raises(AssertionError, match="seed 2"):
        Ring(memory, 4).consume(3, seed=2)
