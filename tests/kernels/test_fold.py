"""The compiled fold, bit for bit: against its oracle on every instruction set, and against torch.optim itself.

Every rule, with every option, is a row of one table (ROWS). Speed is not tested here.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from fastps.kernels import fold as compiled
from fastps.kernels import reference
from fastps.kernels.fold import (
    FOLD_EACH,
    FOLD_SUM,
    HYPER_CENTERED,
    HYPER_DECOUPLED,
    HYPER_MAXIMIZE,
    HYPER_NESTEROV,
    RULE_ADAGRAD,
    RULE_ADAM,
    RULE_RMSPROP,
    RULE_SGD,
)
from fastps.kernels.reference import Hyper

Floats = npt.NDArray[np.float32]
Result = tuple[Floats, Floats, npt.NDArray[np.int64]]
Pushes = list[tuple[Any, Sequence[tuple[float, ...]], Sequence[bool], float, float]]

SIZES = (1, 15, 16, 17, 1023, 1024, 1025, 3000)
MODES = pytest.mark.parametrize("mode", [FOLD_SUM, FOLD_EACH], ids=["sum", "each"])
ISAS = pytest.mark.parametrize("isa", compiled.instruction_sets())
GAP = 16  # floats between segments, as an arena's alignment leaves them


@dataclass(frozen=True)
class Row:
    """A rule with one set of options: our hyper-parameters, and torch's optimizer class with its own words for them."""

    name: str
    rule: int
    hyper: Hyper
    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    @property
    def state_planes(self) -> int:
        """As many as this group needs; one without momentum or centering then leaves some of them alone."""
        if self.rule == RULE_RMSPROP:
            return 3 if self.hyper.flags & HYPER_CENTERED else 1 + int(self.hyper.momentum != 0)
        return {RULE_ADAM: 2, RULE_ADAGRAD: 1, RULE_SGD: int(self.hyper.momentum != 0)}[self.rule]

    def other_hyper(self) -> Hyper:
        """Another param_group's: slower, with decay, beta1 on the other side of 0.5, not centered and without momentum."""
        beta1 = 0.9 if self.hyper.beta1 < 0.5 else 0.4
        flags = self.hyper.flags & ~HYPER_CENTERED
        return self.hyper._replace(learning_rate=0.03, momentum=0.0, weight_decay=0.02, beta1=beta1, flags=flags)


def sgd_row(name: str, flags: int = 0, **options: Any) -> Row:
    momentum, dampening, decay = (options.get(key, 0.0) for key in ("momentum", "dampening", "weight_decay"))
    hyper = Hyper(0.1, momentum, dampening, decay, 0.0, 0.0, 0.0, 0.0, flags)
    return Row(name, RULE_SGD, hyper, torch.optim.SGD, {"lr": 0.1, **options})


def adam_row(name: str, flags: int = 0, beta1: float = 0.9, **options: Any) -> Row:
    hyper = Hyper(0.01, 0.0, 0.0, options.get("weight_decay", 0.0), beta1, 0.999, 1e-8, 0.0, flags)
    optimizer = torch.optim.AdamW if flags & HYPER_DECOUPLED else torch.optim.Adam
    return Row(name, RULE_ADAM, hyper, optimizer, {"lr": 0.01, "betas": (beta1, 0.999), "weight_decay": 0.0, **options})


def adagrad_row(name: str, flags: int = 0, **options: Any) -> Row:
    decay, rate_decay = options.get("weight_decay", 0.0), options.get("lr_decay", 0.0)
    hyper = Hyper(0.05, 0.0, 0.0, decay, 0.0, 0.0, 1e-10, rate_decay, flags)
    return Row(name, RULE_ADAGRAD, hyper, torch.optim.Adagrad, {"lr": 0.05, **options})


def rmsprop_row(name: str, flags: int = 0, alpha: float = 0.99, **options: Any) -> Row:
    momentum, decay = options.get("momentum", 0.0), options.get("weight_decay", 0.0)
    hyper = Hyper(0.01, momentum, 0.0, decay, 0.0, alpha, 1e-8, 0.0, flags)
    return Row(name, RULE_RMSPROP, hyper, torch.optim.RMSprop, {"lr": 0.01, "alpha": alpha, **options})


