"""Codecs: float32 values rounded to bytes that travel between nodes, in 16 or 8 bits each.

int8 has a scale for each block of 256 floats: their largest magnitude, divided by 127.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from fastps.network.link import Memory

BLOCK_FLOATS = 256


class Codec(Protocol):
    """A way to write float32 as bytes."""

    def wire_bytes(self, floats: int) -> int:
        """The number of bytes for this many floats."""
        ...

    def encode(self, values: torch.Tensor, out: Memory) -> None:
        """Write float32 values as bytes."""
        ...

    def decode(self, data: Memory, out: torch.Tensor) -> None:
        """Write the values that the bytes represent."""
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
"""Codecs by the value of `link_dtype`; None sends the floats unchanged, without a copy."""
