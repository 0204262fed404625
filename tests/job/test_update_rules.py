"""The table of update rules: it fits the compiled fold's, and what it makes is public."""

import inspect

import pytest

import fastps
from fastps.job import update_rules
from fastps.job.update_rules import UPDATE_RULES, Update, rule_for
from fastps.kernels.rows import rows
from fastps.kernels.update import fold


@pytest.mark.parametrize("name", [name for name, row in UPDATE_RULES.items() if not row.only_rows])
def test_a_rules_state_is_what_the_fold_writes(name: str) -> None:
    row, number = UPDATE_RULES[name], fold.RULES[name]
    assert len(row.state) == fold.MOST_PLANES[number]
    assert set(row.squares) | set(row.only_with) <= set(row.state)
    made = list(row.examples().values())
    assert made, f"{name} has no example"
    for update in made:
        assert update.rule.number == number
        assert len(update.rule.planes) == fold.planes_needed(number, update.hyper)


def test_every_compiled_rule_has_a_row() -> None:
    assert {name for name, row in UPDATE_RULES.items() if not row.only_rows} == fold.RULES.keys()
    assert {row.row_rule for row in UPDATE_RULES.values()} - {""} == rows.RULES.keys()


def test_every_function_that_makes_an_update_is_public() -> None:
    made = {
        name
        for name, function in inspect.getmembers(update_rules, inspect.isfunction)
        if not name.startswith("_") and inspect.signature(function).return_annotation is Update
    }
    assert len(made) >= len(UPDATE_RULES)
    assert made <= set(fastps.__all__)


def test_one_value_fills_the_sums_of_all_groups() -> None:
    group = {"initial_accumulator_value": 0.25}  # a group's own value comes after torch has filled the sums
    assert rule_for("adagrad", [group], {"initial_accumulator_value": 0.5}).initial == (0.5,)


def test_one_group_with_an_option_gives_all_groups_its_state() -> None:
    plain, centered = {"momentum": 0, "centered": False}, {"momentum": 0, "centered": True}
    assert rule_for("rmsprop", [plain], {}).planes == ("square_avg",)
    assert rule_for("rmsprop", [plain, centered], {}).planes == ("square_avg", "momentum_buffer", "grad_avg")
    assert rule_for("adam", [{}, {"amsgrad": True}], {}).planes == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert rule_for("sgd", [{"momentum": 0}], {}).planes == ()
    assert rule_for("sgd", [{"momentum": 0}, {"momentum": 0.5}], {}).planes == ("momentum_buffer",)
