"""A replica's numbers: the weights and the optimizer's state in its arena, and the sum of what its workers have pushed.

Where the job is in double precision, numbers are doubles, and a buffer has half as many of them as floats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.job.layout import GRADIENT_NUMBERS
from fastps.kernels.combining.fold_call import FoldedPush
from fastps.kernels.update import fold
from fastps.kernels.update.fold import Folding
from fastps.membership.job_memory import JobMemory
from fastps.network.spare import VersionBuffers
from fastps.network.sums import Terms

Numbers = npt.NDArray[Any]
_SLOT_TYPES = {"float32": np.float32, "float64": np.float64, "float16": np.uint16, "bfloat16": np.uint16}


@dataclass(frozen=True)
class State:
    """All that a replica has: weights [n], the planes of the optimizer's state and of the average [planes, n], and steps."""

    weights: Numbers
    planes: Numbers
    steps: npt.NDArray[np.int64]  # of each parameter

    def arrays(self) -> Iterator[Numbers]:
        """The arrays, for a copy or a broadcast."""
        yield self.weights
        if len(self.planes):
            yield self.planes
        yield self.steps

    def take(self, other: "State") -> None:
        """Copy all of another's."""
        for mine, its in zip(self.arrays(), other.arrays(), strict=True):
            mine[...] = its

    def empty(self) -> "State":
        """Memory for a state of the same form."""
        return State(np.empty_like(self.weights), np.empty_like(self.planes), np.empty_like(self.steps))


