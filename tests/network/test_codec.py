"""Rounded floats between nodes: how far one message is off, and that nothing is lost over many."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.network.codec import BLOCK_FLOATS, CODECS, Codec, Received, Sent
from fastps.network.edge import RECEIVES_UNDER_WAY
from fastps.network.sums import CHUNK_FLOATS

ROUNDED = {name: codec for name, codec in CODECS.items() if codec is not None}
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
EACH = pytest.mark.parametrize("name", list(ROUNDED))


def _sent(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = np.zeros(codec.wire_bytes(len(values)), np.uint8)
    codec.encode(values, data)
    found = torch.full_like(values, 7.0)
    codec.decode(data, found)
    return found


@EACH
@settings(deadline=None, max_examples=40)
@given(lines=st.integers(1, 70), seed=st.integers(0, 99), size=st.sampled_from([1e-4, 1.0, 100.0]))
def test_a_message_is_off_by_half_a_step_at_most(name: str, lines: int, seed: int, size: float) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(16 * lines).astype(np.float32)) * size
    found = _sent(ROUNDED[name], values)
    off = (found - values).abs()
    if name == "int8":
        for first in range(0, len(values), BLOCK_FLOATS):
            block = slice(first, first + BLOCK_FLOATS)
            assert float(off[block].max()) <= float(values[block].abs().max()) / 127 * 0.501
    else:
        assert bool((off <= values.abs() * RELATIVE[name] + 6e-8).all())


@EACH
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(name: str) -> None:
    codec = ROUNDED[name]
    assert bool((_sent(codec, torch.zeros(272)) == 0).all())
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(272)
        values[5] = bad
        assert not bool(torch.isfinite(_sent(codec, values)).all())


def test_messages_have_the_promised_sizes() -> None:
    bytes_of_a_float = {name: codec.wire_bytes(CHUNK_FLOATS) / CHUNK_FLOATS for name, codec in ROUNDED.items()}
    assert bytes_of_a_float == {"bfloat16": 2, "float16": 2, "int8": 1 + 4 / BLOCK_FLOATS}


@EACH
def test_what_rounding_takes_from_a_sum_comes_with_the_next(name: str) -> None:
    """After many messages the receiver's total is off by what one message is off, not by as many."""
    floats, codec = CHUNK_FLOATS + 80, ROUNDED[name]
    sent, received = Sent(codec, floats, is_sum=True), Received(codec)
    random = torch.Generator().manual_seed(1)
    total, arrived = torch.zeros(floats, dtype=torch.float64), torch.zeros(floats, dtype=torch.float64)
    for _ in range(20):
        values = torch.randn(floats, generator=random) * 1e-3 + 1e-3
        arrived += _journey(sent, received, values)
        total += values
    assert float((arrived - total).abs().max()) <= {"bfloat16": 4e-5, "float16": 4e-6, "int8": 8e-5}[name]


@EACH
def test_weights_arrive_exactly_once_they_stand_still(name: str) -> None:
    """The receiver has, bit for bit, what the sender thinks it has, and comes as near as the last difference is small."""
    floats, codec = CHUNK_FLOATS + 80, ROUNDED[name]
    sent, received = Sent(codec, floats, is_sum=False), Received(codec)
    random = torch.Generator().manual_seed(2)
    weights = torch.randn(floats, generator=random)
    has = weights.clone()
    sent.begin(weights)
    for step in range(12):
        if step < 6:
            weights = weights + torch.randn(floats, generator=random) * 1e-2
        has = has + _journey(sent, received, weights)
        assert torch.equal(has, sent._kept)
    assert float((has - weights).abs().max()) <= 1e-6


def _journey(sent: Sent, received: Received, values: torch.Tensor) -> torch.Tensor:
    chunks = [values[:CHUNK_FLOATS], values[CHUNK_FLOATS:]]
    lengths = [len(chunk) for chunk in chunks]
    for memory, message in zip(received.memory(lengths), sent.encoded(chunks), strict=True):
        memory[:] = message
    return torch.cat([received.values(number, length).clone() for number, length in enumerate(lengths)])


def test_messages_that_are_under_way_have_memory_of_their_own() -> None:
    received = Received(ROUNDED["int8"])
    memory = [block.ctypes.data for block in received.memory([CHUNK_FLOATS] * (RECEIVES_UNDER_WAY + 2))]
    assert len(set(memory[: RECEIVES_UNDER_WAY + 1])) == RECEIVES_UNDER_WAY + 1
    assert memory[-1] == memory[0]
