"""Streams of rounded floats: nothing is lost over many messages, and both sides agree to the bit on what has arrived."""

import pytest
import torch

from fastps.network.codec import CODECS, RoundedReceiver, RoundedSender
from fastps.network.edge import CHUNK_FLOATS, RECEIVES_UNDER_WAY

ROUNDED = {name: codec for name, codec in CODECS.items() if codec is not None}
EACH = pytest.mark.parametrize("name", list(ROUNDED))


@pytest.mark.sampled(3)
@EACH
def test_what_rounding_takes_from_a_sum_comes_with_the_next(name: str) -> None:
    """After many messages the receiver's total is off by what one message is off, not by as many."""
    floats, codec = CHUNK_FLOATS + 80, ROUNDED[name]
    sent, received = RoundedSender(codec, floats, is_sum=True), RoundedReceiver(codec)
    random = torch.Generator().manual_seed(1)
    total, arrived = torch.zeros(floats, dtype=torch.float64), torch.zeros(floats, dtype=torch.float64)
    for _ in range(20):
        values = torch.randn(floats, generator=random) * 1e-3 + 1e-3
        arrived += _journey(sent, received, values)
        sent.settle()
        total += values
    assert float((arrived - total).abs().max()) <= {"bfloat16": 4e-5, "float16": 4e-6, "int8": 8e-5}[name]


@pytest.mark.sampled(3)
@EACH
def test_weights_arrive_exactly_once_they_stand_still(name: str) -> None:
    """The receiver has, bit for bit, what the sender thinks it has, and comes as near as the last difference is small."""
    floats, codec = CHUNK_FLOATS + 80, ROUNDED[name]
    sent, received = RoundedSender(codec, floats, is_sum=False), RoundedReceiver(codec)
    random = torch.Generator().manual_seed(2)
    weights = torch.randn(floats, generator=random)
    has = weights.clone()
    sent.begin(weights)
    for step in range(12):
        if step < 6:
            weights = weights + torch.randn(floats, generator=random) * 1e-2
        has = has + _journey(sent, received, weights)
        sent.settle()
        assert torch.equal(has, sent._kept)
    assert float((has - weights).abs().max()) <= 1e-6


@pytest.mark.sampled(3)
@EACH
@pytest.mark.parametrize("is_sum", [False, True])
def test_a_message_can_be_sent_again_over_another_link(name: str, is_sum: bool) -> None:
    """The second time has the same bits, even where the first time ended early."""
    floats, codec = CHUNK_FLOATS + 80, ROUNDED[name]
    sent, received = RoundedSender(codec, floats, is_sum=is_sum), RoundedReceiver(codec)
    random = torch.Generator().manual_seed(3)
    for _ in range(3):
        values = torch.randn(floats, generator=random)
        next(sent.encoded([values[:CHUNK_FLOATS], values[CHUNK_FLOATS:]]))
        first = _journey(sent, received, values)
        assert torch.equal(_journey(sent, received, values), first)
        sent.settle()


@EACH
def test_a_step_that_begins_again_does_not_settle_its_own_message(name: str) -> None:
    """The first parts of an answer may be encoded before all parts of the push have come, and then the edge is lost."""
    floats, codec = CHUNK_FLOATS + 80, ROUNDED[name]
    disturbed, calm = RoundedSender(codec, floats, is_sum=False), RoundedSender(codec, floats, is_sum=False)
    received = RoundedReceiver(codec)
    random = torch.Generator().manual_seed(4)
    for step in range(1, 4):
        values = torch.randn(floats, generator=random)
        disturbed.settle_before(step)
        next(disturbed.encoded([values[:CHUNK_FLOATS], values[CHUNK_FLOATS:]]))
        found = []
        for sender in (disturbed, calm):
            sender.settle_before(step)
            found.append(_journey(sender, received, values))
        assert torch.equal(*found)


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
