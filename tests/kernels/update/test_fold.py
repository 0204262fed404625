"""The compiled fold, bit for bit, against its oracle on every instruction set. Speed is not tested here."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.kernels.update import fold as compiled
from fastps.kernels.update.fold import FOLD_EACH, FOLD_SUM, RULE_ADAM, RULE_SGD
from tests.support.folds import fold_jobs
from tests.support.folds import fold_reference as reference
from tests.support.folds.fold_jobs import ISAS, MODES, ROWS, SGD_ROWS, Job, Row, assert_same_bits, bits, make_job, with_average
from tests.support.folds.fold_reference import Hyper
from tests.support.sizes import sample_and_full


def each_rule(test: Any) -> Any:
    """Run a test with two rows of each rule, each mode and instruction set; in `make test` with some."""
    return pytest.mark.sampled(4)(
        ISAS(MODES(pytest.mark.parametrize("row", fold_jobs.SOME_ROWS, ids=lambda row: row.name)(test)))
    )


def test_every_rule_of_the_fold_has_rows() -> None:
    assert [name for name, number in compiled.RULES.items() if number not in {row.rule for row in fold_jobs.ALL_ROWS}] == []


@pytest.mark.sampled(8)
@pytest.mark.exhaustive
@ROWS
@MODES
@sample_and_full((1, 2, 5), range(1, 7), "counts")
def test_compiled_fold_is_the_reference_bit_for_bit(row: Row, mode: int, counts: Sequence[int]) -> None:
    for pushes in counts:
        for seed, situation in enumerate(fold_jobs.SITUATIONS):
            fold_jobs.assert_is_the_references(make_job(row, pushes, situation, seed), mode, (pushes, situation))


@ISAS
@MODES
def test_presence_bits_beyond_the_first_word_are_read(isa: str, mode: int) -> None:
    job = make_job(SGD_ROWS[3], 3, "own_loss_scales", seed=1, lengths=[5] * 131)
    assert_same_bits(job.fold(mode, isa), job.fold_by_reference(mode), isa)


@ISAS
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("steps", [0, 1, 7, 100, 100_000])
def test_adams_corrected_roots_have_the_bits_of_a_division(isa: str, beta2: float, steps: int) -> None:
    """Squares of every size that a float has, none and infinite ones; without epsilon the last bit of a root is seen."""
    random = np.random.default_rng(steps)
    squares = np.concatenate(([0.0, np.inf], np.exp2(random.uniform(-149, 128, 20_000)))).astype(np.float32)
    ones = np.ones_like(squares)
    hyper = Hyper(0.01, 0.0, 0.0, 0.0, 0.9, beta2, 0.0, 0.0, 0)
    start = np.stack([ones, squares])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        expected, state = reference.adam(ones, list(start), 0 * ones, hyper, hyper.learning_rate, steps)
    pushes = [(0 * ones, [hyper], [True], 1.0, 1.0)]
    found = compiled.fold(RULE_ADAM, FOLD_SUM, [(0, len(ones), 0)], pushes, ones, start, np.array([steps]), instruction_set=isa)
    assert np.array_equal(bits(found[0]), bits(expected)) and np.array_equal(bits(found[1]), bits(np.stack(state)))


@each_rule
def test_what_no_push_has_stays_as_it_is(row: Row, mode: int, isa: str) -> None:
    job = make_job(row, 3, "absent_in_all", seed=2)
    weights, state, steps = job.fold(mode, isa)
    for parameter, (offset, length, _) in enumerate(job.segments):
        span = slice(offset, offset + length)
        is_absent = parameter % 3 == 1
        assert np.array_equal(bits(weights[span]), bits(job.weights[span])) == is_absent
        assert not is_absent or np.array_equal(bits(state[:, span]), bits(job.state[:, span]))
        assert steps[parameter] - job.steps[parameter] == (0 if is_absent else 3 if mode == FOLD_EACH else 1)


@each_rule
def test_fold_leaves_its_inputs_alone(row: Row, mode: int, isa: str) -> None:
    job, same = (make_job(row, 2, "in_all", seed=3) for _ in range(2))
    job.fold(mode, isa)
    assert_same_bits((job.weights, job.state, job.steps), (same.weights, same.state, same.steps), isa)
    assert all(np.array_equal(push[0], other[0]) for push, other in zip(job.pushes, same.pushes, strict=True))


@each_rule
def test_folding_by_ranges_gives_the_same_bits(row: Row, mode: int, isa: str) -> None:
    job = make_job(row, 3, "own_loss_scales", seed=4)
    n = len(job.weights)
    for parts in (2, 3, 7):
        inner = np.random.default_rng(parts).integers(1, n, parts - 1)
        edges = [0, *sorted(int(edge) for edge in inner), n]
        ranges = list(itertools.pairwise(edges))
        assert_same_bits(job.fold(mode, isa, ranges), job.fold(mode, isa), ranges)
        assert_same_bits(job.fold(mode, isa, ranges[::-1]), job.fold(mode, isa), ranges)


def adjoining(row: Row, pushes: int, situation: str, seed: int) -> Job:
    """A job whose segments leave no gap: runs of one group and as many steps, ended by another group or another count."""
    lengths, groups, steps = (16, 32, 1024, 0, 48, 16, 3008, 16, 32), (0, 0, 0, 0, 0, 1, 1, 0, 0), (5, 5, 5, 5, 7, 7, 7, 0, 0)
    job = make_job(row, pushes, situation, seed, lengths)
    offsets = [sum(lengths[:index]) for index in range(len(lengths))]
    return replace(job, segments=list(zip(offsets, lengths, groups, strict=True)), steps=np.array(steps))


@each_rule
def test_segments_that_adjoin_are_folded_as_each_by_itself(row: Row, mode: int, isa: str) -> None:
    random = np.random.default_rng(1)
    for pushes in (1, 3):
        for seed, situation in enumerate(fold_jobs.SITUATIONS):
            job = adjoining(row, pushes, situation, seed)
            for decay in (None, 0.9):
                averaged = job if decay is None else with_average(job, decay)
                with np.errstate(invalid="ignore"):  # a centered variance may be negative here, as torch's may
                    expected = averaged.fold_by_reference(mode)
                assert_same_bits(averaged.fold(mode, isa), expected, (pushes, situation))
                edges = [0, *sorted(int(edge) for edge in random.integers(1, len(job.weights), 3)), len(job.weights)]
                assert_same_bits(averaged.fold(mode, isa, list(itertools.pairwise(edges))), expected, (edges, situation))


@MODES
def test_steps_are_written_with_the_first_float_of_their_parameter(mode: int) -> None:
    job = make_job(SGD_ROWS[3], 3, "in_all", seed=9, lengths=[20, 20])
    offset = job.segments[1][0]
    _, _, steps = job.fold(mode, "auto", [(offset + 1, len(job.weights))])
    assert steps.tolist() == [0, 0]
    _, _, steps = job.fold(mode, "auto", [(offset, offset + 1)])
    assert steps.tolist() == [0, job.fold_by_reference(mode)[2][1]]


@each_rule
def test_a_rate_scale_of_one_may_be_left_out_and_changes_no_bit(row: Row, mode: int, isa: str) -> None:
    job = make_job(row, 3, "own_learning_rates", seed=10)
    without = replace(job, pushes=[push[:4] for push in job.pushes])  # type: ignore[misc]
    assert_same_bits(without.fold(mode, isa), job.fold(mode, isa), isa)


@pytest.mark.sampled(4)
@ISAS
@ROWS
def test_a_rate_scale_is_a_factor_of_the_learning_rate(row: Row, isa: str) -> None:
    """Under FOLD_EACH the push's own counts; under FOLD_SUM the mean of them, times the fold's."""
    job = make_job(row, 3, "in_all", seed=11)
    halved = [(*push[:4], 0.5) for push in job.pushes]
    slower = [
        (push[0], [each._replace(learning_rate=each.learning_rate / 2) for each in push[1]], *push[2:])  # type: ignore[attr-defined]
        for push in job.pushes
    ]
    expected = replace(job, pushes=slower)
    assert_same_bits(replace(job, pushes=halved).fold(FOLD_EACH, isa), expected.fold(FOLD_EACH, isa), isa)
    assert_same_bits(replace(job, pushes=halved).fold(FOLD_SUM, isa), expected.fold(FOLD_SUM, isa), isa)
    assert_same_bits(replace(job, rate_scale=0.5).fold(FOLD_SUM, isa), expected.fold(FOLD_SUM, isa), isa)
    assert_same_bits(replace(job, rate_scale=0.5).fold(FOLD_EACH, isa), job.fold(FOLD_EACH, isa), isa)


DECAYS = (0.9999, 0.9, 0.5, 0.25, 0.0)


@pytest.mark.sampled(4)
@ROWS
@MODES
def test_the_moving_average_is_the_references_bit_for_bit_and_disturbs_nothing(row: Row, mode: int) -> None:
    for seed, situation in enumerate(fold_jobs.SITUATIONS):
        plain = make_job(row, 3, situation, seed)
        job = with_average(plain, DECAYS[seed % len(DECAYS)])
        expected = job.fold_by_reference(mode)
        for isa in compiled.instruction_sets():
            weights, state, steps = job.fold(mode, isa)
            assert_same_bits((weights, state, steps), expected, (isa, situation))
            assert_same_bits((weights, state[:-1], steps), plain.fold(mode, isa), (isa, situation))


@pytest.mark.parametrize("decay", [0.999, 0.3])
def test_the_moving_average_has_the_bits_of_torch_lerp(decay: float) -> None:
    job = with_average(make_job(SGD_ROWS[3], 1, "in_all", seed=13, lengths=[3000]), decay)
    weights, state, _ = job.fold(FOLD_SUM, "auto")
    expected = torch.lerp(torch.from_numpy(job.state[-1]), torch.from_numpy(weights), 1 - decay).numpy()
    span = slice(fold_jobs.GAP, fold_jobs.GAP + 3000)
    assert np.array_equal(bits(state[-1][span]), bits(expected[span]))


@ISAS
@pytest.mark.parametrize("decay", DECAYS)
def test_the_moving_average_of_weights_that_stand_still_is_those_weights(isa: str, decay: float) -> None:
    job = make_job(SGD_ROWS[0], 2, "in_all", seed=14)
    still = [(*push[:4], 0.0) for push in job.pushes]
    job = replace(job, pushes=still, state=job.weights[np.newaxis].copy(), ema_decay=decay)
    for mode in (FOLD_SUM, FOLD_EACH):
        weights, state, _ = job.fold(mode, isa)
        assert np.array_equal(bits(state[0]), bits(weights))
        assert np.array_equal(bits(weights[weights != 0]), bits(job.weights[weights != 0]))


@pytest.mark.sampled(4)
@ISAS
@ROWS
def test_each_moves_the_average_as_often_as_sums_of_one_push_would(row: Row, isa: str) -> None:
    """Also for a parameter that some pushes, or all, have no gradient for: the average goes with versions."""
    for situation in ("own_loss_scales", "absent_in_one", "absent_in_all"):
        job = with_average(make_job(row, 5, situation, seed=15), 0.9)
        now: fold_jobs.Result = (job.weights, job.state, job.steps)
        for push in job.pushes:
            now = Job(row, job.segments, [push], *now, ema_decay=0.9).fold(FOLD_SUM, isa)
        assert_same_bits(job.fold(FOLD_EACH, isa), now, (isa, situation))


@ISAS
@MODES
def test_a_fold_of_no_pushes_changes_nothing(mode: int, isa: str) -> None:
    job = replace(with_average(make_job(SGD_ROWS[3], 1, "in_all", seed=17), 0.9), pushes=[])
    expected = job.fold_by_reference(mode)
    assert_same_bits(job.fold(mode, isa), expected, isa)
    offset, length, _ = job.segments[-1]
    assert np.array_equal(bits(expected[1][:, offset : offset + length]), bits(job.state[:, offset : offset + length]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(fold_jobs.any_jobs(st.integers(0, 70) | st.integers(1000, 1100), st.none() | st.floats(0, 1)))
def test_any_floats_at_all_fold_as_the_reference_folds_them(drawn: tuple[Job, int]) -> None:
    with np.errstate(all="ignore"):
        fold_jobs.assert_is_the_references(*drawn)


def almost_halfway(random: np.random.Generator, n: int) -> tuple[fold_jobs.Floats, fold_jobs.Floats, np.float32]:
    """Return c, a and b for which c + a * b is less than half a float from c, by too little for a double to tell."""
    c = fold_jobs.normal(random, n)
    b = np.float32(2**-10 * (1 - 2**-23))
    a = np.spacing(c) * np.float32(2**9 * (1 + 2**-23)) * random.choice(np.array([-1, 1], np.float32), n)
    return c, a, b


def test_the_references_fused_multiply_add_rounds_once() -> None:
    random = np.random.default_rng(6)
    c, a, b = almost_halfway(random, 1000)
    more = [
        fold_jobs.normal(random, 3000) * np.float32(2) ** random.integers(-30, 30, 3000).astype(np.float32) for _ in range(3)
    ]
    first, second, third = (np.append(one, other) for one, other in zip(more, (a, np.broadcast_to(b, c.shape), c), strict=True))
    found = reference.fused_multiply_add(first, second, third)
    for x, y, z, rounded in zip(first.tolist(), second.tolist(), third.tolist(), found, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        error = abs(Fraction(float(rounded)) - exact)
        for neighbour in (np.nextafter(rounded, np.float32(-np.inf)), np.nextafter(rounded, np.float32(np.inf))):
            other = abs(Fraction(float(neighbour)) - exact)
            assert error < other or (error == other and rounded.view(np.int32) % 2 == 0), (x, y, z)


@ISAS
def test_the_compiled_fused_multiply_add_rounds_once(isa: str) -> None:
    weights, gradient, rate = almost_halfway(np.random.default_rng(8), 1000)
    rounded_twice = (weights + gradient.astype(np.float64) * rate).astype(np.float32)
    assert np.count_nonzero(rounded_twice != weights) > 100
    hyper = SGD_ROWS[0].hyper._replace(learning_rate=float(-rate))
    pushes: fold_jobs.Pushes = [(gradient, [hyper], [True], 1.0, 1.0)]
    arguments = ([(0, 1000, 0)], pushes, weights, np.zeros((0, 1000), np.float32), np.zeros(1, np.int64))
    found, _, _ = compiled.fold(RULE_SGD, FOLD_SUM, *arguments, instruction_set=isa)
    assert np.array_equal(bits(found), bits(weights))


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize(("beta1", "decay"), [(0.9, 4e-3), (0.99, 0.0), (0.99, 4e-3), (0.5, 0.5), (0.0, 4e-3)])
def test_nadams_product_of_momenta_has_the_bits_of_one_product_a_step_in_any_order_of_asking(
    beta1: float, decay: float, real: Any
) -> None:
    """A thread keeps its last products: counts that rise, fall and repeat, and other momenta between them, give the same."""
    product, expected, is_double = real(1), [1.0], real == np.float64
    for step in range(1, 3001):
        product = product * real(reference.momentum(beta1, decay, step))
        expected.append(float(product))
    asked = np.random.default_rng(0).integers(0, 3001, 500).tolist()
    for steps in [*range(200), *asked, 3000, 2999, 3000, 1, 0]:
        assert compiled.mu_product(beta1, decay, steps, is_double) == expected[steps], steps
        compiled.mu_product(0.8, 0.1 * (steps % 11), steps)
    assert compiled.mu_product(beta1, decay, 10**12, is_double) == expected[3000], "it stands still, and the loop ends"