SGD_ROWS = (
    sgd_row("sgd"),
    sgd_row("sgd-decay", weight_decay=0.01),
    sgd_row("sgd-maximize", HYPER_MAXIMIZE, maximize=True),
    sgd_row("momentum", momentum=0.9),
    sgd_row("momentum-decay", momentum=0.9, weight_decay=0.01),
    sgd_row("momentum-dampening", momentum=0.9, dampening=0.3),
    sgd_row("momentum-all", HYPER_MAXIMIZE, momentum=0.9, dampening=0.3, weight_decay=0.01, maximize=True),
    sgd_row("nesterov", HYPER_NESTEROV, momentum=0.9, nesterov=True),
    sgd_row("nesterov-decay", HYPER_NESTEROV, momentum=0.9, weight_decay=0.01, nesterov=True),
)
ADAM_ROWS = (
    adam_row("adam"),
    adam_row("adam-decay", weight_decay=0.1),
    adam_row("adam-low-beta1", beta1=0.3),
    adam_row("adam-half-beta1", beta1=0.5),
    adam_row("adam-zero-beta1", beta1=0.0),
    adam_row("adam-maximize", HYPER_MAXIMIZE, maximize=True),
    adam_row("adamw", HYPER_DECOUPLED, weight_decay=0.1),
    adam_row("adamw-without-decay", HYPER_DECOUPLED),
    adam_row("adamw-low-beta1-maximize", HYPER_DECOUPLED | HYPER_MAXIMIZE, beta1=0.3, weight_decay=0.1, maximize=True),
)
ADAGRAD_ROWS = (
    adagrad_row("adagrad"),
    adagrad_row("adagrad-decays", weight_decay=0.01, lr_decay=0.05),
    adagrad_row("adagrad-maximize", HYPER_MAXIMIZE, maximize=True),
)
RMSPROP_ROWS = (
    rmsprop_row("rmsprop"),
    rmsprop_row("rmsprop-decay-low-alpha", alpha=0.4, weight_decay=0.01),
    rmsprop_row("rmsprop-momentum", momentum=0.9),
    rmsprop_row("rmsprop-centered", HYPER_CENTERED, centered=True),
    rmsprop_row("rmsprop-centered-low-alpha", HYPER_CENTERED, alpha=0.4, centered=True),
    rmsprop_row("rmsprop-all", HYPER_CENTERED | HYPER_MAXIMIZE, momentum=0.9, centered=True, weight_decay=0.01, maximize=True),
)
ROOT_ROWS = ADAM_ROWS + ADAGRAD_ROWS + RMSPROP_ROWS  # those that take a square root
ALL_ROWS = SGD_ROWS + ROOT_ROWS
ROWS = pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: row.name)


@dataclass(frozen=True)
class Job:
    """Everything that a fold reads."""

    row: Row
    segments: list[tuple[int, int, int]]
    pushes: Pushes
    weights: Floats
    state: Floats
    steps: npt.NDArray[np.int64]
    scale: float = 1.0
    rate_scale: float = 1.0
    ema_decay: float | None = None

    def fold(self, mode: int, isa: str, ranges: Sequence[tuple[int, int]] | None = None) -> Result:
        """Both kinds of stores must leave the same bits."""
        options = {**self._options(), "instruction_set": isa, "ranges": ranges}
        plain = compiled.fold(self.row.rule, mode, *self._measures(), **options)
        streamed = compiled.fold(self.row.rule, mode, *self._measures(), **options, streaming=True)
        for one, other in zip(plain, streamed, strict=True):
            assert one.tobytes() == other.tobytes()
        return plain

    def fold_by_reference(self, mode: int) -> Result:
        return reference.fold(self.row.rule, mode, *self._measures(), **self._options())

    def _measures(self) -> tuple[Any, ...]:
        return self.segments, self.pushes, self.weights, self.state, self.steps

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"scale": self.scale, "rate_scale": self.rate_scale}
        if self.ema_decay is not None:
            options |= {"ema_plane": len(self.state) - 1, "ema_decay": self.ema_decay}
        return options


