"""What lies where on the devices of a job, as data: each shard's home, the layout of an allocation, and the handle tables.

Memory has an owner, which has a number. A worker's number is its lane. A server has one device for each GPU of the job, and its
device k has number `lanes` + k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastps.device.interface import HANDLE_BYTES
from fastps.job.layout import Layout
from fastps.kernels.cuda import launch_args
from fastps.kernels.shm.arena import STATE_BUFFERS
from fastps.kernels.shm.counts import MAX_SHARDS

SHOWN, FILLED = 1, 2  # a handle table's `ready`: the handles are written; this lane's part of the first weights is, too
WAVES = 2
LINE_FLOATS = 16  # of a cache line, at whose start each parameter begins
LEAST_BYTES = 256  # of an allocation, because an empty one is not possible


def handle_table_dtype(shards: int) -> np.dtype[Any]:
    """The dtype of an owner's handle table, in its lane's room for model buffers. Read and write it under the shard locks.

    `computed` and `folded` name the owner's two events of each wave; `slots` the slots that it owns, and `memory` the shards
    that it owns. A handle of zeros names nothing.
    """
    handle = f"V{HANDLE_BYTES}"
    return np.dtype(
        [
            *(("ready", "<i8"), ("identity", "S56")),
            ("slots", handle),
            *((name, handle, (WAVES,)) for name in ("computed", "folded")),
            ("memory", handle, (shards,)),
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


def shards_of(size: int, devices: int, bucket: int | None) -> int:
    """How many shards a model of `size` bytes has on `devices` devices, equally many on each.

    The model is cut into buckets of about `bucket` bytes (None: one bucket), and each bucket into a shard for each device: so
    the gradients that appear last are folded by all devices, and not by one while the others have nothing to do.

    >>> shards_of(400, 2, None), shards_of(400, 2, 100), shards_of(410, 2, 100), shards_of(10, 1, 100)
    (2, 8, 10, 1)
    """
    wanted = -(-size // bucket) if bucket is not None else 1
    return devices * max(1, min(wanted, MAX_SHARDS // devices))


def waits_before_posting(layout: Layout) -> bool:
    """Whether each worker waits, on the host, until its gradients are computed before it posts them.

    A fold of all workers' pushes of a version waits for each of them anyway, so there a push may be posted while its gradients
    are still computed. Every other fold, and every grant by the time of a push, goes by what has arrived: a push that is not
    computed yet would hold up the folds behind it. A job that goes on without lost workers counts no push that may never be,
    and one that rejects non-finite pushes must have looked at a push before it posts it.
    """
    return layout.policy.fold != "all" or layout.faults.continues or layout.faults.nonfinite != "allow"


def waves_of(layout: Layout) -> tuple[int, ...]:
    """The wave of each shard. Shards of a wave share events and the streams of their folds and copies.

    Backward reaches the first bucket last, which has a shard on each home: it is wave 1, and all others are wave 0, whose folds
    need not wait for it. Where no fold begins before backward has ended, all shards are one wave.
    """
    homes_of = len(set(layout.owner_lanes))
    is_cut = len(layout.shards) > homes_of and not waits_before_posting(layout)
    return tuple(int(is_cut and shard < homes_of) for shard in range(len(layout.shards)))


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

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return max(LEAST_BYTES, self.halves(self.buffers * self.has_halves))


@dataclass(frozen=True)
class Slots:
    """The layout of an owner's one allocation of slots: those of `lanes`, one lane after the other."""

    floats: int
    slots: int
    lanes: tuple[int, ...]
    bytes: int  # of one gradient value

    def offset(self, lane: int, slot: int, first: int) -> int:
        """The offset in bytes of float `first` of a slot."""
        return self.bytes * (self.floats * (self.lanes.index(lane) * self.slots + slot) + first)

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return max(LEAST_BYTES, self.bytes * self.floats * self.slots * len(self.lanes))


def shown_floats(layout: Layout, shard: int) -> list[tuple[int, int]]:
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


def slot_owners(layout: Layout) -> tuple[int, ...]:
    """The owner of each lane's slots: the lane itself, or a device of the server."""
    if layout.slot_owners:
        return layout.slot_owners
    return (layout.lanes,) * layout.lanes if layout.has_server else tuple(range(layout.lanes))


def slots_of(layout: Layout, owner: int) -> Slots:
    """The slots that an owner has."""
    lanes = tuple(lane for lane, found in enumerate(slot_owners(layout)) if found == owner)
    return Slots(layout.buffer_floats, layout.slots, lanes, launch_args.DTYPE_BYTES[layout.gradient_type])


def owners_at(layout: Layout, lane: int) -> range:
    """The owners that a lane's process is: the lane itself, or the devices of the server."""
    if lane < layout.lanes:
        return range(lane, lane + 1)
    return range(lane, 1 + max(*layout.owner_lanes, *slot_owners(layout)))


def placed_on(layout: Layout, gpus: Sequence[str], bucket: int | None = None) -> Layout:
    """This layout with its shards and slots on the GPUs of the workers: `gpus` has each worker's, and [] means one for all.

    Each shard gets a home, and each lane room for handles. A layout of one shard is cut into as many shards as GPUs, unless the
    discipline needs one; into as many for each `bucket` bytes, where shards can be folded while backward goes on.
    """
    numbers = {gpu: number for number, gpu in enumerate(dict.fromkeys(gpus))}
    count = max(1, len(numbers))
    if len(layout.shards) == 1 and layout.policy.grant != "round-robin":
        shards = shards_of(4 * layout.buffer_floats, count, None if waits_before_posting(layout) else bucket)
        layout = layout.with_shards(shards) if shards > 1 else layout
    owners = [gpus.index(gpu) for gpu in numbers] or [0]
    slots: tuple[int, ...] = ()
    if layout.has_server:
        owners = [layout.lanes + number for number in range(count)]
        slots = tuple(layout.lanes + (numbers[gpus[lane]] if gpus else 0) for lane in range(layout.lanes))
    homes_of = homes([4 * (end - begin) for begin, end in layout.shards], owners)
    tables = count if layout.has_server else 1
    extra_bytes = layout.extra_bytes + tables * handle_table_bytes(len(homes_of))
    return replace(layout, owner_lanes=homes_of, slot_owners=slots, extra_bytes=extra_bytes)
