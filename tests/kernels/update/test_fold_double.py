"""The fold in double precision: the bits of its oracle on every instruction set, and beside torch.optim in double."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fastps.kernels.update import fold as compiled
from fastps.kernels.update.fold import FLOAT64, FOLD_SUM, HYPER_DOUBLE_PRODUCT, RULE_SGD, RULE_USER
from tests.kernels.update.test_fold_torch import steps_beside_torch
from tests.support.folds import fold_jobs
from tests.support.folds import fold_reference as reference
from tests.support.folds.fold_jobs import ISAS, MODES, ROWS, SGD_ROWS, Row, assert_same_bits, make_job
from tests.support.sizes import sample_and_full

SIZES = (1, 7, 8, 9, 511, 512, 513)  # around the sizes of a vector (8 doubles) and of a tile (512)


@pytest.mark.sampled(3)
@pytest.mark.exhaustive
@ROWS
@MODES
@sample_and_full((1, 3), range(1, 6), "counts")
def test_compiled_fold_of_doubles_is_the_reference_bit_for_bit(row: Row, mode: int, counts: Any) -> None:
    for pushes in counts:
        for seed, situation in enumerate(fold_jobs.SITUATIONS):
            job = fold_jobs.in_double(make_job(row, pushes, situation, seed, SIZES))
            weights, state, _ = fold_jobs.assert_is_the_references(job, mode, (pushes, situation))
            assert weights.dtype == state.dtype == np.float64


@MODES
def test_an_average_of_doubles_is_the_references(mode: int) -> None:
    for row in SGD_ROWS[3:5]:
        fold_jobs.assert_is_the_references(
            fold_jobs.in_double(fold_jobs.with_average(make_job(row, 3, "absent_in_one", 4, SIZES), 0.9)), mode
        )


@ISAS
def test_ranges_of_one_fold_give_the_bits_of_the_whole(isa: str) -> None:
    job = fold_jobs.in_double(make_job(SGD_ROWS[3], 2, "in_all", 1, SIZES))
    n = len(job.weights)
    assert_same_bits(job.fold(FOLD_SUM, isa, [(0, 64), (64, 640), (640, n)]), job.fold(FOLD_SUM, isa), isa)


@pytest.fixture
def in_double_by_default() -> Iterator[None]:
    """Torch's default type is float64, as in scripts that train in double."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _differences_from_torch(row: Row, n: int) -> dict[str, float]:
    """The greatest difference in 200 steps over the greatest weight, for each instruction set."""
    most = dict.fromkeys(compiled.instruction_sets(), 0.0)
    for isa, ours, theirs in steps_beside_torch(row, n, gradient_type=FLOAT64):
        most[isa] = max(most[isa], float(abs(ours - theirs).max() / abs(theirs).max()))
    return most


@pytest.mark.sampled(8)
@ROWS
def test_200_steps_in_double_are_torchs(row: Row) -> None:
    for n in (1, 7, 1023):
        for isa, difference in _differences_from_torch(row, n).items():
            assert difference < 1e-12, (isa, n)


@pytest.mark.parametrize("row", fold_jobs.NADAM_ROWS, ids=lambda row: row.name)
@pytest.mark.usefixtures("in_double_by_default")
def test_200_steps_of_nadam_in_double_are_torchs_if_that_is_its_default_type(row: Row) -> None:
    """Torch then multiplies NAdam's momenta in double precision."""
    doubled = replace(row, hyper=row.hyper._replace(flags=row.hyper.flags | HYPER_DOUBLE_PRODUCT))
    for isa, difference in _differences_from_torch(doubled, 17).items():
        assert difference < 1e-12, isa


def _almost_halfway(n: int) -> tuple[Any, Any, Any]:
    """Numbers a, b, c whose a * b + c rounds otherwise with one rounding than with two, or lies near such a place."""
    random = np.random.default_rng(6)
    a, b = random.standard_normal(n), random.standard_normal(n)
    c = -(a * b) * (1 + random.standard_normal(n) * 2.0 ** -random.integers(0, 60, n)) * 2.0 ** random.integers(-60, 61, n)
    return a, b, c


def test_the_references_fused_multiply_add_of_doubles_rounds_once() -> None:
    a, b, c = _almost_halfway(5000)
    found = reference.fused_multiply_add(a, b, c)
    for x, y, z, rounded in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        assert rounded == float(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)
    assert np.count_nonzero(found != a * b + c) > 100


@ISAS
def test_the_compiled_fused_multiply_add_of_doubles_rounds_once(isa: str) -> None:
    a, b, c = _almost_halfway(1000)
    for gradient, rate, weights in zip(a, b, c, strict=True):
        hyper = SGD_ROWS[0].hyper._replace(learning_rate=-float(rate))
        pushes: fold_jobs.Pushes = [(np.array([gradient]), [hyper], [True], 1.0, 1.0)]
        found, _, _ = compiled.fold(
            RULE_SGD, FOLD_SUM, [(0, 1, 0)], pushes, np.array([weights]), np.zeros((0, 1)), np.zeros(1, np.int64),
            instruction_set=isa, gradient_type=FLOAT64,
        )  # fmt: skip
        assert found[0] == float(Fraction(float(gradient)) * Fraction(float(rate)) + Fraction(float(weights)))


def test_arrays_of_the_other_type_and_users_rules_are_refused() -> None:
    job = fold_jobs.in_double(make_job(SGD_ROWS[0], 1, "in_all", 0, (8,)))
    arguments = (job.segments, job.pushes, job.weights, job.state, job.steps)
    with pytest.raises(ValueError, match="Buffer dtype mismatch"):
        compiled.fold(RULE_SGD, FOLD_SUM, *arguments)
    with pytest.raises(ValueError, match="the fold refused its job"):
        compiled.fold(RULE_USER, FOLD_SUM, *arguments, gradient_type=FLOAT64, user_rule=1)