def segments_of(lengths: Sequence[int]) -> tuple[list[tuple[int, int, int]], int]:
    """Segments on multiples of 16 floats with gaps between them, the groups in turn; and the length of it all."""
    segments, offset = [], GAP
    for index, length in enumerate(lengths):
        segments.append((offset, length, index % 2))
        offset += -(-length // 16) * 16 + GAP
    return segments, offset


def normal(random: np.random.Generator, *shape: int) -> Floats:
    return random.standard_normal(shape).astype(np.float32)


def make_job(row: Row, pushes: int, situation: str, seed: int, lengths: Sequence[int] = SIZES) -> Job:
    """A job with random values in `situation` (a key of SITUATIONS); gaps are full of values that nobody may use."""
    random = np.random.default_rng([seed, pushes])
    segments, n = segments_of(lengths)
    made: Pushes = []
    for index in range(pushes):
        presence, scale, rate, rate_scale = SITUATIONS[situation](index, len(lengths))
        hypers = [each._replace(learning_rate=each.learning_rate * rate) for each in (row.hyper, row.other_hyper())]
        made.append((normal(random, n) / np.float32(scale), hypers, presence, scale, rate_scale))
    state = normal(random, row.state_planes, n)
    if row.rule != RULE_SGD:
        squares = 1 if row.rule == RULE_ADAM else 0
        state[squares] = abs(state[squares]) + (16 if row.hyper.flags & HYPER_CENTERED else 0)
    steps = np.where(np.arange(len(segments)) % 3 == 0, 0, random.integers(1, 1000, len(segments))).astype(np.int64)
    rate_scale = 0.7 if situation == "own_rate_scales" else 1.0
    return Job(row, segments, made, normal(random, n), state, steps, 1 / pushes, rate_scale)


class Terms(NamedTuple):
    """How a push differs from the others: its presence bits, gradient scale, factor of its rates, and rate scale."""

    presence: list[bool]
    scale: float = 1.0
    rate: float = 1.0
    rate_scale: float = 1.0


def in_all(index: int, parameters: int) -> Terms:
    return Terms([True] * parameters)


def absent_in_one(index: int, parameters: int) -> Terms:
    return Terms([not (index == 0 and parameter % 2) for parameter in range(parameters)])


def absent_in_all(index: int, parameters: int) -> Terms:
    return Terms([parameter % 3 != 1 for parameter in range(parameters)])


def common_loss_scale(index: int, parameters: int) -> Terms:
    return Terms([True] * parameters, 1 / 3000.0)


def own_loss_scales(index: int, parameters: int) -> Terms:
    return Terms([(index + parameter) % 5 != 0 for parameter in range(parameters)], 1 / (1000.0 + 77 * index))


def own_learning_rates(index: int, parameters: int) -> Terms:
    return Terms([True] * parameters, rate=1 / (1 + index))


def own_rate_scales(index: int, parameters: int) -> Terms:
    return Terms([(index + parameter) % 4 != 0 for parameter in range(parameters)], rate_scale=1 / (1 + index))


SITUATIONS: dict[str, Callable[[int, int], Terms]] = {
    each.__name__: each
    for each in (in_all, absent_in_one, absent_in_all, common_loss_scale, own_loss_scales, own_learning_rates, own_rate_scales)
}


def bits(values: Floats) -> npt.NDArray[np.int32]:
    """The bits of floats; all not-a-numbers are one, as IEEE 754 does not say which of them an operation gives."""
    return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32).view(np.int32)


def assert_same_bits(found: Result, expected: Result, context: object) -> None:
    differing = {
        "weights": np.flatnonzero(bits(found[0]) != bits(expected[0])),
        "state": np.flatnonzero(bits(found[1]) != bits(expected[1])),
        "steps": np.flatnonzero(found[2] != expected[2]),
    }
    assert [array.shape for array in found] == [array.shape for array in expected]
    assert not any(places.size for places in differing.values()), (differing, context)


@ROWS
@MODES
def test_compiled_fold_is_the_reference_bit_for_bit(row: Row, mode: int) -> None:
    for pushes in range(1, 7):
        for seed, situation in enumerate(SITUATIONS):
            job = make_job(row, pushes, situation, seed)
            expected = job.fold_by_reference(mode)
            for isa in compiled.instruction_sets():
                assert_same_bits(job.fold(mode, isa), expected, (isa, pushes, situation))


@ISAS
@MODES
def test_presence_bits_beyond_the_first_word_are_read(isa: str, mode: int) -> None:
    job = make_job(SGD_ROWS[3], 3, "own_loss_scales", seed=1, lengths=[5] * 131)
    assert_same_bits(job.fold(mode, isa), job.fold_by_reference(mode), isa)


