"""How a home is cut: the parts cover all floats, and there are several only where their decisions cannot differ."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout, place
from fastps.job.options import NodePolicy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.network.edge import CHUNK_FLOATS
from fastps.network.parts import cut_of, parts_of


def _layout(lengths: list[int], sync: str = "bsp") -> Layout:
    policy = parse_policy(sync)
    rows = [(str(index), (length,), (1,), 0) for index, length in enumerate(lengths)]
    return Layout(place(rows, policy.shards), 1, SGD(lr=0.1).rule, policy, 3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(st.integers(0, 9 * CHUNK_FLOATS), min_size=1, max_size=8))
def test_parts_cover_every_float_of_every_parameter_once(lengths: list[int]) -> None:
    layout = _layout(lengths)
    parts = parts_of(layout)
    assert parts[0].first == 0
    assert parts[-1].last == layout.buffer_floats
    counted = [0] * len(lengths)
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert part.last % CHUNK_FLOATS == 0 or following is None
        assert following is None or part.last == following.first
        assert part.layout.buffer_floats == part.last - part.first
        for index, parameter in zip(part.parameters, part.layout.parameters, strict=True):
            whole = layout.parameters[index]
            assert parameter.name == whole.name
            assert part.first + parameter.offset == max(part.first, whole.offset)
            counted[index] += parameter.length
    assert counted == lengths


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(2, 20), st.integers(1, 50))
def test_fragments_cover_every_float_once_and_take_turns(lengths: list[int], fragments: int, step: int) -> None:
    layout = _layout(lengths, "asp")
    cut = cut_of(layout, NodePolicy(local_steps=fragments, local_fragments=fragments))
    assert 1 <= cut.turns == len(cut.parts) <= fragments
    assert cut.spans[0][0] == 0
    assert cut.spans[-1][1] == layout.buffer_floats
    assert all(one[1] == next_[0] for one, next_ in pairwise(cut.spans))
    assert cut.in_step == 1
    assert cut.span(step) == cut.span(step + cut.turns) == cut.spans[(step - 1) % cut.turns]
    assert cut.parts[cut.numbers(step)[0]].first == cut.span(step)[0]


def test_without_fragments_a_step_carries_all_parts() -> None:
    layout = _layout([25_000_000])
    cut = cut_of(layout, NodePolicy())
    assert cut.parts == parts_of(layout)
    assert (cut.turns, cut.in_step, cut.span(7)) == (1, len(cut.parts), (0, layout.buffer_floats))
    assert cut.numbers(7) == range(len(cut.parts))


def test_a_large_parameter_is_cut_and_a_small_model_is_not() -> None:
    assert len(parts_of(_layout([25_000_000]))) > 10
    assert len(parts_of(_layout([25_000]))) == 1


def test_a_job_that_goes_on_after_a_loss_has_one_part() -> None:
    layout = replace(_layout([25_000_000]), faults=FaultPolicy("continue"))
    assert len(parts_of(layout)) == 1


@pytest.mark.parametrize(
    "sync", ["asp", "ssp:3", "dssp:3,15", "backup:1", "psp:2,0.5,shards=4", "softsync:1", "r2sp", "bsp,shards=2"]
)
def test_a_discipline_whose_parts_could_differ_has_one(sync: str) -> None:
    layout = _layout([25_000_000, 100], sync)
    (part,) = parts_of(layout)
    assert part.layout is layout
