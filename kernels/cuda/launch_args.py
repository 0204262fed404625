"""The arguments of launches on a device: blocks of bytes that CUDA passes to the kernels by value.

The host computes everything that depends on hyper-parameters, counts of steps or absent gradients here, with the functions of
the CPU fold, so that a kernel only loads, multiplies and stores. Parameters with the same treatment (one param_group, the same
pushes, as many steps) form one class; a model's usual fold has one class a param_group. CUDA takes
4,096 bytes of parameters, so a fold of very many parameters or pushes is several launches, in their order.

Addresses are plain numbers here: memory and streams belong to the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastps.kernels.cuda import host_fold
from fastps.kernels.cuda.users_rule import STEP_PLACE
from fastps.kernels.update.fold import FOLD_EACH, FOLD_SUM, MAX_USER_PLANES, MOST_PLANES, RULE_USER, RULES, planes_needed

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Hypers = Sequence[tuple[float, ...]]
"""For each param_group: learning rate, momentum, dampening, weight decay, beta1, beta2, epsilon, learning rate decay, flags."""

Span = tuple[int, int]
"""Memory on a device: its address, and its size in bytes."""

TILE_FLOATS = 4096  # four vectors of four floats for each of a block's 256 threads
THREADS = 256
DTYPES = {"float32": host_fold.FLOAT32, "float16": host_fold.FLOAT16, "bfloat16": host_fold.BFLOAT16}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
RULE_NAMES = {number: name for name, number in RULES.items()}
COPY_KERNEL = "fps_copy"
MOST_SUMMED = 243
"""The most pushes of a sum: so many addresses fit into one launch, where one parameter is the least that it folds."""
_COPY_BLOCKS = 264  # of a copy: two for each multiprocessor of an H100
_ALIGNMENT = 16  # of a table, in bytes, and of a segment's offset, in floats

_TILE = np.dtype([("first", "<i8"), ("length", "<i4"), ("segment", "<i4")])
_CLASS = np.dtype([("first_entry", "<i4"), ("entries", "<i4"), ("coefficients", "<i4"), ("is_plain", "<i4")])
_ENTRY = np.dtype([("gradient", "<u8"), ("coefficients", "<i4"), ("scale", "<f4")])
_ARGS = np.dtype(
    [
        *((name, "<u8") for name in ("weights_in", "weights_out", "state_in", "state_out", "halves_out", "nonfinite", "tiles")),
        ("state_stride", "<i8"),
        *((name, "<i4") for name in ("class_of_segment", "classes", "entries", "coefficients", "first_segment", "entry_count")),
        *((name, "<i4") for name in ("mode", "rule_planes", "has_average", "average_is_small")),
        ("average_fraction", "<f4"),
        ("shown_type", "<i4"),
    ]
)
_ARGS_NAMES = _ARGS.names or ()
_CHECK_ARGS = np.dtype(
    [
        *((name, "<u8") for name in ("gradient", "nonfinite", "tiles")),
        ("values", "<i8"),
        ("stamp", "<i4"),
        ("parameters", "<i4"),
    ]
)
_RUN = np.dtype([("source", "<u8"), ("target", "<u8"), ("vectors", "<i8")])
_COPY_ARGS = np.dtype([("count", "<i4"), ("blocks", "<i4"), ("runs", _RUN, (host_fold.COPY_RUNS,))])
for _name in ("TILE", "CLASS", "ENTRY", "ARGS", "CHECK_ARGS", "COPY_ARGS"):
    _sizes = globals()[f"_{_name}"].itemsize, getattr(host_fold, f"{_name}_BYTES")
    assert _sizes[0] == _sizes[1], "fold.cu and launch_args.py lay a struct out differently"


class Launch(NamedTuple):
    """One launch of a kernel: its argument, all bytes of the kernel's parameter, and its blocks."""

    argument: Bytes
    blocks: int


def fold_kernel(rule: int, dtype: str) -> str:
    """The name of the kernel for a rule's folds of gradients of a dtype."""
    return f"fps_fold_{RULE_NAMES.get(rule, 'users')}_{dtype}"


def check_kernel(dtype: str) -> str:
    """The name of the kernel that checks slots of a dtype."""
    return f"fps_check_{dtype}"


def argument_bytes(kernel: str) -> int:
    """The size of a kernel's parameter, all of which CUDA reads at a launch.

    >>> argument_bytes("fps_fold_adam_float32")
    4096
    """
    others = {COPY_KERNEL: host_fold.COPY_ARGS_BYTES} | {check_kernel(dtype): host_fold.CHECK_ARGS_BYTES for dtype in DTYPES}
    return others.get(kernel, host_fold.ARGUMENT_BYTES)


