"""The parts of a home: ranges of the model's floats, each in an arena of its own, so that many are under way at once.

While one part is summed, the part before it travels, one is folded, and one comes back. A part may begin in the middle of a
parameter, because update rules work float by float. Only a discipline whose versions have the pushes of all nodes is cut: every
part then makes the same decisions. Under the others the parts could differ in what they have folded, and a worker reads weights
of one version.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from fastps.job.layout import Layout, Parameter
from fastps.network.edge import CHUNK_BYTES

_LEAST_CHUNKS = 3
_MOST_PARTS = 50
_CHUNK_FLOATS = CHUNK_BYTES // 4


@dataclass(frozen=True)
class Part:
    """The floats [first, last) of the whole model.

    Attributes:
        layout: the layout of the part's own arena, with offsets from the part's first float.
        parameters: the range of the numbers of the parameters that the part has, some of them not whole.
    """

    first: int
    last: int
    layout: Layout
    parameters: range

    @property
    def floats(self) -> int:
        """The number of floats that travel."""
        return self.last - self.first


def parts_of(layout: Layout) -> list[Part]:
    """Cut a home's layout, at the edges of chunks.

    A discipline that is not cut has one part, which is the layout itself.
    """
    floats = layout.buffer_floats
    chunks = -(-floats // _CHUNK_FLOATS)
    count = max(1, min(_MOST_PARTS, chunks // _LEAST_CHUNKS))
    if count == 1 or not layout.policy.is_level or layout.policy.shards > 1:
        return [Part(0, floats, layout, range(len(layout.parameters)))]
    edges = [round(chunks * part / count) * _CHUNK_FLOATS for part in range(count)] + [floats]
    return [_part(layout, first, last) for first, last in pairwise(edges)]


def _part(layout: Layout, first: int, last: int) -> Part:
    inside = [
        index
        for index, each in enumerate(layout.parameters)
        if each.offset < last and each.offset + max(1, each.length) > first
    ]
    cut = [_cut(layout.parameters[index], first, last) for index in inside]
    return Part(first, last, replace(layout, parameters=tuple(cut)), range(inside[0], inside[-1] + 1))


def _cut(parameter: Parameter, first: int, last: int) -> Parameter:
    """What a part has of a parameter, as a flat one."""
    begin, end = max(first, parameter.offset), min(last, parameter.offset + parameter.length)
    length = max(0, end - begin)
    return replace(parameter, shape=(length,), stride=(1,), offset=begin - first, shard=0)
