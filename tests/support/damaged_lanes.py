"""The words of one lane in an arena, and the ways in which tests write over them as no worker can have written them."""

import struct
from collections.abc import Callable
from typing import Any

from fastps.kernels.shm.offsets import OFFSETS, SIZES
from tests.fuzz.places import header_of


class LaneWords:
    """Lane `lane` of the arena in `memory`."""

    def __init__(self, memory: Any, lane: int) -> None:
        header = header_of(memory)
        self.memory = memory
        self.lane = header.lanes_offset + lane * header.lane_bytes
        self.ring_size = header.ring_size

    def tail(self) -> int:
        """Descriptors posted, as the lane says."""
        return int(struct.unpack_from("<Q", self.memory, self.lane + OFFSETS["lane.tail"])[0])

    def set_tail(self, tail: int) -> None:
        """Say that so many descriptors are posted."""
        struct.pack_into("<Q", self.memory, self.lane + OFFSETS["lane.tail"], tail)

    def write(self, word: str, value: int, position: int | None = None) -> None:
        """Write over a word of four bytes of a descriptor, by default of the last one."""
        position = self.tail() - 1 if position is None else position
        place = self.lane + SIZES["lane"] + position % self.ring_size * SIZES["descriptor"]
        struct.pack_into("<I", self.memory, place + OFFSETS[f"descriptor.{word}"], value)


# What is damaged, whether a combiner finds it only with a push that is not decided, and what the error says.
DAMAGES: dict[str, tuple[Callable[[LaneWords], None], bool, str]] = {
    "kind": (lambda words: words.write("kind", 99), True, "a descriptor of kind 99"),
    "slot": (lambda words: words.write("slot", 1 << 30), True, f"a descriptor of slot {1 << 30}"),
    "far tail": (
        lambda words: words.set_tail(words.tail() ^ 1 << 40),
        True,
        "a count of posted descriptors that its ring cannot hold",
    ),
    "lower tail": (lambda words: words.set_tail(0), False, "a count of posted descriptors that its ring cannot hold"),
}
