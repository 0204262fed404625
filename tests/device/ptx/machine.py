"""Kernels of PTX run on the CPU, all threads side by side in NumPy arrays, with the checks of a GPU's memory.

Of the threads that are furthest behind, one basic block runs at a time. That is any order of threads, which is right because no
kernel has a barrier, shared memory or an atomic. A load or a store that is not aligned to its size, or not in the memory that
was given to the launch, is an error. So is an operation that is not in the tables: one that ptxas may round in another way (a
multiplication without `.rn` may be fused), flushes denormals, or orders memory.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.kernels.cuda.launch_args import Span
from tests.device.ptx.program import Instruction, Kernel
from tests.support.folds.fold_reference import fused_multiply_add

Values = npt.NDArray[Any]
SIGNED = {"s16": np.int16, "s32": np.int32, "s64": np.int64}
UNSIGNED = {f"{letter}{bits}": np.dtype(f"u{bits // 8}").type for letter in "ub" for bits in (16, 32, 64)}
DTYPES: dict[str, Any] = {**SIGNED, **UNSIGNED, "u8": np.uint8, "f16": np.float16, "f32": np.float32, "pred": np.bool_}
ONE = np.float32(1)


class AccessError(ValueError):
    """A load or a store that a GPU would refuse."""


def _ordered(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(a, b) & ~np.isnan(a) & ~np.isnan(b)


def _or_nan(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def _shift(to: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A shift whose count stops at the width of the value."""

    def shifted(a: Values, count: Values) -> Values:
        width = 8 * a.dtype.itemsize
        by = np.minimum(count.view(np.uint32), width).astype(a.dtype)
        is_all = by == width
        found: Values = to(a, np.where(is_all, width - 1, by).astype(a.dtype))
        return np.where(is_all & (a.dtype.kind == "u"), a.dtype.type(0), found)

    return shifted


def _wide(of: np.dtype[Any]) -> Any:
    return np.dtype(f"{of.kind}{2 * of.itemsize}")


_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
FLOATS: dict[str, Callable[..., Any]] = {
    "add.rn": np.add,
    "sub.rn": np.subtract,
    "mul.rn": np.multiply,
    "fma.rn": fused_multiply_add,
    "div.rn": np.divide,
    "rcp.rn": lambda a: ONE / a,
    "sqrt.rn": np.sqrt,
    "abs": np.abs,
    "neg": np.negative,
    "max": np.fmax,
    "min": np.fmin,
    "setp.nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "setp.num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    **{f"setp.{name}": _ordered(compare) for name, compare in _COMPARE.items()},
    **{f"setp.{name}u": _or_nan(compare) for name, compare in _COMPARE.items()},
}
INTEGERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "mul.lo": np.multiply,
    "mul.wide": lambda a, b: a.astype(_wide(a.dtype)) * b.astype(_wide(b.dtype)),
    "mad.lo": lambda a, b, c: a * b + c,
    "div": lambda a, b: a // b,
    "rem": lambda a, b: a % b,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    **{f"setp.{name}": compare for name, compare in _COMPARE.items()},
}
PREDICATES: dict[str, Callable[..., Any]] = {**_JOIN, "not": np.logical_not}
CONVERSIONS = {f"cvt.{to}.{of}" for to in (*SIGNED, *UNSIGNED) for of in (*SIGNED, *UNSIGNED)} | {"cvt.f32.f16"}
_SPACES = ("ld", "st", "ld.global", "st.global", "ld.param")


class Memory:
    """What a launch may read and write: spans of this process's memory. What it may write it may read, too."""

    def __init__(self, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        self._readable, self._writable = _joined([*reads, *writes]), _joined(writes)
        begins, ends = self._readable
        self._begin = int(begins[0]) & -64
        size = (int(ends[-1]) - self._begin + 63) & -64
        # No byte between the spans is touched: each access is checked.
        self._bytes: Values = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._begin))

    def at(self, addresses: Values, size: int, dtype: Any, is_store: bool, text: str) -> tuple[Values, Values]:
        """The memory as an array of a dtype, and the places of the addresses in it. Raises AccessError."""
        if (wrong := addresses[addresses % np.uint64(size) != 0]).size:
            raise AccessError(f"misaligned (error 716): {size} bytes at {int(wrong[0]):#x} by {text}")
        begins, ends = self._writable if is_store else self._readable
        span = np.searchsorted(begins, addresses, "right") - 1
        is_outside = (span < 0) | (addresses + np.uint64(size) > ends[span])
        if is_outside.any():
            where = int(addresses[is_outside][0])
            raise AccessError(f"outside of the launch's memory (error 700): {size} bytes at {where:#x} by {text}")
        return self._bytes.view(dtype), (addresses - np.uint64(self._begin)) // np.uint64(np.dtype(dtype).itemsize)


