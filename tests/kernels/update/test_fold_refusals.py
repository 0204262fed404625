"""What the fold refuses: jobs that make no sense, and that it says so."""

from typing import Any

import numpy as np
import pytest

from fastps.kernels.update import fold as compiled
from fastps.kernels.update.fold import FOLD_EACH, FOLD_SUM, RULE_ADAM
from tests.support.folds.fold_jobs import ADAGRAD_ROWS, ADAM_ROWS, RMSPROP_ROWS, SGD_ROWS, assert_same_bits, make_job

FLOATS, STATE = np.ones(32, np.float32), np.zeros((2, 32), np.float32)
PUSH: Any = (FLOATS, [ADAM_ROWS[0].hyper], [True], 1.0)


@pytest.mark.parametrize(("match", "changes"), [
    ("status -1", {"pushes": [PUSH] * (compiled.MAX_PUSHES + 1)}),
    *(("status -2", {"rule": rule}) for rule in (-1, 9)),
    ("status -2", {"state": STATE[:1]}),
    *(("status -2", {"ema_plane": plane}) for plane in (0, 2, -2)),  # not the last plane
    ("status -2", {"ema_plane": 1}),  # Adam then has one plane of its own
    *(("segments within 32 floats", {"segments": [each]}) for each in ((16, 17, 0), (-1, 5, 0), (0, -1, 0), (48, 1, 0))),
    ("steps for 1 parameters", {"steps": np.zeros(2, np.int64)}),
    ("state of 32 floats", {"state": np.zeros((2, 31), np.float32)}),
    ("gradients of 32 numbers", {"pushes": [(FLOATS[:31], *PUSH[1:])]}),
    ("instruction set of this machine", {"instruction_set": "abacus"}),
    *(
        ("status -2", {"rule": row.rule, "pushes": [(FLOATS, [row.hyper], *PUSH[2:])], "state": np.resize(STATE, (planes, 32))})
        for row, planes in ((SGD_ROWS[3], 0), (ADAGRAD_ROWS[0], 0), (RMSPROP_ROWS[2], 1), (RMSPROP_ROWS[3], 2))
    ),
])  # fmt: skip
def test_a_job_that_makes_no_sense_is_refused(match: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"rule": RULE_ADAM, "mode": FOLD_SUM, "segments": [(0, 32, 0)], "pushes": [PUSH]}
    arguments |= {"weights": FLOATS, "state": STATE, "steps": np.zeros(1, np.int64)}
    compiled.fold(**arguments)
    with pytest.raises(ValueError, match=match):
        compiled.fold(**{**arguments, **changes})


def test_as_many_pushes_as_may_be_are_folded() -> None:
    job = make_job(SGD_ROWS[3], compiled.MAX_PUSHES, "own_loss_scales", seed=7, lengths=[1, 17])
    for mode in (FOLD_SUM, FOLD_EACH):
        assert_same_bits(job.fold(mode, "auto"), job.fold_by_reference(mode), mode)
