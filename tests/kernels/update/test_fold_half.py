"""Half precision in the fold: pushed gradients are widened exactly, and new weights are written once more as halves.

Sums and updates are made in single precision like any other.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fastps.kernels.update import fold as compiled
from fastps.kernels.update.fold import BFLOAT16, FLOAT16, FOLD_SUM, RULE_SGD
from tests.support.folds import fold_jobs
from tests.support.folds.fold_jobs import ISAS, MODES, ROWS, SGD_ROWS, Floats, Row, assert_same_bits, bits, make_job

TYPES = pytest.mark.parametrize("gradient_type", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
TORCH_TYPES = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}


def halved(gradient: Floats, gradient_type: int) -> npt.NDArray[np.float16] | npt.NDArray[np.uint16]:
    """A gradient as torch rounds it to half precision; bfloat16 as its bits."""
    half = torch.from_numpy(gradient).to(TORCH_TYPES[gradient_type])
    found: npt.NDArray[np.uint16] = half.view(torch.uint16).numpy()
    return found.view(np.float16) if gradient_type == FLOAT16 else found


@pytest.mark.sampled(8)
@ROWS
@MODES
@TYPES
def test_folds_of_half_precision_are_the_references_bit_for_bit(row: Row, mode: int, gradient_type: int) -> None:
    for seed, situation in enumerate(("in_all", "absent_in_one", "own_loss_scales")):
        for pushes in (1, 3, 6):
            job = make_job(row, pushes, situation, seed, lengths=[1, 17, 1025])
            halves = [(halved(push[0], gradient_type), *push[1:]) for push in job.pushes]
            fold_jobs.assert_is_the_references(
                replace(job, pushes=halves, gradient_type=gradient_type), mode, (situation, pushes)
            )


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


# -- weights that a model reads as halves ----------------------------------------------------------


def _every_kind_of_float() -> Floats:
    """Every half of both types, and the floats around each, halfway to the next, and just beyond: 1.3 million."""
    every = np.arange(1 << 16, dtype=np.uint32)
    wide = [every << 16, torch.from_numpy(every.astype(np.uint16)).view(torch.float16).float().numpy().view(np.uint32)]
    nearby = [0, 1, 0xFFFFFFFF, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001]
    around = [numbers + np.uint32(offset) for numbers in wide for offset in nearby]
    half_steps = np.arange(0, 4096, dtype=np.float32) * np.float32(2.0**-26)  # quarters of the smallest float16
    return np.concatenate([np.concatenate(around).view(np.float32), half_steps, -half_steps])


def _same_halves(found: npt.NDArray[np.uint16], expected: torch.Tensor) -> bool:
    halves = torch.from_numpy(found).view(expected.dtype)
    return torch.equal(halves.isnan(), expected.isnan()) and torch.equal(
        halves[~expected.isnan()].view(torch.int16), expected[~expected.isnan()].view(torch.int16)
    )


@pytest.mark.parametrize("isa", compiled.instruction_sets())
@TYPES
def test_floats_are_rounded_to_halves_as_torch_rounds_them(isa: str, gradient_type: int) -> None:
    floats = _every_kind_of_float()
    halves = np.zeros(len(floats), np.uint16)
    compiled.narrow(floats, halves, gradient_type, instruction_set=isa)
    assert _same_halves(halves, torch.from_numpy(floats).to(TORCH_TYPES[gradient_type]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "row", [SGD_ROWS[0], SGD_ROWS[3], fold_jobs.ADAM_ROWS[0], fold_jobs.RMSPROP_ROWS[-1]], ids=lambda row: row.name
)
@MODES
@TYPES
def test_a_fold_writes_the_halves_of_the_weights_that_it_writes(row: Row, mode: int, gradient_type: int) -> None:
    """Rules of no state tensor to three; the loops that write are the same for all others."""
    for seed, situation in enumerate(("in_all", "absent_in_one", "absent_in_all", "own_loss_scales")):
        for pushes in (1, 2, 6):
            job = make_job(row, pushes, situation, seed, lengths=[1, 17, 1025, 2049])
            expected = job.fold_by_reference(mode)
            inside = np.concatenate([np.arange(offset, offset + length) for offset, length, _ in job.segments])
            rounded = torch.from_numpy(expected[0][inside]).to(TORCH_TYPES[gradient_type])
            for isa in compiled.instruction_sets():
                halves = np.zeros(len(job.weights), np.uint16)
                job = replace(job, halves=(halves, gradient_type))
                assert_same_bits(job.fold(mode, isa), expected, (isa, situation, pushes))
                assert _same_halves(halves[inside], rounded), (isa, situation, pushes)


@MODES
def test_a_fold_with_a_moving_average_writes_halves_too(mode: int) -> None:
    job = fold_jobs.with_average(make_job(SGD_ROWS[3], 3, "absent_in_one", 0), 0.9)
    halves = np.zeros(len(job.weights), np.uint16)
    weights, _, _ = replace(job, halves=(halves, BFLOAT16)).fold(mode, "auto")
    inside = np.concatenate([np.arange(offset, offset + length) for offset, length, _ in job.segments])
    assert _same_halves(halves[inside], torch.from_numpy(weights[inside]).to(torch.bfloat16))


def test_gradients_and_halves_of_an_unknown_type_or_another_length_are_refused() -> None:
    arrays = np.zeros(17, np.float32), np.zeros((0, 17), np.float32), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="status -3"):
        compiled.fold(RULE_SGD, FOLD_SUM, [(0, 17, 0)], [], *arrays, gradient_type=4)
    with pytest.raises(ValueError, match="expected room for 17 halves, found 16"):
        compiled.fold(RULE_SGD, FOLD_SUM, [(0, 17, 0)], [], *arrays, halves_out=np.zeros(16, np.uint16), shown_type=FLOAT16)
    with pytest.raises(ValueError, match="status -3"):
        compiled.fold(RULE_SGD, FOLD_SUM, [(0, 17, 0)], [], *arrays, halves_out=np.zeros(17, np.uint16), shown_type=0)
    with pytest.raises(ValueError, match="expected 17 halves of type 1 or 2, found 17 of type 0"):
        compiled.narrow(arrays[0], np.zeros(17, np.uint16), 0)