@ISAS
@MODES
@ROWS
def test_what_no_push_has_stays_as_it_is(row: Row, mode: int, isa: str) -> None:
    job = make_job(row, 3, "absent_in_all", seed=2)
    weights, state, steps = job.fold(mode, isa)
    for parameter, (offset, length, _) in enumerate(job.segments):
        span = slice(offset, offset + length)
        is_absent = parameter % 3 == 1
        assert np.array_equal(bits(weights[span]), bits(job.weights[span])) == is_absent
        assert not is_absent or np.array_equal(bits(state[:, span]), bits(job.state[:, span]))
        assert steps[parameter] - job.steps[parameter] == (0 if is_absent else 3 if mode == FOLD_EACH else 1)


@ISAS
@MODES
@ROWS
def test_fold_leaves_its_inputs_alone(row: Row, mode: int, isa: str) -> None:
    job, same = (make_job(row, 2, "in_all", seed=3) for _ in range(2))
    job.fold(mode, isa)
    assert_same_bits((job.weights, job.state, job.steps), (same.weights, same.state, same.steps), isa)
    assert all(np.array_equal(push[0], other[0]) for push, other in zip(job.pushes, same.pushes, strict=True))


@ISAS
@MODES
@ROWS
def test_folding_by_ranges_gives_the_same_bits(row: Row, mode: int, isa: str) -> None:
    job = make_job(row, 3, "own_loss_scales", seed=4)
    n = len(job.weights)
    for parts in (2, 3, 7):
        inner = np.random.default_rng(parts).integers(1, n, parts - 1)
        edges = [0, *sorted(int(edge) for edge in inner), n]
        ranges = list(itertools.pairwise(edges))
        assert_same_bits(job.fold(mode, isa, ranges), job.fold(mode, isa), ranges)
        assert_same_bits(job.fold(mode, isa, ranges[::-1]), job.fold(mode, isa), ranges)


@MODES
def test_steps_are_written_with_the_first_float_of_their_parameter(mode: int) -> None:
    job = make_job(SGD_ROWS[3], 3, "in_all", seed=9, lengths=[20, 20])
    offset = job.segments[1][0]
    _, _, steps = job.fold(mode, "auto", [(offset + 1, len(job.weights))])
    assert steps.tolist() == [0, 0]
    _, _, steps = job.fold(mode, "auto", [(offset, offset + 1)])
    assert steps.tolist() == [0, job.fold_by_reference(mode)[2][1]]


@ISAS
@MODES
@ROWS
def test_a_rate_scale_of_one_may_be_left_out_and_changes_no_bit(row: Row, mode: int, isa: str) -> None:
    job = make_job(row, 3, "own_learning_rates", seed=10)
    without = replace(job, pushes=[push[:4] for push in job.pushes])  # type: ignore[misc]
    assert_same_bits(without.fold(mode, isa), job.fold(mode, isa), isa)


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


@ISAS
@ROWS
def test_each_is_as_many_sums_of_one_push(row: Row, isa: str) -> None:
    job = make_job(row, 5, "own_loss_scales", seed=5)
    now: Result = (job.weights, job.state, job.steps)
    for push in job.pushes:
        now = Job(row, job.segments, [push], *now).fold(FOLD_SUM, isa)
    assert_same_bits(job.fold(FOLD_EACH, isa), now, isa)


def with_average(job: Job, decay: float, seed: int = 0) -> Job:
    """The same job with one more plane of state, that of the moving average of the weights."""
    average = normal(np.random.default_rng(seed), 1, len(job.weights))
    return replace(job, state=np.concatenate([job.state, average]), ema_decay=decay)


DECAYS = (0.9999, 0.9, 0.5, 0.25, 0.0)


@ROWS
@MODES
def test_the_moving_average_is_the_references_bit_for_bit_and_disturbs_nothing(row: Row, mode: int) -> None:
    for seed, situation in enumerate(SITUATIONS):
        plain = make_job(row, 3, situation, seed)
        job = with_average(plain, DECAYS[seed % len(DECAYS)])
        expected = job.fold_by_reference(mode)
        for isa in compiled.instruction_sets():
            weights, state, steps = job.fold(mode, isa)
            assert_same_bits((weights, state, steps), expected, (isa, situation))
            assert_same_bits((weights, state[:-1], steps), plain.fold(mode, isa), (isa, situation))


