"""Gradients pushed in half precision: widened exactly, then summed and applied in single precision like any other."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fastps.kernels.update import fold as compiled
from fastps.kernels.update.fold import BFLOAT16, FLOAT16, FOLD_EACH, FOLD_SUM, RULE_SGD
from tests.support.fold_jobs import ISAS, MODES, ROWS, SGD_ROWS, Floats, Row, assert_same_bits, bits, make_job

TYPES = pytest.mark.parametrize("gradient_type", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
TORCH_TYPES = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}


def halved(gradient: Floats, gradient_type: int) -> npt.NDArray[np.float16] | npt.NDArray[np.uint16]:
    """A gradient as torch rounds it to half precision; bfloat16 as its bits."""
    half = torch.from_numpy(gradient).to(TORCH_TYPES[gradient_type])
    found: npt.NDArray[np.uint16] = half.view(torch.uint16).numpy()
    return found.view(np.float16) if gradient_type == FLOAT16 else found


@ROWS
@MODES
@TYPES
def test_folds_of_half_precision_are_the_references_bit_for_bit(row: Row, mode: int, gradient_type: int) -> None:
    for seed, situation in enumerate(("in_all", "absent_in_one", "own_loss_scales")):
        for pushes in (1, 3, 6):
            job = make_job(row, pushes, situation, seed, lengths=[1, 17, 1025])
            halves = [(halved(push[0], gradient_type), *push[1:]) for push in job.pushes]
            job = replace(job, pushes=halves, gradient_type=gradient_type)
            expected = job.fold_by_reference(mode)
            for isa in compiled.instruction_sets():
                assert_same_bits(job.fold(mode, isa), expected, (isa, situation, pushes))


@ISAS
@TYPES
def test_every_number_of_half_precision_is_widened_exactly(isa: str, gradient_type: int) -> None:
    """All 65,536 of them, with a step of learning rate -1 from 0: what comes out is what was pushed."""
    every = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(every).view(TORCH_TYPES[gradient_type]).to(torch.float32).numpy()
    hyper = SGD_ROWS[0].hyper._replace(learning_rate=-1.0, weight_decay=0.0, momentum=0.0, flags=0)
    pushed = every.view(np.float16) if gradient_type == FLOAT16 else every
    zeros, nothing, steps = np.zeros(1 << 16, np.float32), np.zeros((0, 1 << 16), np.float32), np.zeros(1, np.int64)
    found, _, _ = compiled.fold(
        RULE_SGD, FOLD_SUM, [(0, 1 << 16, 0)], [(pushed, [hyper], [True], 1.0)], zeros, nothing, steps,
        gradient_type=gradient_type, instruction_set=isa,
    )  # fmt: skip
    expected[expected == 0] = 0  # a sum with 0 has no negative zero
    assert np.array_equal(bits(found), bits(expected))


@ISAS
@TYPES
def test_sums_of_half_precision_are_made_in_single_precision(isa: str, gradient_type: int) -> None:
    """40,000 twice is beyond float16, and 256 + 1 beyond bfloat16's digits."""
    values = (40_000.0, 40_000.0) if gradient_type == FLOAT16 else (256.0, 1.0)
    hyper = SGD_ROWS[0].hyper._replace(learning_rate=-1.0, weight_decay=0.0, momentum=0.0, flags=0)
    pushes = [(halved(np.full(17, value, np.float32), gradient_type), [hyper], [True], 1.0) for value in values]
    arrays = np.zeros(17, np.float32), np.zeros((0, 17), np.float32), np.zeros(1, np.int64)
    for mode in (FOLD_SUM, FOLD_EACH):
        found, _, _ = compiled.fold(
            RULE_SGD, mode, [(0, 17, 0)], pushes, *arrays, gradient_type=gradient_type, instruction_set=isa
        )
        assert found.tolist() == [sum(values)] * 17


def test_an_unknown_type_of_gradient_is_refused() -> None:
    arrays = np.zeros(17, np.float32), np.zeros((0, 17), np.float32), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="status -3"):
        compiled.fold(RULE_SGD, FOLD_SUM, [(0, 17, 0)], [], *arrays, gradient_type=3)
