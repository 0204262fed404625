"""How floats travel: as they are, or rounded, with what rounding takes away kept by the sender for the next time.

A push is sent as the sum plus what was left of the pushes before it. Weights are sent as the difference from what the receiver
has; what it misses is then part of the next difference. Sums and updates stay in single precision on both sides.

int8 has a scale for each block of 256 floats: their largest magnitude, over 127.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch

from fastps.network.edge import RECEIVES_UNDER_WAY, SENDS_UNDER_WAY
from fastps.network.link import Memory
from fastps.network.sums import CHUNK_FLOATS

BLOCK_FLOATS = 256


class Codec(Protocol):
    """A way to write float32 as bytes."""

    def wire_bytes(self, floats: int) -> int:
        """The bytes of so many floats."""
        ...

    def encode(self, values: torch.Tensor, out: Memory) -> None:
        """Write float32 values as bytes."""
        ...

    def decode(self, data: Memory, out: torch.Tensor) -> None:
        """Write the values that bytes stand for."""
        ...


class Half:
    """16 bits a float."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def wire_bytes(self, floats: int) -> int:
        """See Codec."""
        return 2 * floats

    def encode(self, values: torch.Tensor, out: Memory) -> None:
        """See Codec. Values beyond float16's largest become infinite there."""
        torch.from_numpy(out).view(self._dtype).copy_(values)

    def decode(self, data: Memory, out: torch.Tensor) -> None:
        """See Codec."""
        out.copy_(torch.from_numpy(data).view(self._dtype))


class Blocks:
    """8 bits a float, and a float32 scale for each block."""

    def wire_bytes(self, floats: int) -> int:
        """See Codec."""
        return floats + 4 * -(-floats // BLOCK_FLOATS)

    def encode(self, values: torch.Tensor, out: Memory) -> None:
        """See Codec. A block with a value that is not finite stands for NaN, so that the home rejects the push."""
        numbers, scales = self._halves(out, len(values))
        for span, width, at in _blocks(len(values)):
            blocks = values[span].view(-1, width)
            largest = blocks.abs().amax(1)
            scales[at] = largest / 127
            factor = torch.where(largest > 0, 127 / largest, 0.0)
            numbers[span].view(-1, width).copy_(blocks.mul(factor[:, None]).round_())

    def decode(self, data: Memory, out: torch.Tensor) -> None:
        """See Codec."""
        numbers, scales = self._halves(data, len(out))
        out.copy_(numbers)
        for span, width, at in _blocks(len(out)):
            out[span].view(-1, width).mul_(scales[at, None])

    @staticmethod
    def _halves(data: Memory, floats: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers, and behind them the scales."""
        return torch.from_numpy(data[:floats]).view(torch.int8), torch.from_numpy(data[floats:]).view(torch.float32)


def _blocks(floats: int) -> Iterator[tuple[slice, int, slice]]:
    """The whole blocks, then the rest: their floats, the floats of each block, and their scales."""
    count = floats // BLOCK_FLOATS
    whole = count * BLOCK_FLOATS
    if whole:
        yield slice(0, whole), BLOCK_FLOATS, slice(0, count)
    if whole < floats:
        yield slice(whole, floats), floats - whole, slice(count, count + 1)


CODECS: dict[str, Codec | None] = {
    "float32": None,
    "bfloat16": Half(torch.bfloat16),
    "float16": Half(torch.float16),
    "int8": Blocks(),
}
"""The ways in which floats travel, by the name of `link_dtype`; None: as they are, without a copy."""


class Sent:
    """The sender's side of one stream of floats, in chunks: what the receiver has, or what it still misses.

    With `is_sum` each message is a sum by itself, and what rounding took away is added to the next. Else each message brings
    the receiver from what it has to the values, and `begin` says what it has at first.
    """

    def __init__(self, codec: Codec, floats: int, *, is_sum: bool) -> None:
        self._codec = codec
        self._kept = torch.zeros(floats)
        self._is_sum = is_sum
        self._decoded = torch.zeros(CHUNK_FLOATS)
        self._ring = _ring(codec, SENDS_UNDER_WAY + 1)
        self._messages = 0

    def begin(self, values: torch.Tensor) -> None:
        """Note what the receiver was given without rounding."""
        self._kept.copy_(values)

    def encoded(self, chunks: Iterable[torch.Tensor]) -> Iterator[Memory]:
        """The messages for chunks, one after the other from the first float on. Few may be under way: see Edge.send."""
        first = 0
        for values in chunks:
            out = self._ring[self._messages % len(self._ring)][: self._codec.wire_bytes(len(values))]
            self._messages += 1
            self._encode(self._kept[first : first + len(values)], values, out)
            first += len(values)
            yield out

    def _encode(self, kept: torch.Tensor, values: torch.Tensor, out: Memory) -> None:
        decoded = self._decoded[: len(values)]
        wanted = kept.add_(values) if self._is_sum else values - kept
        self._codec.encode(wanted, out)
        self._codec.decode(out, decoded)
        if self._is_sum:
            kept.sub_(decoded).nan_to_num_(0.0, 0.0, 0.0)  # a push that is rejected leaves nothing behind
        else:
            kept.add_(decoded)


class Received:
    """The receiver's side: memory for the messages that are under way, and their values."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._ring = _ring(codec, RECEIVES_UNDER_WAY + 1)
        self._values = torch.zeros(CHUNK_FLOATS)

    def memory(self, lengths: Iterable[int]) -> Iterator[Memory]:
        """Memory for messages of so many floats, in turn."""
        for number, floats in enumerate(lengths):
            yield self._ring[number % len(self._ring)][: self._codec.wire_bytes(floats)]

    def values(self, number: int, floats: int) -> torch.Tensor:
        """The values of the message of that number, once it has arrived; valid until the next call."""
        values = self._values[:floats]
        self._codec.decode(self._ring[number % len(self._ring)][: self._codec.wire_bytes(floats)], values)
        return values


def _ring(codec: Codec, entries: int) -> list[Memory]:
    return [np.zeros(codec.wire_bytes(CHUNK_FLOATS), np.uint8) for _ in range(entries)]