@dataclass(frozen=True)
class DevicePush:
    """One push: the address of its gradient on the device, and what a push of the CPU's `fold` has. Raises as Buffers."""

    gradient: int
    hypers: Hypers
    presence: npt.NDArray[np.bool_]
    scale: float = 1.0
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_aligned("a gradient", self.gradient)


@dataclass(frozen=True)
class Buffers:
    """Addresses on the device of weights and state, to read and to write; planes are `stride` floats apart.

    `halves_out` gets the new weights once more, in the shape's half precision; 0: they are not wanted. Raises ValueError if a
    vector of 16 bytes would not lie on a multiple of its size.
    """

    weights_in: int
    weights_out: int
    state_in: int
    state_out: int
    stride: int
    halves_out: int = 0

    def __post_init__(self) -> None:
        if self.stride % _ALIGNMENT:
            raise ValueError(f"expected planes of state a multiple of {_ALIGNMENT} floats apart, found {self.stride} floats")
        for name in ("weights_in", "weights_out", "state_in", "state_out", "halves_out"):
            _check_aligned(name, getattr(self, name))


def _check_aligned(name: str, address: int) -> None:
    if address % _ALIGNMENT:
        raise ValueError(f"expected {name} on a multiple of {_ALIGNMENT} bytes, found {address:#x}")


