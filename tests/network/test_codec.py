"""Codecs: what one message is off by, values that are not finite, and streams in which nothing is lost over many messages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.job.wire import BLOCK_FLOATS, wire_bytes
from fastps.network.codec import CODECS, Codec, RoundedReceiver, RoundedSender
from fastps.network.edge import CHUNK_FLOATS, RECEIVES_UNDER_WAY

ROUNDED = {name: codec for name, codec in CODECS.items() if codec is not None}
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
EACH = pytest.mark.parametrize("name", list(ROUNDED))


def _sent(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = np.zeros(wire_bytes(codec.link_dtype, len(values)), np.uint8)
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


@pytest.mark.sampled(3)
@EACH
def test_what_rounding_takes_from_a_sum_comes_with_the_next(name: str) -> None:
    """After many messages the receiver's total is off by what one message is off, not by as many."""
    sent, received, floats, random = _stream(name, is_sum=True, seed=1)
    total, arrived = torch.zeros(floats, dtype=torch.float64), torch.zeros(floats, dtype=torch.float64)
    for _ in range(20):
        values = torch.randn(floats, generator=random) * 1e-3 + 1e-3
        arrived += _journey(sent, received, values)
        sent.received()
        total += values
    assert float((arrived - total).abs().max()) <= {"bfloat16": 4e-5, "float16": 4e-6, "int8": 8e-5}[name]


@pytest.mark.sampled(3)
@EACH
def test_weights_arrive_exactly_once_they_stand_still(name: str) -> None:
    """The receiver has, bit for bit, what the sender thinks it has, and comes as near as the last difference is small."""
    sent, received, floats, random = _stream(name, is_sum=False, seed=2)
    weights = torch.randn(floats, generator=random)
    has = weights.clone()
    sent.begin(weights)
    for step in range(12):
        if step < 6:
            weights = weights + torch.randn(floats, generator=random) * 1e-2
        has = has + _journey(sent, received, weights)
        sent.received()
        assert torch.equal(has, sent._kept)
    assert float((has - weights).abs().max()) <= 1e-6


@pytest.mark.sampled(3)
@EACH
@pytest.mark.parametrize("is_sum", [False, True])
def test_a_message_can_be_sent_again_over_another_link(name: str, is_sum: bool) -> None:
    """The second time has the same bits, even where the first time ended early."""
    sent, received, floats, random = _stream(name, is_sum=is_sum, seed=3)
    for _ in range(3):
        values = torch.randn(floats, generator=random)
        next(sent.encoded([values[:CHUNK_FLOATS], values[CHUNK_FLOATS:]]))
        first = _journey(sent, received, values)
        assert torch.equal(_journey(sent, received, values), first)
        sent.received()


@EACH
def test_a_step_that_begins_again_does_not_settle_its_own_message(name: str) -> None:
    """The first parts of an answer may be encoded before all parts of the push have come, and then the edge is lost."""
    floats, codec = CHUNK_FLOATS + 80, ROUNDED[name]
    disturbed, calm = RoundedSender(codec, floats, is_sum=False), RoundedSender(codec, floats, is_sum=False)
    received = RoundedReceiver(codec)
    random = torch.Generator().manual_seed(4)
    for step in range(1, 4):
        values = torch.randn(floats, generator=random)
        disturbed.received_before(step)
        next(disturbed.encoded([values[:CHUNK_FLOATS], values[CHUNK_FLOATS:]]))
        found = []
        for sender in (disturbed, calm):
            sender.received_before(step)
            found.append(_journey(sender, received, values))
        assert torch.equal(*found)


def _stream(name: str, *, is_sum: bool, seed: int) -> tuple[RoundedSender, RoundedReceiver, int, torch.Generator]:
    """A stream's two ends, the floats of one of its messages, and random numbers for them."""
    floats, codec = CHUNK_FLOATS + 80, ROUNDED[name]
    return RoundedSender(codec, floats, is_sum=is_sum), RoundedReceiver(codec), floats, torch.Generator().manual_seed(seed)


def _journey(sent: RoundedSender, received: RoundedReceiver, values: torch.Tensor) -> torch.Tensor:
    chunks = [values[:CHUNK_FLOATS], values[CHUNK_FLOATS:]]
    lengths = [len(chunk) for chunk in chunks]
    for memory, message in zip(received.memory(lengths), sent.encoded(chunks), strict=True):
        memory[:] = message
    return torch.cat([received.values(number, length).clone() for number, length in enumerate(lengths)])


def test_messages_that_are_under_way_have_memory_of_their_own() -> None:
    received = RoundedReceiver(ROUNDED["int8"])
    memory = [block.ctypes.data for block in received.memory([CHUNK_FLOATS] * (RECEIVES_UNDER_WAY + 2))]
    assert len(set(memory[: RECEIVES_UNDER_WAY + 1])) == RECEIVES_UNDER_WAY + 1
    assert memory[-1] == memory[0]
