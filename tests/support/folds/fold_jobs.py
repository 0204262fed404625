"""Jobs for the tests of the fold: a table of rules with their options (ROWS), and situations of pushes (SITUATIONS)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import strategies as st

from fastps.job.update_rules import UPDATE_RULES
from fastps.kernels.update import fold as compiled
from fastps.kernels.update.fold import (
    FOLD_EACH,
    FOLD_SUM,
    HYPER_AMSGRAD,
    HYPER_CENTERED,
    HYPER_DECOUPLED,
    HYPER_MAXIMIZE,
    HYPER_NESTEROV,
    RULE_ADADELTA,
    RULE_ADAGRAD,
    RULE_ADAM,
    RULE_ADAMAX,
    RULE_NADAM,
    RULE_RADAM,
    RULE_RMSPROP,
    RULE_SGD,
)
from tests.support.folds import fold_reference as reference
from tests.support.folds.fold_reference import Hyper

Floats = npt.NDArray[Any]
Result = tuple[Floats, Floats, npt.NDArray[np.int64]]
Pushes = list[tuple[Any, Sequence[tuple[float, ...]], Sequence[bool], float, float]]

SIZES = (1, 15, 16, 17, 1023, 1024, 1025, 8209)  # around the sizes of a vector (16 floats) and of a tile (1,024 or 8,192)
MODES = pytest.mark.parametrize("mode", [FOLD_SUM, FOLD_EACH], ids=["sum", "each"])
# All are held against the reference. What else is promised, the widest shows in `make test`, all in `make test-all`.
*_NARROW, _WIDEST = compiled.instruction_sets()
ISAS = pytest.mark.parametrize("isa", [*(pytest.param(isa, marks=pytest.mark.slow) for isa in _NARROW), _WIDEST])
GAP = 16  # floats between segments, as an arena's alignment leaves them


@dataclass(frozen=True)
class Row:
    """A rule with one set of options: fastps's hyper-parameters, and torch's optimizer class with its own options."""

    name: str
    rule: int
    hyper: Hyper
    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    @property
    def state_planes(self) -> int:
        """The optimizer-state tensors that this group needs; a group without momentum or centering leaves some unused."""
        return compiled.planes_needed(self.rule, self.hyper)

    @property
    def squares(self) -> list[int]:
        """The optimizer-state tensors that are never negative."""
        of = next(UPDATE_RULES[name] for name, number in compiled.RULES.items() if number == self.rule)
        return [of.state.index(name) for name in of.squares if of.state.index(name) < self.state_planes]

    def other_hyper(self) -> Hyper:
        """Hyper-parameters of a second param_group: slower, with decay, beta1 across 0.5, no momentum, centering or amsgrad."""
        beta1 = 0.9 if self.hyper.beta1 < 0.5 else 0.4
        flags = self.hyper.flags & ~HYPER_CENTERED & ~HYPER_AMSGRAD
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


def nadam_row(name: str, flags: int = 0, beta1: float = 0.9, **options: Any) -> Row:
    decay, momentum_decay = options.get("weight_decay", 0.0), options.get("momentum_decay", 4e-3)
    hyper = Hyper(0.01, 0.0, 0.0, decay, beta1, 0.999, 1e-8, momentum_decay, flags)
    return Row(name, RULE_NADAM, hyper, torch.optim.NAdam, {"lr": 0.01, "betas": (beta1, 0.999), **options})


def radam_row(name: str, flags: int = 0, betas: tuple[float, float] = (0.9, 0.999), **options: Any) -> Row:
    hyper = Hyper(0.01, 0.0, 0.0, options.get("weight_decay", 0.0), *betas, 1e-8, 0.0, flags)
    return Row(name, RULE_RADAM, hyper, torch.optim.RAdam, {"lr": 0.01, "betas": betas, **options})


def adamax_row(name: str, flags: int = 0, beta1: float = 0.9, **options: Any) -> Row:
    hyper = Hyper(0.01, 0.0, 0.0, options.get("weight_decay", 0.0), beta1, 0.99, 1e-8, 0.0, flags)
    return Row(name, RULE_ADAMAX, hyper, torch.optim.Adamax, {"lr": 0.01, "betas": (beta1, 0.99), **options})


def adadelta_row(name: str, flags: int = 0, rho: float = 0.9, **options: Any) -> Row:
    hyper = Hyper(0.5, 0.0, 0.0, options.get("weight_decay", 0.0), 0.0, rho, 1e-6, 0.0, flags)
    return Row(name, RULE_ADADELTA, hyper, torch.optim.Adadelta, {"lr": 0.5, "rho": rho, **options})


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
    adam_row("amsgrad", HYPER_AMSGRAD, amsgrad=True),
    adam_row("amsgrad-decay-maximize", HYPER_AMSGRAD | HYPER_MAXIMIZE, amsgrad=True, weight_decay=0.1, maximize=True),
    adam_row("amsgrad-adamw", HYPER_AMSGRAD | HYPER_DECOUPLED, amsgrad=True, weight_decay=0.1),
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
NADAM_ROWS = (
    nadam_row("nadam"),
    nadam_row("nadam-decay-low-beta1", beta1=0.3, weight_decay=0.1),
    nadam_row("nadam-no-momentum-decay", momentum_decay=0.0),
    nadam_row("nadam-momentum-decay-maximize", HYPER_MAXIMIZE, momentum_decay=0.5, maximize=True),
    nadam_row("nadamw", HYPER_DECOUPLED, weight_decay=0.1, decoupled_weight_decay=True),
)
RADAM_ROWS = (
    radam_row("radam"),
    radam_row("radam-decay-early", betas=(0.3, 0.8), weight_decay=0.1),
    radam_row("radam-never-rectified", betas=(0.9, 0.5)),
    radam_row("radam-maximize", HYPER_MAXIMIZE, maximize=True),
    radam_row("radamw", HYPER_DECOUPLED, weight_decay=0.1, decoupled_weight_decay=True),
)
ADAMAX_ROWS = (
    adamax_row("adamax"),
    adamax_row("adamax-decay-low-beta1", beta1=0.3, weight_decay=0.1),
    adamax_row("adamax-maximize", HYPER_MAXIMIZE, maximize=True),
)
ADADELTA_ROWS = (
    adadelta_row("adadelta"),
    adadelta_row("adadelta-decay-low-rho", rho=0.4, weight_decay=0.01),
    adadelta_row("adadelta-maximize", HYPER_MAXIMIZE, maximize=True),
)
_OF_ROOTS = ADAM_ROWS, ADAGRAD_ROWS, RMSPROP_ROWS, NADAM_ROWS, RADAM_ROWS, ADAMAX_ROWS, ADADELTA_ROWS
ROOT_ROWS: tuple[Row, ...] = sum(_OF_ROOTS, ())  # the rules that take a square root
ALL_ROWS = SGD_ROWS + ROOT_ROWS
ROWS = pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: row.name)
SOME_ROWS = [row for rows in (SGD_ROWS, *_OF_ROOTS) for row in (rows[0], rows[-1])]
"""Of each rule the plain row and one with options."""


@dataclass(frozen=True)
class Job:
    """All inputs of a fold."""

    row: Row
    segments: list[tuple[int, int, int]]
    pushes: Pushes
    weights: Floats
    state: Floats
    steps: npt.NDArray[np.int64]
    scale: float = 1.0
    rate_scale: float = 1.0
    ema_decay: float | None = None
    gradient_type: int = compiled.FLOAT32
    halves: tuple[npt.NDArray[np.uint16], int] | None = None  # where the weights are written as halves, and their type

    def fold(self, mode: int, isa: str, ranges: Sequence[tuple[int, int]] | None = None) -> Result:
        """Fold with ordinary and with non-temporal stores; both must give the same bits."""
        options = {**self.options(), "instruction_set": isa, "ranges": ranges}
        if self.halves is not None:
            options |= {"halves_out": self.halves[0], "shown_type": self.halves[1]}
        plain = compiled.fold(self.row.rule, mode, *self.measures(), **options)
        written = self._take_halves()
        streamed = compiled.fold(self.row.rule, mode, *self.measures(), **options, streaming=True)
        assert_same_bits(streamed, plain, "non-temporal stores")
        assert self.halves is None or written == self.halves[0].tobytes()
        return plain

    def _take_halves(self) -> bytes:
        """The halves that a fold wrote; they are zeros afterwards."""
        if self.halves is None:
            return b""
        written = self.halves[0].tobytes()
        self.halves[0][:] = 0
        return written

    def fold_by_reference(self, mode: int) -> Result:
        return reference.fold(self.row.rule, mode, *self.measures(), **self.options())

    def measures(self) -> tuple[Any, ...]:
        """What a fold takes by position, after the rule and the mode."""
        return self.segments, self.pushes, self.weights, self.state, self.steps

    def options(self) -> dict[str, Any]:
        """What it takes by name."""
        options: dict[str, Any] = {"scale": self.scale, "rate_scale": self.rate_scale, "gradient_type": self.gradient_type}
        if self.ema_decay is not None:
            options |= {"ema_plane": len(self.state) - 1, "ema_decay": self.ema_decay}
        return options


def segments_of(lengths: Sequence[int]) -> tuple[list[tuple[int, int, int]], int]:
    """Segments on multiples of 16 floats with gaps between them, in alternating groups; and the total length."""
    segments, offset = [], GAP
    for index, length in enumerate(lengths):
        segments.append((offset, length, index % 2))
        offset += -(-length // 16) * 16 + GAP
    return segments, offset


def in_double(job: Job) -> Job:
    """The job with doubles, all of whose digits count. Zeros of the state stay zeros."""
    random = np.random.default_rng(len(job.weights))

    def longer(values: Any) -> Any:
        return values * (1 + random.random(values.shape) * 2.0**-20)

    pushes: Pushes = [(longer(gradient), *others) for gradient, *others in job.pushes]
    return replace(job, pushes=pushes, weights=longer(job.weights), state=longer(job.state), gradient_type=compiled.FLOAT64)


def normal(random: np.random.Generator, *shape: int) -> Floats:
    return random.standard_normal(shape).astype(np.float32)


def make_job(row: Row, pushes: int, situation: str, seed: int, lengths: Sequence[int] = SIZES) -> Job:
    """A job with random values in `situation` (a key of SITUATIONS). The gaps hold values, too, which a fold must not use."""
    random = np.random.default_rng([seed, pushes])
    segments, n = segments_of(lengths)
    made: Pushes = []
    for index in range(pushes):
        presence, scale, rate, rate_scale = SITUATIONS[situation](index, len(lengths))
        hypers = [each._replace(learning_rate=each.learning_rate * rate) for each in (row.hyper, row.other_hyper())]
        made.append((normal(random, n) / np.float32(scale), hypers, presence, scale, rate_scale))
    state = normal(random, row.state_planes, n)
    for squares in row.squares:
        state[squares] = abs(state[squares]) + (16 if row.hyper.flags & HYPER_CENTERED else 0)
    steps = np.where(np.arange(len(segments)) % 3 == 0, 0, random.integers(1, 1000, len(segments))).astype(np.int64)
    rate_scale = 0.7 if situation == "own_rate_scales" else 1.0
    return Job(row, segments, made, normal(random, n), state, steps, 1 / pushes, rate_scale)


def with_average(job: Job, decay: float, seed: int = 0) -> Job:
    """The same job with one more plane of state, that of the moving average of the weights."""
    average = normal(np.random.default_rng(seed), 1, len(job.weights))
    return replace(job, state=np.concatenate([job.state, average]), ema_decay=decay)


@st.composite
def any_jobs(draw: st.DrawFn, length: st.SearchStrategy[int], decay: st.SearchStrategy[float | None]) -> tuple[Job, int]:
    """A job of any rule, of whose values a share is any 32 bits: subnormal, huge, infinite and not a number; and its mode."""
    lengths, seed = draw(st.lists(length, min_size=1, max_size=5)), draw(st.integers(0, 2**32))
    situation, drawn = draw(st.sampled_from(sorted(SITUATIONS))), draw(decay)
    job = make_job(draw(st.sampled_from(ALL_ROWS)), draw(st.integers(1, 6)), situation, seed, lengths)
    job = job if drawn is None else with_average(job, drawn, seed)
    random, share = np.random.default_rng(seed), draw(st.floats(0, 1))
    for values in (job.weights, job.state, *(push[0] for push in job.pushes)):
        is_any = random.random(values.shape) < share
        values[is_any] = random.integers(0, 2**32, values.shape, np.uint32).view(np.float32)[is_any]
    return job, draw(st.sampled_from([FOLD_SUM, FOLD_EACH]))


class Terms(NamedTuple):
    """A push's presence bits, gradient scale, factor of its learning rates, and rate scale."""

    presence: list[bool]
    scale: float = 1.0
    rate: float = 1.0
    rate_scale: float = 1.0


