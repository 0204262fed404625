"""What the fold refuses: jobs that make no sense, and that it says so."""

from typing import Any

import numpy as np
import pytest

from fastps.kernels.update import fold as compiled
from fastps.kernels.update.fold import FOLD_EACH, FOLD_SUM, RULE_ADAM
from tests.support.fold_jobs import ADAGRAD_ROWS, ADAM_ROWS, RMSPROP_ROWS, SGD_ROWS, Row, assert_same_bits, make_job


def refused(match: str, **changes: Any) -> None:
    """A job of one parameter is folded as it is, and refused with `changes`."""
    arguments: dict[str, Any] = {
        "rule": RULE_ADAM,
        "mode": FOLD_SUM,
        "segments": [(0, 32, 0)],
        "pushes": [(np.ones(32, np.float32), [ADAM_ROWS[0].hyper], [True], 1.0)],
        "weights": np.ones(32, np.float32),
        "state": np.zeros((2, 32), np.float32),
        "steps": np.zeros(1, np.int64),
    }
    compiled.fold(**arguments)
    if changes.get("pushes") == "too many":
        changes["pushes"] = arguments["pushes"] * (compiled.MAX_PUSHES + 1)
    with pytest.raises(ValueError, match=match):
        compiled.fold(**{**arguments, **changes})


def test_too_many_pushes_are_refused() -> None:
    refused("status -1", pushes="too many")


def test_as_many_pushes_as_may_be_are_folded() -> None:
    job = make_job(SGD_ROWS[3], compiled.MAX_PUSHES, "own_loss_scales", seed=7, lengths=[1, 17])
    for mode in (FOLD_SUM, FOLD_EACH):
        assert_same_bits(job.fold(mode, "auto"), job.fold_by_reference(mode), mode)


@pytest.mark.parametrize("rule", [-1, 9])
def test_an_unknown_rule_is_refused(rule: int) -> None:
    refused("status -2", rule=rule)


def test_adam_with_one_state_plane_is_refused() -> None:
    refused("status -2", state=np.zeros((1, 32), np.float32))


@pytest.mark.parametrize(
    ("row", "planes"), [(SGD_ROWS[3], 0), (ADAGRAD_ROWS[0], 0), (RMSPROP_ROWS[2], 1), (RMSPROP_ROWS[3], 2)]
)
def test_hyper_parameters_that_need_more_planes_than_there_are_are_refused(row: Row, planes: int) -> None:
    pushes = [(np.ones(32, np.float32), [row.hyper], [True], 1.0)]
    refused("status -2", rule=row.rule, pushes=pushes, state=np.zeros((planes, 32), np.float32))


def test_an_average_that_is_not_the_last_plane_is_refused() -> None:
    for plane in (0, 2, -2):
        refused("status -2", ema_plane=plane)
    refused("status -2", ema_plane=1)  # Adam then has one plane of its own


@pytest.mark.parametrize("segment", [(16, 17, 0), (-1, 5, 0), (0, -1, 0), (48, 1, 0)])
def test_a_segment_out_of_range_is_refused(segment: tuple[int, int, int]) -> None:
    refused("segments within 32 floats", segments=[segment])


def test_measures_that_do_not_fit_are_refused() -> None:
    refused("steps for 1 parameters", steps=np.zeros(2, np.int64))
    refused("state of 32 floats", state=np.zeros((2, 31), np.float32))
    refused("gradients of 32 numbers", pushes=[(np.ones(31, np.float32), [ADAM_ROWS[0].hyper], [True], 1.0)])


def test_an_unknown_instruction_set_is_refused() -> None:
    refused("instruction set of this machine", instruction_set="abacus")