class ReplicaMemory:
    """The arena of a replica: what its agent reads and writes there."""

    def __init__(self, store: JobMemory) -> None:
        self._store, self.layout = store, store.layout
        self._width = store.layout.floats_each
        self.numbers = store.layout.buffer_floats // self._width
        self._type = np.float64 if self._width == 2 else np.float32
        self.segments = [
            (each.offset // self._width, each.length // self._width, each.group) for each in store.layout.parameters
        ]
        self.sums = torch.zeros(self.numbers, dtype=torch.float64 if self._width == 2 else torch.float32)

    def state(self, weights: int, state: int) -> State:
        """The numbers of a weights buffer and of a state buffer."""
        arena, planes = self._store.arena, self.layout.planes
        rows = np.zeros((0, self.numbers), self._type)
        if planes:
            rows = self._at(arena.plane_offset(state, 0), planes * self.numbers, self._type).reshape(planes, self.numbers)
        return State(self._at(arena.weights_offset(weights), self.numbers, self._type), rows, self._store.all_steps(state))

    def _at(self, offset: int, count: int, dtype: Any) -> Numbers:
        return np.frombuffer(self._store.memory, dtype, count, offset)

    def slot(self, lane: int, slot: int) -> torch.Tensor:
        """The gradient in a slot."""
        kind = self.layout.gradient_type
        found = torch.from_numpy(self._at(self._store.arena.gradient_offset(lane, slot), self.numbers, _SLOT_TYPES[kind]))
        return found.view(torch.float16 if kind == "float16" else torch.bfloat16) if kind.endswith("16") else found

    def halves(self, buffer: int) -> npt.NDArray[np.uint16] | None:
        """The half-precision weights of a buffer, if the model shows some."""
        if not self._store.arena.shown_type:
            return None
        return self._at(self._store.arena.halves_offset(buffer), self.numbers, np.uint16)

    def add(self, pushes: Sequence["LocalPush"], first: int, last: int) -> torch.Tensor:
        """Write the numbers [first, last) of the sum of pushes into `sums`, in order of the lanes. Returns them."""
        out = self.sums[first:last]
        if not pushes:
            return out.zero_()
        if all(push.is_whole for push in pushes):
            _add([(self.slot(push.lane, push.slot)[first:last], push.scale) for push in pushes], out)
            return out
        out.zero_()  # a slot has old values of a parameter that its push lacks
        for index, (offset, length, _) in enumerate(self.segments):
            begin, end = max(first, offset), min(last, offset + length)
            having = [push for push in pushes if begin < end and push.present[index]]
            if having:
                terms = [(self.slot(push.lane, push.slot)[begin:end], push.scale) for push in having]
                _add(terms, out[begin - first : end - first])
        return out

    def folding(self, terms: Terms, total: int, rate_scale: float, before: State, buffers: VersionBuffers) -> Folding:
        """The fold of `sums`, the sum of `total` gradients, from `before` into the buffers that are written."""
        layout, after = self.layout, self.state(buffers.weights_out, buffers.state_out)
        ema = layout.policy.ema
        hypers = [tuple(hyper) for hyper in terms.hypers]
        push = self.sums.numpy(), hypers, terms.present.tolist(), 1.0
        return Folding(
            layout.rule.number, fold.FOLD_SUM, self.segments, [push],
            before.weights, before.planes, before.steps, after.weights, after.planes, after.steps,
            scale=1.0 / total, rate_scale=rate_scale, ema_plane=layout.planes - 1 if ema else -1, ema_decay=ema,
            user_rule=layout.rule.address, gradient_type=fold.FLOAT64 if self._width == 2 else fold.FLOAT32,
            shown_type=GRADIENT_NUMBERS[layout.shown_type], halves_out=self.halves(buffers.weights_out),
        )  # fmt: skip

    def is_finite(self, buffers: VersionBuffers, first: int, last: int) -> bool:
        """Whether the numbers [first, last) of a version's weights and state are finite."""
        made = self.state(buffers.weights_out, buffers.state_out)
        return all(_is_finite(row[first:last]) for row in (made.weights, *made.planes))

    def first_bad(self, push: "LocalPush") -> int:
        """The first parameter of a push whose gradient is not finite; -1 if all are."""
        gradient = self.slot(push.lane, push.slot)
        for index, (offset, length, _) in enumerate(self.segments):
            if push.present[index] and not bool(torch.isfinite(gradient[offset : offset + length]).all()):
                return index
        return -1

    def write_halves(self, buffer: int) -> None:
        """Write a buffer's weights in half precision, too, if the model shows them."""
        self._store.write_halves(buffer)


@dataclass(frozen=True)
class LocalPush:
    """A push of one of the node's workers: its slot, the factor of its gradient, and which parameters it has."""

    lane: int
    slot: int
    scale: float
    present: npt.NDArray[np.bool_]

    @property
    def is_whole(self) -> bool:
        """Whether it has all parameters."""
        return bool(self.present.all())


def local_pushes(store: JobMemory, pushes: Sequence[FoldedPush]) -> tuple[list[LocalPush], Terms | None]:
    """The pushes of a fold in order of their lanes, and the terms of their sum; None without any."""
    pushes = sorted(pushes, key=lambda push: (push.lane, push.slot))
    words = [store.slot_words(push.lane, push.slot) for push in pushes]
    found = [LocalPush(push.lane, push.slot, push.scale, bits) for push, (_, bits) in zip(pushes, words, strict=True)]
    if not found:
        return found, None
    hypers = [
        of_group[0]._replace(learning_rate=sum(each.learning_rate for each in of_group) / len(of_group))
        if len(set(of_group)) > 1
        else of_group[0]
        for of_group in zip(*(groups for groups, _ in words), strict=True)
    ]
    return found, Terms(hypers, np.logical_or.reduce([bits for _, bits in words]))


def _add(terms: list[tuple[torch.Tensor, float]], out: torch.Tensor) -> None:
    (first, scale), *rest = terms
    if scale == 1.0 and rest and rest[0][1] == 1.0 and first.dtype == out.dtype:
        torch.add(first, rest.pop(0)[0], out=out)
    else:
        out.copy_(first)
        if scale != 1.0:
            out.mul_(scale)
    for term, factor in rest:
        out.add_(term, alpha=factor)


def _is_finite(numbers: Numbers) -> bool:
    if not len(numbers):
        return True
    least, most = torch.aminmax(torch.from_numpy(numbers))
    return bool(torch.isfinite(least) & torch.isfinite(most))