def _joined(spans: Sequence[Span]) -> tuple[Values, Values]:
    """The begins and ends of spans in order; those that overlap are one."""
    found: list[list[int]] = []
    for begin, length in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], begin + length)
        else:
            found.append([begin, begin + length])
    begins, ends = np.array(found, np.uint64).reshape(-1, 2).T
    return begins, ends


class Threads:
    """The threads of one launch. `run` ends when all have returned."""

    def __init__(self, kernel: Kernel, argument: Values, blocks: int, threads: int, memory: Memory) -> None:
        """`argument`: the bytes of the parameters, by value, in memory that the launch may read."""
        self._kernel, self._memory, self._count = kernel, memory, blocks * threads
        begin = argument.ctypes.data
        self._parameters = {name: np.array([begin + at], np.uint64) for name, at in kernel.parameters.items()}
        number = np.arange(self._count, dtype=np.uint32)
        special = {"%tid.x": number % threads, "%ctaid.x": number // threads, "%ntid.x": np.full(self._count, threads)}
        self._special: dict[str, Values] = {name: values.astype(np.uint32) for name, values in special.items()}
        self._registers: dict[str, Values] = {}
        self._now: Any = slice(None)  # the threads that run
        self._next = np.zeros(self._count, np.int64)  # each thread's next basic block

    def run(self) -> None:
        """Run all threads. Raises AccessError, and ValueError for an operation that is in no table."""
        end = len(self._kernel.blocks)
        with np.errstate(all="ignore"):
            while (at := int(self._next.min())) < end:
                threads = np.flatnonzero(self._next == at)
                self._now = slice(None) if len(threads) == self._count else threads
                self._next[self._now] = at + 1
                for instruction in self._kernel.blocks[at]:
                    self._step(instruction, end)

    def _step(self, instruction: Instruction, end: int) -> None:
        op = instruction.op
        if op in ("bra", "bra.uni", "ret"):
            goal = end if op == "ret" else self._kernel.labels[instruction.operands[0]]
            if not instruction.guard:
                self._next[self._now] = goal
                return
            taken = self._read(instruction.guard, "pred") ^ instruction.is_negated
            self._next[self._now] = np.where(taken, goal, self._next[self._now])
            return
        if instruction.guard:
            raise ValueError(f"expected a guard of branches alone, found {instruction.text}")
        head, kind, action = decoded(op)
        if head in ("ld", "st"):
            self._move(instruction, kind, action)
            return
        to, *operands = instruction.operands
        if head == "mov" and "{" in to + "".join(operands):
            self._halves(to, operands[0], kind)
            return
        if head == "selp":
            values = np.where(self._read(operands[2], "pred"), *(self._read(each, kind) for each in operands[:2]))
        elif head == "setp" and isinstance(action, tuple):
            values = action[1](action[0](*(self._read(each, kind) for each in operands[:2])), self._read(operands[2], "pred"))
        else:
            kinds = [kind, "u32"] if head in ("shl", "shr") else [kind] * len(operands)
            values = action(*(self._read(each, of) for each, of in zip(operands, kinds, strict=True)))
        self._write(to, values)

    def _move(self, instruction: Instruction, kind: str, width: Any) -> None:
        """Load or store a vector of `width` values."""
        is_store = instruction.op.startswith("st")
        value, place = instruction.operands[::-1] if is_store else instruction.operands
        base, _, offset = place.strip("[]").partition("+")
        addresses = self._read(base, "u64") + np.uint64(int(offset or 0) % 2**64)
        dtype = np.dtype(DTYPES[kind])
        memory, at = self._memory.at(addresses, width * dtype.itemsize, dtype, is_store, instruction.text)
        for index, name in enumerate(part.strip() for part in value.strip("{}").split(",")):
            if is_store:
                memory[at + np.uint64(index)] = self._read(name, kind)
            else:
                self._write(name, memory[at + np.uint64(index)])

    def _halves(self, to: str, source: str, kind: str) -> None:
        """`mov` that takes a register apart, or puts one together."""
        half = np.dtype(f"u{np.dtype(DTYPES[kind]).itemsize // 2}")
        if to.startswith("{"):
            parts = np.ascontiguousarray(np.broadcast_to(self._read(source, kind), self._shape)).view(half).reshape(-1, 2)
            for index, name in enumerate(part.strip() for part in to.strip("{}").split(",")):
                if name != "_":
                    self._write(name, parts[:, index])
            return
        parts = np.empty((*self._shape, 2), half)
        for index, name in enumerate(part.strip() for part in source.strip("{}").split(",")):
            parts[:, index] = self._read(name, f"u{8 * half.itemsize}")
        self._write(to, parts.view(DTYPES[kind])[:, 0])

    @property
    def _shape(self) -> tuple[int]:
        return (self._count if isinstance(self._now, slice) else len(self._now),)

    def _read(self, operand: str, kind: str) -> Values:
        """An operand's values of a type, for the threads that run: a register, a special one, or a number."""
        dtype = np.dtype(DTYPES[kind])
        if operand in self._special:
            special: Values = self._special[operand][self._now]
            return special.view(dtype)
        if operand in self._parameters:
            return self._parameters[operand]
        if operand.startswith("%"):
            values: Values = self._registers[operand][self._now]
            if values.dtype.itemsize == dtype.itemsize:
                return values.view(dtype)
            return values.astype(UNSIGNED[f"u{8 * dtype.itemsize}"]).view(dtype)
        if operand.startswith("0f"):
            return np.array([int(operand[2:], 16)], np.uint32).view(dtype)
        number = int(operand, 0)
        return np.array([number % 2 ** (8 * dtype.itemsize) if kind != "pred" else bool(number)], f"u{dtype.itemsize}").view(
            dtype
        )

    def _write(self, register: str, values: Values) -> None:
        kind = self._kernel.registers[register.rstrip("0123456789").removeprefix("%")]
        dtype = np.dtype(np.bool_ if kind == "pred" else UNSIGNED[f"b{kind[1:]}"])
        if values.dtype.kind == "f":
            values = values.view(f"u{values.dtype.itemsize}")
        if register not in self._registers:
            self._registers[register] = np.zeros(self._count, dtype)
        self._registers[register][self._now] = values.astype(dtype)


@cache
def decoded(op: str) -> tuple[str, str, Any]:
    """An operation's first word, the type of its operands, and what it does. Raises ValueError if it is in no table.

    >>> decoded("ld.global.v4.f32")
    ('ld', 'f32', 4)
    >>> decoded("mul.f32")
    Traceback (most recent call last):
        ...
    ValueError: expected an operation of the tables of tests/device/ptx, found mul.f32
    """
    head, *middle, kind = op.split(".")
    name = ".".join([head, *middle])
    if head in ("ld", "st"):
        width = int(middle.pop()[1:]) if middle and middle[-1] in ("v2", "v4") else 1
        if ".".join([head, *middle]) in _SPACES and kind in DTYPES:
            return head, kind, width
    elif op in CONVERSIONS:
        dtype = DTYPES[middle[0]]
        return head, kind, lambda a: a.astype(dtype)
    elif name in ("mov", "selp") or op in ("cvta.to.global.u64", "cvta.param.u64"):
        return head, kind, lambda a: a
    elif kind in DTYPES:
        table = FLOATS if kind == "f32" else PREDICATES if kind == "pred" else INTEGERS
        if name in table and not (head in ("div", "rem") and kind in SIGNED):  # NumPy's rounds down
            return head, kind, table[name]
        if head == "setp" and middle[1:] and middle[1] in _JOIN and f"setp.{middle[0]}" in table:
            return head, kind, (table[f"setp.{middle[0]}"], _JOIN[middle[1]])
    raise ValueError(f"expected an operation of the tables of tests/device/ptx, found {op}")
