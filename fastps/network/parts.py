"""The parts of a home: ranges of the model's floats, each with its own arena, so that many travel at once.

While one part is summed, the part before it travels, another is folded, and another comes back. A part may begin inside a
parameter, because update rules work float by float; rules that sum over a parameter are refused. A model has several parts only
under a discipline whose versions contain the pushes of all nodes: all parts then make the same decisions. Under other
disciplines parts could fold different pushes, but a worker must read weights of one version.

With `local_fragments` every step carries one part, in turn. Each part then decides by itself, under any discipline, because the
node goes on with weights of several versions anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from fastps.job.layout import Layout, Parameter
from fastps.job.options import NodePolicy
from fastps.job.wire import part_count
from fastps.network.edge import CHUNK_FLOATS

_ALIGNED_FLOATS = 16  # parameters begin at multiples of this


@dataclass(frozen=True)
class Part:
    """The floats [first, last) of the whole model."""

    first: int
    last: int
    layout: Layout  # of the part's own arena, with offsets from the part's first float
    parameters: range  # the numbers of the parameters that the part has, some of them not whole


@dataclass(frozen=True)
class Cut:
    """How a home's floats are cut into parts, and which of them a step carries: all of them, or one in turn."""

    parts: list[Part]
    turns: int = 1  # after so many steps every part has been carried: with `local_fragments` the number of parts

    @property
    def in_step(self) -> int:
        """The number of parts that a step carries."""
        return len(self.parts) // self.turns

    def turn(self, step: int) -> int:
        """The number of a step's turn, from 0. Steps count from 1."""
        return (step - 1) % self.turns

    def numbers(self, step: int) -> range:
        """The numbers of the parts that a step carries."""
        first = self.turn(step) * self.in_step
        return range(first, first + self.in_step)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """For each turn the range of floats that it carries."""
        each = self.in_step
        return [(self.parts[turn * each].first, self.parts[turn * each + each - 1].last) for turn in range(self.turns)]

    def span(self, step: int) -> tuple[int, int]:
        """The range of floats that a step carries."""
        return self.spans[self.turn(step)]


def cut_of(layout: Layout, policy: NodePolicy) -> Cut:
    """Cut a home's layout: into parts that travel one after the other in a step, or into fragments, one for a step."""
    if policy.local_fragments == 1:
        return Cut(parts_of(layout))
    fragments = [_part(layout, first, last) for first, last in _even_ranges(layout.buffer_floats, policy.local_fragments)]
    return Cut(fragments, len(fragments))


def parts_of(layout: Layout) -> list[Part]:
    """Cut a home's layout between chunks. A single part has the layout itself.

    A job that goes on after a loss has one part, because a lost node may have sent only some parts of its last push.
    """
    floats = layout.buffer_floats
    chunks = -(-floats // CHUNK_FLOATS)
    count = part_count(floats)
    policy, continues = layout.policy, layout.faults.continues
    if count == 1 or continues or not policy.is_level or policy.shards > 1:
        return [whole(layout)]
    edges = [round(chunks * part / count) * CHUNK_FLOATS for part in range(count)] + [floats]
    return [_part(layout, first, last) for first, last in pairwise(edges)]


def _even_ranges(floats: int, count: int) -> Iterator[tuple[int, int]]:
    """At most `count` ranges of about equal length, which begin where a parameter may begin."""
    length = max(1, -(-floats // (count * _ALIGNED_FLOATS))) * _ALIGNED_FLOATS
    return pairwise([*range(0, max(1, floats), length), floats])


def whole(layout: Layout) -> Part:
    """The whole model as one part."""
    return Part(0, layout.buffer_floats, layout, range(len(layout.parameters)))


def _part(layout: Layout, first: int, last: int) -> Part:
    inside = [
        index
        for index, each in enumerate(layout.parameters)
        if each.offset < last and each.offset + max(1, each.length) > first
    ]
    cut = [_cut(layout.parameters[index], first, last) for index in inside]
    return Part(first, last, replace(layout, parameters=tuple(cut)), range(inside[0], inside[-1] + 1))


def _cut(parameter: Parameter, first: int, last: int) -> Parameter:
    begin, end = max(first, parameter.offset), min(last, parameter.offset + parameter.length)
    length = max(0, end - begin)
    return replace(parameter, shape=(length,), stride=(1,), offset=begin - first, shard=0)
