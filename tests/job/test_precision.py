"""What a job with float64 parameters cannot have is refused in one sentence."""

from dataclasses import replace

import numpy as np
import pytest

import fastps
from fastps.job.layout import GradientType, Layout, place
from fastps.job.plan import plan
from fastps.job.precision import check_double, check_types
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.kernels.update import fold


def _layout(kind: GradientType, *, table: bool = False, pushed: GradientType | None = None) -> Layout:
    rows = [("w", (5, 3), (3, 1), 0), ("b", (3,), (1,), 0)]
    parameters = place(rows, 1, {0} if table else (), [kind, kind])
    return Layout(parameters, 1, SGD(lr=0.1).rule, parse_policy("bsp"), 2, gradient_type=pushed or kind)


def test_a_double_takes_two_floats_of_the_arena() -> None:
    single, double = _layout("float32"), _layout("float64")
    assert [(each.offset, each.length, each.size) for each in single.parameters] == [(0, 15, 15), (16, 3, 3)]
    assert [(each.offset, each.length, each.size) for each in double.parameters] == [(0, 30, 15), (32, 6, 3)]
    assert (single.shown_type, double.shown_type) == ("float32", "float32")
    assert single.digest() != double.digest()
    twice = place([("w", (10, 3), (3, 1), 0), ("b", (6,), (1,), 0)], 1)
    assert plan(double)[1] == plan(replace(single, parameters=twice))[1], "the arena of twice as many floats"


@pytest.mark.parametrize("types", [["float64", "float32"], ["bfloat16", "float64"]])
def test_float64_beside_another_type_is_refused(types: list[GradientType]) -> None:
    with pytest.raises(fastps.UnsupportedError, match="expected float64 for all parameters or for none, found"):
        check_types(types)


def test_tables_users_rules_and_other_pushed_types_are_refused() -> None:
    check_double(_layout("float64"))
    check_double(_layout("float32", table=True))
    with pytest.raises(fastps.UnsupportedError, match=r"parameter 'w': expected a table \(sparse=True\) in float32"):
        check_double(_layout("float64", table=True))
    with pytest.raises(fastps.UnsupportedError, match="to be pushed in float64, found bfloat16"):
        check_double(_layout("float64", pushed="bfloat16"))
    layout = _layout("float64")
    with pytest.raises(fastps.UnsupportedError, match="is compiled for float32"):
        check_double(replace(layout, rule=replace(layout.rule, number=fold.RULE_USER)))


def test_the_store_takes_arrays_of_float64_and_refuses_a_mix() -> None:
    with pytest.raises(fastps.UnsupportedError, match="expected float64 for all parameters or for none"):
        fastps.Store.create({"w": np.ones(3), "b": np.ones(3, np.float32)}, SGD(lr=0.1))
    with pytest.raises(fastps.UnsupportedError, match="to be pushed in float64, found float16"):
        fastps.Store.create({"w": np.ones(3)}, SGD(lr=0.1), gradient_type="float16")
