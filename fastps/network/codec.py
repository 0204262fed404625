"""Codecs: float32 values rounded to bytes that travel between nodes, in 16 or 8 bits each.

int8 has a scale for each block of 256 floats: their largest magnitude, divided by 127.

Streams of rounded floats with error feedback, so that nothing is lost over many messages.

A push travels as its sum plus the rounding error of the push before. Weights travel as the difference from what the receiver
has, so a difference also repairs the rounding of the one before. Sums and updates stay in single precision on both sides.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from fastps.job.wire import BLOCK_FLOATS, wire_bytes
from fastps.network.edge import CHUNK_FLOATS, RECEIVES_UNDER_WAY, SENDS_UNDER_WAY
from fastps.network.link import Memory


class Half:
    """16 bits a float, in a type of torch."""

    def __init__(self, link_dtype: str) -> None:
        self.link_dtype = link_dtype
        self._dtype: torch.dtype = getattr(torch, link_dtype)

    def encode(self, values: torch.Tensor, out: Memory) -> None:
        """Write float32 values as bytes. Values beyond float16's largest become infinite there."""
        torch.from_numpy(out).view(self._dtype).copy_(values)

    def decode(self, data: Memory, out: torch.Tensor) -> None:
        out.copy_(torch.from_numpy(data).view(self._dtype))


class Blocks:
    """8 bits a float, and a float32 scale for each block."""

    link_dtype = "int8"

    def encode(self, values: torch.Tensor, out: Memory) -> None:
        """See Half. A block with a value that is not finite stands for NaN, so that the home rejects the push."""
        numbers, scales = self._halves(out, len(values))
        for span, width, at in _blocks(len(values)):
            blocks = values[span].view(-1, width)
            largest = blocks.abs().amax(1)
            scales[at] = largest / 127
            factor = torch.where(largest > 0, 127 / largest, 0.0)
            numbers[span].view(-1, width).copy_(blocks.mul(factor[:, None]).round_())

    def decode(self, data: Memory, out: torch.Tensor) -> None:
        numbers, scales = self._halves(data, len(out))
        out.copy_(numbers)
        for span, width, at in _blocks(len(out)):
            out[span].view(-1, width).mul_(scales[at, None])

    @staticmethod
    def _halves(data: Memory, floats: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(data[:floats]).view(torch.int8), torch.from_numpy(data[floats:]).view(torch.float32)


def _blocks(floats: int) -> Iterator[tuple[slice, int, slice]]:
    """The whole blocks, then the rest: their floats, the floats of each block, and their scales."""
    count = floats // BLOCK_FLOATS
    whole = count * BLOCK_FLOATS
    if whole:
        yield slice(0, whole), BLOCK_FLOATS, slice(0, count)
    if whole < floats:
        yield slice(whole, floats), floats - whole, slice(count, count + 1)


Codec = Half | Blocks
"""A way to write float32 as bytes."""

CODECS: dict[str, Codec | None] = {"float32": None, "bfloat16": Half("bfloat16"), "float16": Half("float16"), "int8": Blocks()}
"""Codecs by the value of `link_dtype`; None sends the floats unchanged, without a copy."""


class RoundedSender:
    """The sender's side. It keeps two float32 values for each float of the stream.

    With `is_sum` every message is a sum, and the sender adds the rounding error of one message to the next. Otherwise a message
    is the difference between the values and what the receiver has; `begin` sets what it has at first. A message may be encoded
    again, with the same result, until `received` says that the receiver has it.
    """

    def __init__(self, codec: Codec, floats: int, *, is_sum: bool) -> None:
        self._codec = codec
        self._kept, self._next = torch.zeros(floats), torch.zeros(floats)
        self._is_encoded = False  # whether `_next` is what to keep once the receiver has the message
        self._is_sum = is_sum
        self._decoded = torch.zeros(CHUNK_FLOATS)
        self._ring = _ring(codec, SENDS_UNDER_WAY + 1)
        self._messages = 0
        self._step = 0  # the last for which `received_before` was called

    def begin(self, values: torch.Tensor) -> None:
        """Set the values that the receiver has: they were sent unrounded."""
        self._kept.copy_(values)
        self._is_encoded, self._step = False, 0

    def received(self) -> None:
        """The receiver has the message that was encoded last. Does nothing the second time."""
        if self._is_encoded:
            self._kept, self._next = self._next, self._kept
            self._is_encoded = False

    def received_before(self, step: int) -> None:
        """The receiver has begun a step, so it has the message of the step before.

        Does nothing when the same step begins again: what is encoded by then is a part of its own message.
        """
        if step > self._step:
            self.received()
            self._step = step

    def encoded(self, chunks: Iterable[torch.Tensor]) -> Iterator[Memory]:
        """Encode chunks in order, from the first float on. Only the last SENDS_UNDER_WAY messages are valid."""
        first, self._is_encoded = 0, True
        for values in chunks:
            out = self._ring[self._messages % len(self._ring)][: wire_bytes(self._codec.link_dtype, len(values))]
            self._messages += 1
            span = slice(first, first + len(values))
            kept, then, decoded = self._kept[span], self._next[span], self._decoded[: len(values)]
            wanted = torch.add(kept, values, out=then) if self._is_sum else values - kept
            self._codec.encode(wanted, out)
            self._codec.decode(out, decoded)
            if self._is_sum:
                then.sub_(decoded).nan_to_num_(0.0, 0.0, 0.0)  # a rejected push leaves no error behind
            else:
                torch.add(kept, decoded, out=then)
            first += len(values)
            yield out


class RoundedReceiver:
    """The receiver's side: memory for the messages that are under way, and the values of those that have arrived."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._ring = _ring(codec, RECEIVES_UNDER_WAY + 1)
        self._values = torch.zeros(CHUNK_FLOATS)

    def memory(self, lengths: Iterable[int]) -> Iterator[Memory]:
        for number, floats in enumerate(lengths):
            yield self._message(number, floats)

    def values(self, number: int, floats: int) -> torch.Tensor:
        """Decode message `number`, counted from 0, after it has arrived. The result is valid until the next call."""
        values = self._values[:floats]
        self._codec.decode(self._message(number, floats), values)
        return values

    def _message(self, number: int, floats: int) -> Memory:
        return self._ring[number % len(self._ring)][: wire_bytes(self._codec.link_dtype, floats)]


def _ring(codec: Codec, entries: int) -> list[Memory]:
    return [np.zeros(wire_bytes(codec.link_dtype, CHUNK_FLOATS), np.uint8) for _ in range(entries)]