SITUATIONS: dict[str, Callable[[int, int], Terms]] = {  # of the push with this index, and so many parameters
    "in_all": lambda index, parameters: Terms([True] * parameters),
    "absent_in_one": lambda index, parameters: Terms([not (index == 0 and each % 2) for each in range(parameters)]),
    "absent_in_all": lambda index, parameters: Terms([each % 3 != 1 for each in range(parameters)]),
    "common_loss_scale": lambda index, parameters: Terms([True] * parameters, 1 / 3000.0),
    "own_loss_scales": lambda index, parameters: Terms(
        [(index + each) % 5 != 0 for each in range(parameters)], 1 / (1000.0 + 77 * index)
    ),
    "own_learning_rates": lambda index, parameters: Terms([True] * parameters, rate=1 / (1 + index)),
    "own_rate_scales": lambda index, parameters: Terms(
        [(index + each) % 4 != 0 for each in range(parameters)], rate_scale=1 / (1 + index)
    ),
}


def bits(values: Floats) -> npt.NDArray[Any]:
    """The bits of floats or doubles. All NaNs map to one, because IEEE 754 leaves open which NaN an operation gives."""
    same = np.where(np.isnan(values), values.dtype.type(np.nan), values).astype(values.dtype)
    return same.view(np.int32 if values.dtype == np.float32 else np.int64)


def assert_is_the_references(job: Job, mode: int, context: object = None) -> Result:
    """Compare the fold of every instruction set with the reference's result, which is returned."""
    expected = job.fold_by_reference(mode)
    for isa in compiled.instruction_sets():
        assert_same_bits(job.fold(mode, isa), expected, (isa, context))
    return expected


def assert_same_bits(found: Result, expected: Result, context: object) -> None:
    differing = {
        "weights": np.flatnonzero(bits(found[0]) != bits(expected[0])),
        "state": np.flatnonzero(bits(found[1]) != bits(expected[1])),
        "steps": np.flatnonzero(found[2] != expected[2]),
    }
    assert [array.shape for array in found] == [array.shape for array in expected]
    assert not any(places.size for places in differing.values()), (differing, context)
