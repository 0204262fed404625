"""What lies where on the devices of a job, as data: each shard's home, the layout of an allocation, and the handle tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastps.device.interface import HANDLE_BYTES
from fastps.kernels.cuda import launch_args
from fastps.kernels.shm.arena import STATE_BUFFERS

if TYPE_CHECKING:
    from fastps.job.layout import Layout

SHOWN, FILLED = 1, 2  # a handle table's `ready`: the handles are written; this lane's part of the first weights is, too
LINE_FLOATS = 16  # of a cache line, at whose start each parameter begins
LEAST_BYTES = 256  # of an allocation, because an empty one is not possible


def handle_table_dtype(shards: int) -> np.dtype[Any]:
    """The dtype of a lane's handle table, at the end of its room for model buffers. Read and write it under the shard locks.

    `slots` and `slot_copies` name the slots that the lane owns, on its device and in host memory; `memory` and `mirrors` the
    shards that it owns, on its device and their weights in host memory. A handle of zeros names nothing.
    """
    handle = f"V{HANDLE_BYTES}"
    return np.dtype(
        [
            *(("ready", "<i8"), ("identity", "S56")),
            *((name, handle) for name in ("computed", "folded", "slots", "slot_copies")),
            *((name, handle, (shards,)) for name in ("memory", "mirrors")),
        ]
    )


def handle_table_bytes(shards: int) -> int:
    """Size of a handle table in bytes.

    >>> handle_table_bytes(1)
    448
    """
    return handle_table_dtype(shards).itemsize


def homes(shard_bytes: Sequence[int], lanes: Sequence[int]) -> tuple[int, ...]:
    """The owner lane of each shard, one of `lanes` (one a device), so that each device gets about equally many bytes.

    The largest shards are placed first, each where the fewest bytes are.

    >>> homes([4, 1, 3, 2], [0, 2])
    (0, 0, 2, 2)
    """
    placed, given = dict.fromkeys(lanes, 0), [0] * len(shard_bytes)
    for shard in sorted(range(len(shard_bytes)), key=lambda each: -shard_bytes[each]):
        given[shard] = min(lanes, key=lambda lane: placed[lane])
        placed[given[shard]] += shard_bytes[shard]
    return tuple(given)


@dataclass(frozen=True)
class Region:
    """The layout of a shard's one allocation. The shard has `floats` floats, from float `first` of a buffer on.

    With `has_halves` the weights of each buffer lie there once more in half precision. The methods return offsets in bytes.
    """

    first: int
    floats: int
    buffers: int
    planes: int
    has_halves: bool = False

    def weights(self, buffer: int) -> int:
        """The offset of a weights buffer."""
        return 4 * self.floats * buffer

    def state(self, buffer: int) -> int:
        """The offset of a state buffer: its optimizer-state tensors, one after the other."""
        return 4 * self.floats * (self.buffers + self.planes * buffer)

    def halves(self, buffer: int) -> int:
        """The offset of a weights buffer's halves, behind everything else."""
        return self.state(STATE_BUFFERS) + 2 * self.floats * buffer

    def mirror_halves(self, buffer: int) -> int:
        """The offset of the same in a mirror, behind its weights buffers."""
        return self.state(0) + 2 * self.floats * buffer

    @property
    def mirror_size(self) -> int:
        """Size in bytes of the weights buffers alone, with their halves."""
        return max(LEAST_BYTES, self.mirror_halves(self.buffers * self.has_halves))

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return max(LEAST_BYTES, self.halves(self.buffers * self.has_halves))


@dataclass(frozen=True)
class Slots:
    """The layout of one allocation of slots: of one lane, or, with a server, of all lanes one after the other."""

    floats: int
    slots: int
    lanes: int
    bytes: int  # of one gradient value

    def offset(self, lane: int, slot: int, first: int) -> int:
        """The offset in bytes of float `first` of a slot."""
        return self.bytes * (self.floats * ((lane if self.lanes > 1 else 0) * self.slots + slot) + first)

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return max(LEAST_BYTES, self.bytes * self.floats * self.slots * self.lanes)


def regions_of(layout: "Layout") -> list[Region]:
    """The region of each shard."""
    has_halves = layout.shown_type != "float32"
    return [Region(first, last - first, layout.buffers, layout.planes, has_halves) for first, last in layout.shards]


def shown_floats(layout: "Layout", shard: int) -> list[tuple[int, int]]:
    """(offset in the shard, length) of the floats that models show, as whole runs: all, or those of no half precision.

    >>> from fastps.job.layout import Layout, place
    >>> from fastps.job.specs import parse_policy
    >>> from fastps.job.update_rules import SGD
    >>> rows = [(name, (20,), (1,), 0) for name in "abcd"]
    >>> types = ["float32", "float32", "float16", "float32"]
    >>> shown_floats(Layout(place(rows, types=types), 1, SGD(lr=0.1).rule, parse_policy("bsp"), 1), 0)
    [(0, 52), (96, 20)]
    """
    first, last = layout.shards[shard]
    if layout.shown_type == "float32":
        return [(0, last - first)]
    runs: list[tuple[int, int]] = []
    for parameter in layout.parameters:
        if parameter.shard != shard or parameter.type != "float32" or not parameter.length:
            continue
        begin = parameter.offset - first
        if runs and sum(runs[-1]) + LINE_FLOATS > begin:  # only padding lies between
            begin = runs.pop()[0]
        runs.append((begin, parameter.offset - first + parameter.length - begin))
    return runs


def slots_of(layout: "Layout") -> Slots:
    """The slots that one lane owns: its own, or those of all lanes if a server owns the memory."""
    lanes = layout.lanes if layout.has_server else 1
    return Slots(layout.buffer_floats, layout.slots, lanes, launch_args.DTYPE_BYTES[layout.gradient_type])
