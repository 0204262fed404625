"""The sum of what the workers of a node have pushed: read from their slots, written into the memory that travels.

A parameter that a push does not have counts as zero in the sum, and as absent if no push has it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import ProtocolError
from fastps.job.update_rules import Hyper, Rule
from fastps.kernels.combining.fold_call import FoldedPush
from fastps.kernels.update import fold
from fastps.membership.job_memory import JobMemory
from fastps.network.edge import chunk_ranges

_FLAGS_END = 1 << 31


@dataclass(frozen=True)
class Terms:
    """What a sum has besides its floats: the hyper-parameters of each group, and which parameters any push has."""

    hypers: list[Hyper]
    present: npt.NDArray[np.bool_]

    @property
    def presence(self) -> bytes:
        """The bitmap of all parameters, as Worker.push takes it."""
        return self.presence_in(range(len(self.present)))

    def presence_in(self, parameters: range) -> bytes:
        """The bitmap of some parameters, in order."""
        bits = np.packbits(self.present[parameters.start : parameters.stop], bitorder="little").tobytes()
        return bits.ljust(8 * -(-len(parameters) // 64), b"\0")


Outgoing = Callable[[Sequence[torch.Tensor], int], tuple[Terms, Iterator[torch.Tensor]]]
"""What a node sends to the home: gives its terms, and its chunks from a float on, computed one by one into some tensors.

Together the tensors are as long as what is sent, and each but the last is whole chunks. May be called again, and by several
threads.
"""


def payload_bytes(groups: int, parameters: int) -> int:
    """The size of `pack`'s result."""
    return 8 * len(Hyper._fields) * groups + 8 * -(-parameters // 64)


def pack(terms: Terms) -> bytes:
    """The terms as bytes.

    >>> from fastps.job.update_rules import SGD
    >>> unpack(pack(Terms([Hyper(0.5)], np.array([True, False]))), SGD(0.1).rule, 1, 2).hypers[0].learning_rate
    0.5
    """
    return np.array(terms.hypers, np.float64).tobytes() + terms.presence


def unpack(data: bytes, rule: Rule, groups: int, parameters: int) -> Terms:
    """The terms of `pack`, which another node has sent. Raises ProtocolError.

    A fold fails, and ends the job on all nodes, if the hyper-parameters need state that the job's rule does not have.
    """
    words = np.frombuffer(data, np.float64, len(Hyper._fields) * groups)
    hypers = []
    for group, row in enumerate(words.reshape(groups, -1).tolist()):
        for name, value in zip(Hyper._fields, row, strict=True):
            if not math.isfinite(value):
                raise ProtocolError(f"expected a finite {name} in group {group}, found {value}")
        if not (0 <= row[-1] < _FLAGS_END and row[-1].is_integer()):
            raise ProtocolError(f"expected flags from 0 to {_FLAGS_END - 1} in group {group}, found {row[-1]:g}")
        needed = fold.planes_needed(rule.number, tuple(row))
        if needed > len(rule.planes):
            raise ProtocolError(
                f"expected hyper-parameters of {rule.name} with {len(rule.planes)} tensors of state in group {group}, found"
                f" some that need {needed}: build the same optimizer on all nodes, and keep its options"
            )
        hypers.append(Hyper._make([*row[:-1], int(row[-1])]))
    bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=words.nbytes), bitorder="little").view(np.bool_)
    if bits[parameters:].any():
        raise ProtocolError(f"expected bits for {parameters} parameters, found bits beyond them")
    return Terms(hypers, bits[:parameters])


class Sums:
    """Sums of a leaf arena's pushes, in order of lanes, so that their bits do not depend on the order of arrival."""

    def __init__(self, store: JobMemory) -> None:
        self._store = store
        self._floats = store.layout.buffer_floats
        self._spans = [(each.offset, each.offset + each.length) for each in store.layout.parameters]

    def slot(self, lane: int, slot: int) -> torch.Tensor:
        """All floats of a slot."""
        offset = self._store.arena.gradient_offset(lane, slot)
        return torch.from_numpy(np.frombuffer(self._store.memory, np.float32, self._floats, offset))

    def weights(self, buffer: int) -> torch.Tensor:
        """All floats of a weights buffer."""
        offset = self._store.arena.weights_offset(buffer)
        return torch.from_numpy(np.frombuffer(self._store.memory, np.float32, self._floats, offset))

    def mean_loss(self, pushes: Sequence[FoldedPush]) -> float:
        """The mean of the losses that the workers of these pushes have reported."""
        return float(np.mean([self._store.arena.counters(push.lane)["loss"] for push in pushes]))

    def begin(
        self, pushes: Sequence[FoldedPush], outs: Sequence[torch.Tensor], first: int
    ) -> tuple[Terms, Iterator[torch.Tensor]]:
        """The terms of a sum, and its chunks, which are computed one by one into `outs`, one of them after the other.

        `outs` are filled with the floats from `first` on, and each but the last is whole chunks. A single push that is not
        scaled is not copied: its own memory is handed out.
        """
        last = first + sum(map(len, outs))
        pushes = sorted(pushes, key=lambda push: (push.lane, push.slot))
        words = [self._store.slot_words(push.lane, push.slot) for push in pushes]
        present = np.logical_or.reduce([bits for _, bits in words])
        terms = Terms(words[0][0], present)
        slots = [self.slot(push.lane, push.slot) for push in pushes]
        scales = [push.scale for push in pushes]
        if not all(bits.all() for _, bits in words):  # a slot holds old values of a parameter that its push lacks
            total = torch.zeros(last - first)  # between parameters, too: int8 has one scale for a block
            for index, span in enumerate(self._spans):
                begin, end = max(span[0], first), min(span[1], last)
                for slot, scale, (_, bits) in zip(slots, scales, words, strict=True):
                    if begin < end and bits[index]:
                        total[begin - first : end - first].add_(slot[begin:end], alpha=scale)
            return terms, _chunks(total)
        if len(slots) == 1 and scales[0] == 1.0:
            return terms, _chunks(slots[0][first:last])
        return terms, _summed(slots, scales, outs, first)


def _chunks(whole: torch.Tensor) -> Iterator[torch.Tensor]:
    for first, last in chunk_ranges(0, len(whole)):
        yield whole[first:last]


def _summed(slots: list[torch.Tensor], scales: list[float], outs: Sequence[torch.Tensor], begin: int) -> Iterator[torch.Tensor]:
    for out in outs:
        for first, last in chunk_ranges(0, len(out)):
            _sum([slot[begin + first : begin + last] for slot in slots], scales, out[first:last])
            yield out[first:last]
        begin += len(out)


def _sum(terms: list[torch.Tensor], scales: list[float], total: torch.Tensor) -> None:
    first, *rest = zip(terms, scales, strict=True)
    if rest and first[1] == rest[0][1] == 1.0:
        torch.add(first[0], rest.pop(0)[0], out=total)
    else:
        torch.mul(*first, out=total)
    for term, scale in rest:
        total.add_(term, alpha=scale)