@dataclass(frozen=True)
class Shape:
    """The constants of all folds: the rule, the planes of state with the average's as the last, and the segments.

    `segments`: (offset, length, group) in floats, one a parameter. `shown_type`: the half precision of `halves_out`. Raises
    ValueError for what no kernel supports: a rule with sums, more planes than the rule has, or a segment that does not begin on
    a multiple of 16 floats.
    """

    rule: int
    planes: int
    ema_decay: float
    segments: tuple[tuple[int, int, int], ...]
    shown_type: str = "float16"

    def __post_init__(self) -> None:
        name = "a user's rule" if self.rule == RULE_USER else RULE_NAMES.get(self.rule)
        if name is None:
            raise ValueError(
                f"expected a rule of {', '.join(RULE_NAMES.values())}, or a user's rule without sums, found rule {self.rule}"
            )
        most = MAX_USER_PLANES if self.rule == RULE_USER else MOST_PLANES[self.rule]
        if not 0 <= self.rule_planes <= most:
            raise ValueError(f"expected at most {most} planes of {name}, found {self.rule_planes}")
        if any(offset % _ALIGNMENT or offset < 0 or length < 0 for offset, length, _ in self.segments):
            raise ValueError(f"expected segments that begin on a multiple of {_ALIGNMENT} floats")

    @property
    def rule_planes(self) -> int:
        """Planes of the rule alone."""
        return self.planes - (self.ema_decay > 0)

    @cached_property
    def groups(self) -> Counts:
        """The group of each segment."""
        return np.array([group for _, _, group in self.segments], np.int64)

    def by_group(self, begin: int, end: int) -> tuple[list[int], npt.NDArray[np.int32]]:
        """The distinct groups of some segments, and each segment's index in them."""
        if (begin, end) not in self._by_group:
            distinct, class_of_segment = np.unique(self.groups[begin:end], return_inverse=True)
            self._by_group[begin, end] = distinct.tolist(), class_of_segment.reshape(-1).astype(np.int32)
        return self._by_group[begin, end]

    @cached_property
    def _by_group(self) -> dict[tuple[int, int], tuple[list[int], npt.NDArray[np.int32]]]:
        return {}

    @cached_property
    def first_tiles(self) -> npt.NDArray[np.int64]:
        """The number of each segment's first tile, and of all tiles."""
        counts = [-(-length // TILE_FLOATS) for _, length, _ in self.segments]
        return np.cumsum([0, *counts])


def tiles_of(shape: Shape) -> Bytes:
    """Return the table of tiles of a fold as bytes. One table serves all folds of a shape."""
    return tiles_of_segments([(offset, length) for offset, length, _ in shape.segments])


def tiles_of_segments(segments: Sequence[tuple[int, int]]) -> Bytes:
    """Return a table of tiles as bytes: every segment (offset, length), in values, cut into runs of at most TILE_FLOATS.

    >>> len(tiles_of_segments([(0, 5000), (5008, 0)])) // host_fold.TILE_BYTES
    2
    """
    rows = [
        (offset + first, min(TILE_FLOATS, length - first), index)
        for index, (offset, length) in enumerate(segments)
        for first in range(0, length, TILE_FLOATS)
    ]
    return np.array(rows, _TILE).view(np.uint8).reshape(-1)


class _Tables:
    """The tables of a launch's arguments: classes, their entries and coefficients."""

    def __init__(self, shape: Shape, mode: int, pushes: Sequence[DevicePush], scale: float, rate_scale: float) -> None:
        self._shape, self._mode, self._pushes = shape, mode, pushes
        self._scale, self._rate_scale = scale, rate_scale
        self.classes: list[tuple[int, ...]] = []
        self.entries: list[tuple[float, ...]] = []
        self.coefficients: list[bytes] = []

    def add(self, group: int, steps: int, present: Sequence[int]) -> None:
        """Add a class: parameters of `group` with `steps` applications so far and a gradient in the pushes `present`."""
        first = len(self.entries)
        if self._mode == FOLD_EACH:
            among = set(present)
            for index, push in enumerate(self._pushes):
                if index in among:
                    self.entries.append((push.gradient, len(self.coefficients), 0.0))
                    self._add_coefficients(push.hypers[group], push.hypers[group][0] * push.rate_scale, push.scale, steps)
                    steps += 1
                elif self._shape.ema_decay > 0:
                    self.entries.append((0, 0, 0.0))
            self.classes.append((first, len(self.entries) - first, 0, 0))
            return
        pushes = [self._pushes[index] for index in present]
        is_plain = len({push.scale for push in pushes}) == 1
        self.entries += [(push.gradient, 0, push.scale) for push in pushes]
        self.classes.append((first, len(present), len(self.coefficients), is_plain))
        if pushes:
            rates = [push.hypers[group][0] * push.rate_scale for push in pushes]
            rate = rates[0] if len(set(rates)) == 1 else sum(rates[1:], rates[0]) / len(rates)
            scale = self._scale * (pushes[0].scale if is_plain else 1.0)
            self._add_coefficients(pushes[0].hypers[group], rate * self._rate_scale, scale, steps)

    def _add_coefficients(self, hyper: tuple[float, ...], rate: float, scale: float, steps: int) -> None:
        if self._shape.rule == RULE_USER:
            # The scale, then the rule's numbers: its hyper-parameters, and how often it was applied.
            numbers = np.array([scale, rate, *hyper[1:STEP_PLACE], steps + 1], np.float32)
            self.coefficients.append(numbers.tobytes().ljust(host_fold.COEFFICIENTS_BYTES, b"\0"))
            return
        if planes_needed(self._shape.rule, hyper) > self._shape.rule_planes:
            raise ValueError(f"expected the planes that {hyper} needs, found {self._shape.rule_planes} planes of state")
        self.coefficients.append(host_fold.coefficients_of(self._shape.rule, hyper, rate, scale, steps))


@dataclass(frozen=True)
class _Fold:
    """A fold, or a part of one, from the shape's segment `first` on. `present`: of each push, whether each segment is there."""

    shape: Shape
    mode: int
    pushes: Sequence[DevicePush]
    present: npt.NDArray[np.bool_]
    steps: Counts
    buffers: Buffers
    tiles: int
    factors: tuple[float, float]
    nonfinite: int
    first: int = 0

    def counted(self) -> Counts:
        """Each segment's count of steps after the fold."""
        counts = self.present.sum(0)
        counted: Counts = self.steps + (counts if self.mode == FOLD_EACH else (counts > 0))
        return counted

    def launches(self) -> Iterator[Launch]:
        """Yield the launches of the fold, which run in this order. Raises ValueError for a sum of too many pushes."""
        argument, segments, pushes = self._argument(), len(self.steps), len(self.pushes)
        if argument.nbytes <= host_fold.ARGUMENT_BYTES:
            begin, end = self.shape.first_tiles[[self.first, self.first + segments]]
            if end > begin:
                yield Launch(argument, int(end - begin))
        elif self.mode == FOLD_EACH and pushes > 1 and 8 * segments < argument.nbytes:  # most of it are pushes
            half, at = pushes // 2, self.buffers
            begun = replace(self, pushes=self.pushes[:half], present=self.present[:half])
            yield from begun.launches()
            there = replace(at, weights_in=at.weights_out, state_in=at.state_out)
            rest = replace(self, pushes=self.pushes[half:], present=self.present[half:], steps=begun.counted(), buffers=there)
            yield from rest.launches()
        elif segments > 1:
            for some in (slice(0, segments // 2), slice(segments // 2, segments)):
                present, steps = self.present[:, some], self.steps[some]
                yield from replace(self, present=present, steps=steps, first=self.first + some.start).launches()
        else:
            raise ValueError(f"expected a sum of at most {MOST_SUMMED} pushes, found {pushes}")

    def _argument(self) -> Bytes:
        """The bytes of one launch: all that CUDA takes, or more if the fold needs several."""
        distinct, class_of_segment = self._classes()
        tables = _Tables(self.shape, self.mode, self.pushes, *self.factors)
        for group, count, *is_present in distinct:
            tables.add(group, count, [index for index, bit in enumerate(is_present) if bit])
        at, shape = self.buffers, self.shape
        parts: dict[str, npt.NDArray[Any]] = {
            "class_of_segment": class_of_segment,
            "classes": np.array(tables.classes, _CLASS),
            "entries": np.array(tables.entries, _ENTRY),
            "coefficients": np.frombuffer(b"".join(tables.coefficients), np.uint8),
        }
        head = {
            **{name: getattr(at, name) for name in ("weights_in", "weights_out", "state_in", "state_out", "halves_out")},
            "nonfinite": self.nonfinite,
            "tiles": self.tiles + host_fold.TILE_BYTES * int(shape.first_tiles[self.first]),
            "state_stride": at.stride,
            "first_segment": self.first,
            "entry_count": len(tables.entries),
            "mode": self.mode,
            "rule_planes": shape.rule_planes,
            "shown_type": DTYPES[shape.shown_type],
            **_average(shape, bool(self.pushes)),
        }
        return _joined(head, parts)

    def _classes(self) -> tuple[list[list[int]], npt.NDArray[np.int32]]:
        """The distinct treatments of segments, [group, steps, whether each push has it], and each segment's index in them."""
        begin, end = self.first, self.first + len(self.steps)
        if len(self.steps) and (self.steps == self.steps[0]).all() and (self.present == self.present[:, :1]).all():
            groups, class_of_segment = self.shape.by_group(begin, end)
            common = [int(self.steps[0]), *self.present[:, 0].tolist()]
            return [[group, *common] for group in groups], class_of_segment
        keys = np.column_stack([self.shape.groups[begin:end], self.steps, self.present.T.astype(np.int64)])
        distinct, indices = np.unique(keys, axis=0, return_inverse=True)
        return distinct.tolist(), indices.reshape(-1).astype(np.int32)


def make_launches(
    shape: Shape,
    mode: int,
    pushes: Sequence[DevicePush],
    steps: Counts,
    buffers: Buffers,
    tiles: int,
    *,
    factors: tuple[float, float] = (1.0, 1.0),
    nonfinite: int = 0,
) -> tuple[list[Launch], Counts]:
    """Return the launches of one fold, and each parameter's count of steps after it (int64[parameters], like `steps`).

    `tiles`: the address of the shape's table of tiles. Mode, and the `factors` of gradients and of learning rates, are those of
    the CPU fold. `nonfinite`: the address of an int32, which the kernel sets to 1 if a result is non-finite, and never to 0; 0:
    it does not check. A fold of no pushes copies everything. Pushes may read what earlier ones of the same fold have written.

    Raises ValueError if hyper-parameters need more planes than there are, for too many pushes, or for inconsistent sizes.
    """
    if mode not in (FOLD_SUM, FOLD_EACH) or len(steps) != len(shape.segments):
        raise ValueError(f"expected a known mode and steps of {len(shape.segments)} parameters, found {mode} and {len(steps)}")
    present = np.array([push.presence for push in pushes], np.bool_).reshape(len(pushes), len(steps))
    fold = _Fold(shape, mode, pushes, present, steps, buffers, tiles, factors, nonfinite)
    return list(fold.launches()), fold.counted()


def check_launch(segments: Sequence[tuple[int, int]], gradient: int, nonfinite: int, stamp: int, tiles: int) -> Launch:
    """Return the launch of a check of the slot at the address `gradient`: of `segments`, whose tiles are at another address.

    `nonfinite`: the address of int32[parameters], where the kernel writes `stamp` for each parameter with a non-finite value.
    """
    values = max((sum(segment) for segment in segments), default=0)
    blocks = sum(-(-length // TILE_FLOATS) for _, length in segments)
    return Launch(np.array([(gradient, nonfinite, tiles, values, stamp, len(segments))], _CHECK_ARGS).view(np.uint8), blocks)


def aim(check: Launch, gradient: int, stamp: int) -> Launch:
    """Change a check in place: to the slot at another address, and to another stamp. Returns the check."""
    head = check.argument.view(_CHECK_ARGS)
    head["gradient"], head["stamp"] = gradient, stamp
    return check


def copy_launches(runs: Sequence[tuple[int, int, int]]) -> list[Launch]:
    """Return the launches that copy runs of memory: (from, to, bytes), on and in multiples of 16 bytes, and none of them empty.

    >>> [launch.blocks for launch in copy_launches([(64, 128, 32)] * 171)]
    [340, 264]
    """
    found, most = [], host_fold.COPY_RUNS
    for first in range(0, len(runs), most):
        some = runs[first : first + most]
        args, blocks = np.zeros(1, _COPY_ARGS), -(-_COPY_BLOCKS // len(some))
        args["count"], args["blocks"] = len(some), blocks
        args["runs"][0, : len(some)] = np.array([(source, to, size // _ALIGNMENT) for source, to, size in some], _RUN)
        found.append(Launch(args.view(np.uint8), blocks * len(some)))
    return found


def accessed(kernel: str, launch: Launch) -> tuple[list[Span], list[Span]]:
    """Return what a launch reads and what it writes. For devices that check accesses.

    Whole buffers count, with the padding between parameters.
    """
    if kernel == COPY_KERNEL:
        args = launch.argument.view(_COPY_ARGS)[0]
        runs = args["runs"][: args["count"]].tolist()
        return [(source, 16 * vectors) for source, _, vectors in runs], [(to, 16 * vectors) for _, to, vectors in runs]
    dtype = kernel.rpartition("_")[2]
    if kernel == check_kernel(dtype):
        args = launch.argument.view(_CHECK_ARGS)[0]
        slot = int(args["gradient"]), DTYPE_BYTES[dtype] * int(args["values"])
        return [(int(args["tiles"]), launch.blocks * _TILE.itemsize), slot], [
            (int(args["nonfinite"]), 4 * int(args["parameters"]))
        ]
    head = launch.argument[: _ARGS.itemsize].view(_ARGS)[0]
    floats, entries = int(head["state_stride"]), int(head["entries"])
    planes = int(head["rule_planes"]) + (head["has_average"] > 0)
    table = launch.argument[entries : entries + int(head["entry_count"]) * _ENTRY.itemsize].view(_ENTRY)
    sizes = 4 * floats, 4 * floats * planes
    reads = [(int(head["tiles"]), launch.blocks * _TILE.itemsize)]
    reads += [(int(head["weights_in"]), sizes[0]), (int(head["state_in"]), sizes[1])]
    reads += [(address, DTYPE_BYTES[dtype] * floats) for address in sorted(set(table["gradient"].tolist()) - {0})]
    writes = [(int(head["weights_out"]), sizes[0]), (int(head["state_out"]), sizes[1])]
    if head["nonfinite"]:
        writes.append((int(head["nonfinite"]), 4))
    if head["halves_out"]:
        writes.append((int(head["halves_out"]), 2 * floats))
    return [span for span in reads if span[1]], [span for span in writes if span[1]]


def _average(shape: Shape, moves: bool) -> dict[str, float]:
    """The head's words on the moving average, the last plane; a fold without pushes copies it."""
    if shape.ema_decay <= 0:
        return {"has_average": 0, "average_is_small": 0, "average_fraction": 0.0}
    fraction = np.float32(1 - shape.ema_decay)
    is_small = bool(abs(fraction) < np.float32(0.5))
    moved = float(fraction if is_small else fraction - np.float32(1))
    return {"has_average": 1 if moves else 2, "average_is_small": is_small, "average_fraction": moved}


def _joined(head: dict[str, float], parts: dict[str, npt.NDArray[Any]]) -> Bytes:
    """Join head and tables in one array, each table on a multiple of 16 bytes, with zeros up to what CUDA reads."""
    size = _aligned(_ARGS.itemsize)
    for name, part in parts.items():
        head[name] = size
        size += _aligned(part.nbytes)
    joined = np.zeros(max(size, host_fold.ARGUMENT_BYTES), np.uint8)
    joined[: _ARGS.itemsize].view(_ARGS)[0] = tuple(head[name] for name in _ARGS_NAMES)
    for name, part in parts.items():
        begin = int(head[name])
        joined[begin : begin + part.nbytes] = part.view(np.uint8).reshape(-1)
    return joined


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
