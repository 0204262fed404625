"""An arena in memory of the test's own, planned and formatted as a store does it, whose lanes the test drives."""

import mmap
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastps.kernels.protocol.lane import KIND_PUSH, Lane
from fastps.kernels.shm.arena import Arena
from fastps.kernels.shm.format import format_memory
from fastps.kernels.shm.offsets import OFFSETS
from fastps.kernels.shm.plan import plan
from tests.fuzz.places import header_of

FLOATS = 32
ASP: dict[str, Any] = {"fold": "each", "grant": "at-once"}
BSP: dict[str, Any] = {"fold": "all", "grant": "next-version"}


def _helping(memory: Any, lane: int) -> int:
    header = header_of(memory)
    return int(header.lanes_offset + lane * header.lane_bytes + OFFSETS["lane.helping"])


def set_helping(memory: Any, lane: int, word: int) -> None:
    """Let a lane say that it helps with a fold, as one says that is stopped there; 0: that it does not, 1: with shard 0's."""
    struct.pack_into("<I", memory, _helping(memory, lane), word)


def helps(memory: Any, lane: int) -> bool:
    """Whether a lane says that it helps with a fold."""
    return struct.unpack_from("<I", memory, _helping(memory, lane)) != (0,)


def planned(**measures: Any) -> tuple[bytes, int, int]:
    """The plan of an arena: two lanes, and one parameter under plain SGD, where the measures do not say otherwise."""
    usual = {"lanes": 2, "slots": 2, "ring_size": 8, "groups": 1, "parameters": 1, "buffer_floats": FLOATS, "rule": 0}
    return plan(**{**usual, "state_planes": 0, "extra_bytes": 0, "buffers": 5, **measures})  # type: ignore[arg-type]


class Job:
    """An arena with a lane for each worker, and, where no segments are given, a parameter in each shard; weights are 1."""

    def __init__(
        self, lanes: int, policy: Mapping[str, Any], *, shards: int = 1, slots: int = 2, floats: int = FLOATS, started: int = 0,
        segments: list[tuple[int, int, int]] | None = None, **measures: Any,
    ) -> None:  # fmt: skip
        self.slots, self.floats = slots, floats * shards
        spans = [(floats * shard, floats * (shard + 1)) for shard in range(shards)]
        segments = segments or [(first, floats, 0) for first, _ in spans]
        usual = {"parameters": len(segments), "buffer_floats": self.floats, "buffers": lanes + 3, "shards": shards}
        header, size, _ = planned(lanes=lanes, slots=slots, **{**usual, **measures})
        self.memory = mmap.mmap(-1, size)
        format_memory(self.memory, header, segments, shards=spans, started=started, **policy)
        self.header = header_of(self.memory)
        self.arena = Arena(self.memory)
        self.lanes = [Lane(self.arena, index) for index in range(lanes)]
        self.posts = [0] * lanes
        self.weights()[:] = 1.0

    def _view(self, offset: int) -> Any:
        return np.frombuffer(self.memory, np.float32, self.floats, offset)

    def weights(self, buffer: int | None = None) -> Any:
        """The weights in a buffer; in the committed one of shard 0 if none is named."""
        return self._view(self.arena.weights_offset(self.arena.committed()[1] if buffer is None else buffer))

    def gradient(self, lane: int, slot: int) -> Any:
        """A lane's slot."""
        return self._view(self.arena.gradient_offset(lane, slot))

    def current(self) -> float:
        """The one value that all weights of the committed version have."""
        (value,) = set(self.weights().tolist())
        return float(value)

    def post(
        self, lane: int, gradient: float, now_ns: int, learning_rate: float = 1.0, *, kind: int = KIND_PUSH, samples: int = 0,
        step: int | None = None,
    ) -> None:  # fmt: skip
        """Fill the lane's next slot and post it; the step is the number of the lane's posts, if none is given."""
        slot, own = self.posts[lane] % self.slots, self.lanes[lane]
        self.gradient(lane, slot)[:] = gradient
        own.set_hyper(slot, 0, learning_rate, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
        own.set_presence(slot, b"\xff" * 8)
        own.set_versions(slot)
        assert own.post(kind, self.posts[lane] if step is None else step, slot, own.version, now_ns, samples=samples)
        self.posts[lane] += 1

    def write(self, offset: int, form: str, *values: int) -> None:
        """Write words over."""
        struct.pack_into(form, self.memory, offset, *values)
