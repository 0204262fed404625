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
from fastps.kernels.update.fold import FOLD_EACH, FOLD_SUM, HYPER_AMSGRAD, HYPER_CENTERED, HYPER_MAXIMIZE
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


# Of each optimizer: the fold's rule, torch's class, and the options of the rows that do not name them.
_OPTIMIZERS: dict[str, tuple[int, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (compiled.RULE_SGD, torch.optim.SGD, {"lr": 0.1}),
    "adam": (compiled.RULE_ADAM, torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}),
    "adamw": (compiled.RULE_ADAM, torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    "adagrad": (compiled.RULE_ADAGRAD, torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-10}),
    "rmsprop": (compiled.RULE_RMSPROP, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.99, "eps": 1e-8}),
    "nadam": (compiled.RULE_NADAM, torch.optim.NAdam, {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "momentum_decay": 4e-3}),
    "radam": (compiled.RULE_RADAM, torch.optim.RAdam, {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}),
    "adamax": (compiled.RULE_ADAMAX, torch.optim.Adamax, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}),
    "adadelta": (compiled.RULE_ADADELTA, torch.optim.Adadelta, {"lr": 0.5, "rho": 0.9, "eps": 1e-6}),
}
_FIELDS = {
    "lr": "learning_rate", "momentum": "momentum", "dampening": "dampening", "weight_decay": "weight_decay", "alpha": "beta2",
    "rho": "beta2", "eps": "epsilon", "lr_decay": "learning_rate_decay", "momentum_decay": "learning_rate_decay",
}  # fmt: skip
_FLAGS = {
    "maximize": HYPER_MAXIMIZE, "nesterov": compiled.HYPER_NESTEROV, "amsgrad": HYPER_AMSGRAD, "centered": HYPER_CENTERED,
    "decoupled_weight_decay": compiled.HYPER_DECOUPLED,
}  # fmt: skip


def _row(optimizer: str, name: str, **options: Any) -> Row:
    """A row of an optimizer with these options of torch's. A flag is named only where it is set."""
    rule, make, usual = _OPTIMIZERS[optimizer]
    options = usual | options
    beta1, beta2 = options.get("betas", (0.0, 0.0))
    hyper = Hyper(0.0, 0.0, 0.0, 0.0, beta1, beta2, 0.0)
    hyper = hyper._replace(**{_FIELDS[each]: value for each, value in options.items() if each in _FIELDS})
    flags = sum(_FLAGS.get(each, 0) for each in options) | (compiled.HYPER_DECOUPLED if optimizer == "adamw" else 0)
    return Row(name, rule, hyper._replace(flags=flags), make, options)


SGD_ROWS = (
    _row("sgd", "sgd"),
    _row("sgd", "sgd-decay", weight_decay=0.01),
    _row("sgd", "sgd-maximize", maximize=True),
    _row("sgd", "momentum", momentum=0.9),
    _row("sgd", "momentum-decay", momentum=0.9, weight_decay=0.01),
    _row("sgd", "momentum-dampening", momentum=0.9, dampening=0.3),
    _row("sgd", "momentum-all", momentum=0.9, dampening=0.3, weight_decay=0.01, maximize=True),
    _row("sgd", "nesterov", momentum=0.9, nesterov=True),
    _row("sgd", "nesterov-decay", momentum=0.9, weight_decay=0.01, nesterov=True),
)
ADAM_ROWS = (
    _row("adam", "adam"),
    _row("adam", "adam-decay", weight_decay=0.1),
    _row("adam", "adam-low-beta1", betas=(0.3, 0.999)),
    _row("adam", "adam-half-beta1", betas=(0.5, 0.999)),
    _row("adam", "adam-zero-beta1", betas=(0.0, 0.999)),
    _row("adam", "adam-maximize", maximize=True),
    _row("adamw", "adamw", weight_decay=0.1),
    _row("adamw", "adamw-without-decay"),
    _row("adamw", "adamw-low-beta1-maximize", betas=(0.3, 0.999), weight_decay=0.1, maximize=True),
    _row("adam", "amsgrad", amsgrad=True),
    _row("adam", "amsgrad-decay-maximize", amsgrad=True, weight_decay=0.1, maximize=True),
    _row("adamw", "amsgrad-adamw", amsgrad=True, weight_decay=0.1),
)
ADAGRAD_ROWS = (
    _row("adagrad", "adagrad"),
    _row("adagrad", "adagrad-decays", weight_decay=0.01, lr_decay=0.05),
    _row("adagrad", "adagrad-maximize", maximize=True),
)
RMSPROP_ROWS = (
    _row("rmsprop", "rmsprop"),
    _row("rmsprop", "rmsprop-decay-low-alpha", alpha=0.4, weight_decay=0.01),
    _row("rmsprop", "rmsprop-momentum", momentum=0.9),
    _row("rmsprop", "rmsprop-centered", centered=True),
    _row("rmsprop", "rmsprop-centered-low-alpha", alpha=0.4, centered=True),
    _row("rmsprop", "rmsprop-all", momentum=0.9, centered=True, weight_decay=0.01, maximize=True),
)
NADAM_ROWS = (
    _row("nadam", "nadam"),
    _row("nadam", "nadam-decay-low-beta1", betas=(0.3, 0.999), weight_decay=0.1),
    _row("nadam", "nadam-no-momentum-decay", momentum_decay=0.0),
    _row("nadam", "nadam-momentum-decay-maximize", momentum_decay=0.5, maximize=True),
    _row("nadam", "nadamw", weight_decay=0.1, decoupled_weight_decay=True),
)
RADAM_ROWS = (
    _row("radam", "radam"),
    _row("radam", "radam-decay-early", betas=(0.3, 0.8), weight_decay=0.1),
    _row("radam", "radam-never-rectified", betas=(0.9, 0.5)),
    _row("radam", "radam-maximize", maximize=True),
    _row("radam", "radamw", weight_decay=0.1, decoupled_weight_decay=True),
)
ADAMAX_ROWS = (
    _row("adamax", "adamax"),
    _row("adamax", "adamax-decay-low-beta1", betas=(0.3, 0.99), weight_decay=0.1),
    _row("adamax", "adamax-maximize", maximize=True),
)
ADADELTA_ROWS = (
    _row("adadelta", "adadelta"),
    _row("adadelta", "adadelta-decay-low-rho", rho=0.4, weight_decay=0.01),
    _row("adadelta", "adadelta-maximize", maximize=True),
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