@ISAS
@MODES
@ROWS
def test_the_moving_average_follows_the_formula_of_the_backup_workers_paper(row: Row, mode: int, isa: str) -> None:
    """theta_bar(t) = alpha theta_bar(t - 1) + (1 - alpha) theta(t), Chen et al. 2017, section 1.1."""
    job = with_average(make_job(row, 1, "in_all", seed=12), 0.9)
    weights, state, _ = job.fold(mode, isa)
    expected = 0.9 * job.state[-1].astype(np.float64) + 0.1 * weights
    for offset, length, _ in job.segments:
        span = slice(offset, offset + length)
        np.testing.assert_allclose(state[-1][span], expected[span], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.999, 0.3])
def test_the_moving_average_has_the_bits_of_torch_lerp(decay: float) -> None:
    job = with_average(make_job(SGD_ROWS[3], 1, "in_all", seed=13, lengths=[3000]), decay)
    weights, state, _ = job.fold(FOLD_SUM, "auto")
    expected = torch.lerp(torch.from_numpy(job.state[-1]), torch.from_numpy(weights), 1 - decay).numpy()
    span = slice(GAP, GAP + 3000)
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


@ISAS
@ROWS
def test_each_moves_the_average_as_often_as_sums_of_one_push_would(row: Row, isa: str) -> None:
    """Also for a parameter that some pushes, or all, have no gradient for: the average goes with versions."""
    for situation in ("own_loss_scales", "absent_in_one", "absent_in_all"):
        job = with_average(make_job(row, 5, situation, seed=15), 0.9)
        now: Result = (job.weights, job.state, job.steps)
        for push in job.pushes:
            now = Job(row, job.segments, [push], *now, ema_decay=0.9).fold(FOLD_SUM, isa)
        assert_same_bits(job.fold(FOLD_EACH, isa), now, (isa, situation))


@ISAS
@MODES
def test_a_parameter_that_no_push_has_still_draws_its_average(mode: int, isa: str) -> None:
    job = with_average(make_job(SGD_ROWS[3], 3, "absent_in_all", seed=16), 0.9)
    offset, length, _ = job.segments[1]
    span = slice(offset, offset + length)
    _, state, steps = job.fold(mode, isa)
    average = job.state[-1][span]
    for _ in range(3 if mode == FOLD_EACH else 1):
        average = reference.lerp(average, job.weights[span], np.float32(1 - 0.9))
    assert np.array_equal(bits(state[-1][span]), bits(average))
    assert steps[1] == job.steps[1]


@ISAS
@MODES
def test_a_fold_of_no_pushes_changes_nothing(mode: int, isa: str) -> None:
    job = replace(with_average(make_job(SGD_ROWS[3], 1, "in_all", seed=17), 0.9), pushes=[])
    expected = job.fold_by_reference(mode)
    assert_same_bits(job.fold(mode, isa), expected, isa)
    offset, length, _ = job.segments[-1]
    assert np.array_equal(bits(expected[1][:, offset : offset + length]), bits(job.state[:, offset : offset + length]))


@ISAS
@MODES
@ROWS
def test_folding_by_ranges_gives_the_same_average(row: Row, mode: int, isa: str) -> None:
    job = with_average(make_job(row, 3, "own_loss_scales", seed=18), 0.99)
    n = len(job.weights)
    ranges = [(0, 777), (777, 2000), (2000, n)]
    assert_same_bits(job.fold(mode, isa, ranges), job.fold(mode, isa), ranges)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    row=st.sampled_from(ALL_ROWS),
    mode=st.sampled_from([FOLD_SUM, FOLD_EACH]),
    lengths=st.lists(st.integers(0, 70) | st.integers(1000, 1100), min_size=1, max_size=5),
    pushes=st.integers(1, 6),
    situation=st.sampled_from(sorted(SITUATIONS)),
    seed=st.integers(0, 2**32),
    share=st.floats(0, 1),
    decay=st.none() | st.floats(0, 1),
)
def test_any_floats_at_all_fold_as_the_reference_folds_them(
    row: Row, mode: int, lengths: list[int], pushes: int, situation: str, seed: int, share: float, decay: float | None
) -> None:
    """`share` of the values are any 32 bits: subnormal, huge, infinite and not a number among them."""
    job = make_job(row, pushes, situation, seed, lengths)
    if decay is not None:
        job = with_average(job, decay, seed)
    random = np.random.default_rng(seed)
    for values in (job.weights, job.state, *(push[0] for push in job.pushes)):
        is_any = random.random(values.shape) < share
        values[is_any] = random.integers(0, 2**32, values.shape, np.uint32).view(np.float32)[is_any]
    with np.errstate(all="ignore"):
        expected = job.fold_by_reference(mode)
        for isa in compiled.instruction_sets():
            assert_same_bits(job.fold(mode, isa), expected, isa)


def almost_halfway(random: np.random.Generator, n: int) -> tuple[Floats, Floats, np.float32]:
    """Return c, a and b for which c + a * b is less than half a float from c, by too little for a double to tell."""
    c = normal(random, n)
    b = np.float32(2**-10 * (1 - 2**-23))
    a = np.spacing(c) * np.float32(2**9 * (1 + 2**-23)) * random.choice(np.array([-1, 1], np.float32), n)
    return c, a, b


def test_the_references_fused_multiply_add_rounds_once() -> None:
    random = np.random.default_rng(6)
    c, a, b = almost_halfway(random, 1000)
    more = [normal(random, 3000) * np.float32(2) ** random.integers(-30, 30, 3000).astype(np.float32) for _ in range(3)]
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
    pushes: Pushes = [(gradient, [hyper], [True], 1.0, 1.0)]
    arguments = ([(0, 1000, 0)], pushes, weights, np.zeros((0, 1000), np.float32), np.zeros(1, np.int64))
    found, _, _ = compiled.fold(RULE_SGD, FOLD_SUM, *arguments, instruction_set=isa)
    assert np.array_equal(bits(found), bits(weights))


class ExactSquareRoot(TorchFunctionMode):
    """Within it, torch's square root is the correctly rounded one of IEEE 754."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.sqrt:
            return torch.from_numpy(np.sqrt(args[0].numpy()))
        if func is torch.Tensor.sqrt_:
            return args[0].copy_(torch.from_numpy(np.sqrt(args[0].numpy())))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


needs_fused_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="without these instruction sets torch itself does not fuse its multiply-adds",
)


def steps_beside_torch(
    row: Row, n: int, context: contextlib.AbstractContextManager[Any]
) -> Iterator[tuple[str, Floats, Floats]]:
    """200 steps on one parameter of n floats; after each, for each instruction set: its name, our weights and torch's."""
    random = np.random.default_rng(n)
    start = normal(random, n)
    ours = {
        isa: (start, np.zeros((row.state_planes, n), np.float32), np.zeros(1, np.int64)) for isa in compiled.instruction_sets()
    }
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = row.optimizer([parameter], foreach=False, **row.options)
    for _ in range(200):
        gradient = normal(random, n)
        parameter.grad = torch.from_numpy(gradient)
        with context:
            optimizer.step()
        pushes: Pushes = [(gradient, [row.hyper], [True], 1.0, 1.0)]
        for isa, before in ours.items():
            ours[isa] = compiled.fold(row.rule, FOLD_SUM, [(0, n, 0)], pushes, *before, instruction_set=isa)
            yield isa, ours[isa][0], parameter.detach().numpy()


@needs_fused_torch
@pytest.mark.usefixtures("one_torch_thread")
@ROWS
def test_200_steps_give_the_bits_of_torch(row: Row) -> None:
    """Where there is a square root, but for torch's, a vector library's, which does not always round correctly."""
    for n in (1, 7, 17, 1023, 3001):
        context = contextlib.nullcontext() if row.rule == RULE_SGD else ExactSquareRoot()
        for step, (isa, ours, theirs) in enumerate(steps_beside_torch(row, n, context)):
            assert np.array_equal(bits(ours), bits(theirs)), (isa, n, step)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("row", ROOT_ROWS, ids=lambda row: row.name)
def test_square_roots_stay_beside_torch_with_the_square_root_of_this_machine(row: Row) -> None:
    for _, ours, theirs in steps_beside_torch(row, 3001, contextlib.nullcontext()):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-6)


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


@pytest.mark.parametrize("rule", [-1, 5])
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
    refused("gradients of 32 floats", pushes=[(np.ones(31, np.float32), [ADAM_ROWS[0].hyper], [True], 1.0)])


def test_an_unknown_instruction_set_is_refused() -> None:
    refused("instruction set of this machine", instruction_set="abacus")
