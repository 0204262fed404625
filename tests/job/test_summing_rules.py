"""Rules that read sums over a whole parameter: the bits of their Python text in every process; LAMB beside torch."""

import functools
import hashlib
import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastps
from fastps.job.layout import Layout, place
from fastps.job.nodes import Nodes, home_layout
from fastps.job.options import NodePolicy
from fastps.job.specs import parse_policy
from fastps.kernels.update import fold
from tests.support import processes
from tests.support.folds import fold_reference as reference
from tests.support.rules import lazy_rule

EXAMPLES = Path(__file__).parents[2] / "examples"


def squares(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return weight * weight, gradient * gradient


@lazy_rule(sums=squares)
def lars(weight, gradient, learning_rate, weights, gradients):  # type: ignore[no-untyped-def]
    return weight - learning_rate * math.sqrt(weights / (gradients + 1e-12)) * gradient


def one_term(weight, gradient, mean, learning_rate, beta, step):  # type: ignore[no-untyped-def]
    return abs(beta * mean + (1 - beta) * gradient) * min(step, 3)


@lazy_rule(state=("mean",), hyper=("learning_rate", "beta", "step"), initial=(0.5,), sums=one_term)
def one_sum(weight, gradient, mean, learning_rate, beta, step, total):  # type: ignore[no-untyped-def]
    mean = beta * mean + (1 - beta) * gradient
    return weight - learning_rate * mean / (total + 1e-8), mean


def seven_terms(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return 1.0, weight, gradient, weight * gradient, weight**2, gradient**2, max(weight, gradient)


@lazy_rule(sums=seven_terms)
def seven(weight, gradient, learning_rate, a, b, c, d, e, f, g):  # type: ignore[no-untyped-def]
    return weight - learning_rate * (gradient + b / a + c / a + d / a + e / a + f / a + g / a)


@functools.cache
def _updates() -> tuple[Any, ...]:
    return lars()(learning_rate=0.1), one_sum()(learning_rate=0.1, beta=0.9), seven()(learning_rate=0.1)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    update=st.deferred(lambda: st.sampled_from(_updates())),
    mode=st.sampled_from([fold.FOLD_SUM, fold.FOLD_EACH]),
    pushes=st.integers(1, 4),
    lengths=st.lists(st.sampled_from([1, 15, 16, 64, 65, 255, 1024, 1100, 2049]), min_size=1, max_size=3),
    has_average=st.booleans(),
    is_half=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_rule_with_sums_folds_to_the_bits_of_its_python_text(update: Any, **drawn: Any) -> None:
    assert_has_the_bits_of_its_text(update, fold.RULE_SUMMING, **drawn)


def assert_has_the_bits_of_its_text(
    update: Any, number: int, mode: int, pushes: int, lengths: list[int], has_average: bool, is_half: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    segments, length = [], 0
    for each in lengths:  # each begins on a cache line, so those of 16, 64 and 1024 adjoin the next
        segments.append((length, each, 0))
        length += -(-each // 16) * 16
    planes = len(update.rule.planes) + has_average
    state = abs(random.standard_normal((planes, length)).astype(np.float32))
    kind = np.float16 if is_half else np.float32
    made = []
    for index in range(pushes):
        present = [(seed + index + place) % 4 != 0 for place in range(len(lengths))]
        made.append((random.standard_normal(length).astype(kind), [update.hyper], present, 1 / (1 + index % 2), 0.5))
    weights = random.standard_normal(length).astype(np.float32)
    job = (number, mode, segments, made, weights, state, np.array([seed % 50] * len(lengths)))
    options = {"ema_plane": planes - 1, "ema_decay": 0.9} if has_average else {}
    options |= {"scale": 1 / pushes, "rate_scale": 0.7, "gradient_type": fold.FLOAT16 if is_half else fold.FLOAT32}
    expected = reference.fold(*job, user_rule=update.rule.reference, **options)
    for isa in fold.instruction_sets():
        for streaming in (False, True):
            found = fold.fold(*job, user_rule=update.rule.address, instruction_set=isa, streaming=streaming, **options)
            for ours, theirs in zip(found, expected, strict=True):
                assert np.array_equal(ours.view(np.int32), theirs.view(np.int32)), isa


def of_gradient(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return gradient


@pytest.mark.slow
def test_sums_are_in_double_precision() -> None:
    """In single precision 2^24 and ones add up to 2^24."""

    @fastps.rule(sums=of_gradient)
    def shown(weight, gradient, learning_rate, total):  # type: ignore[no-untyped-def]
        return total

    gradient = np.array([2.0**24, *[1.0] * 1026], np.float32)
    none, steps = np.zeros((0, 1027), np.float32), np.zeros(1, np.int64)
    push = (gradient, [shown(learning_rate=1.0).hyper], [True], 1.0)
    job = (fold.RULE_SUMMING, fold.FOLD_SUM, [(0, 1027, 0)], [push], gradient, none, steps)
    found, *_ = fold.fold(*job, user_rule=shown.address)
    assert set(found.tolist()) == {2.0**24 + 1026}


@pytest.mark.slow
def test_a_part_of_a_parameter_is_refused_before_anything_is_written() -> None:
    update = _updates()[0]
    pushes = [(np.ones(48, np.float32), [update.hyper], [True, True], 1.0)]
    weights, none, steps = np.ones(48, np.float32), np.zeros((0, 48), np.float32), np.zeros(2, np.int64)
    outputs = np.full(48, 7, np.float32), none.copy(), np.full(2, 7, np.int64)
    job = fold.Folding(
        fold.RULE_SUMMING, fold.FOLD_SUM, [(0, 32, 0), (32, 16, 0)], pushes, weights, none, steps, *outputs,
        user_rule=update.rule.address,
    )  # fmt: skip
    for first, last in ((0, 16), (16, 32), (16, 48)):
        with pytest.raises(ValueError, match="status -4"):
            job.run(first, last)
    assert set(outputs[0].tolist()) == {7.0}
    assert outputs[2].tolist() == [7, 7]
    job.run(32, 48)
    job.run(0, 32)
    assert outputs[2].tolist() == [1, 1]


# -- in a job ------------------------------------------------------------------------------------------


def _gradient(rank: int, step: int, length: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1000 * rank + step).standard_normal(length).astype(np.float32)


@pytest.mark.parametrize("server", ["workers", pytest.param("process", marks=pytest.mark.slow)])  # it compiles the rule again
def test_a_job_has_the_bits_of_one_process_whoever_folds(server: str) -> None:
    """200,000 floats would be cut into chunks for a rule without sums, and two parameters would be one."""
    lengths, steps = {"a": 150_000, "b": 50_000, "c": 16}, 6
    update = _updates()[1]
    start = {name: np.linspace(-1, 1, length, dtype=np.float32) for name, length in lengths.items()}

    def work(store: fastps.Store, rank: int) -> list[str]:
        with store.attach(rank) as worker:
            for step in range(steps):
                worker.step({name: _gradient(rank, step, length) for name, length in lengths.items()})
            return [hashlib.sha256(worker.weights[name].tobytes()).hexdigest() for name in lengths]

    with fastps.Store.create(start, update, sync="bsp", workers=2, server=server) as store:
        found = processes.results(processes.start_each(lambda rank: work(store, rank), 2), 60)
    expected = []
    for name, length in lengths.items():
        kept, state, count = start[name], np.full((1, length), 0.5, np.float32), np.zeros(1, np.int64)
        for step in range(steps):
            pushes = [(_gradient(rank, step, length), [update.hyper], [True], 1.0) for rank in range(2)]
            kept, state, count = fold.fold(
                fold.RULE_SUMMING, fold.FOLD_SUM, [(0, length, 0)], pushes, kept, state, count, scale=0.5,
                user_rule=update.rule.address,
            )  # fmt: skip
        expected.append(hashlib.sha256(kept.tobytes()).hexdigest())
    assert found == [expected, expected]


def _tenfold(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return weight * 1e20 * 1e20


def test_a_sum_that_is_not_finite_drops_the_push() -> None:
    @fastps.rule(sums=_tenfold)
    def unbothered(weight, gradient, learning_rate, total):  # type: ignore[no-untyped-def]
        return weight - learning_rate * gradient if total < 1e30 else weight + 1

    with fastps.Store.create({"w": np.zeros(3, np.float32)}, unbothered(learning_rate=1.0), nonfinite="reject") as store:
        with store.attach(0) as worker:
            worker.step({"w": np.full(3, -1.0, np.float32)})
            assert worker.weights["w"].tolist() == [1.0] * 3
            worker.step({"w": np.full(3, -1.0, np.float32)})
            assert worker.weights["w"].tolist() == [1.0] * 3


def _two_nodes(policy: NodePolicy) -> Nodes:
    return Nodes(2, 0, 0, 1, "localhost", 29400, policy=policy)


def test_a_job_of_several_nodes_refuses_a_rule_with_sums_unless_each_node_has_the_state() -> None:
    layout = Layout(place([("w", (64,), (1,), 0)], 1), 1, lars(), parse_policy("asp"), 2)
    with pytest.raises(fastps.UnsupportedError, match="rule 'lars' reads sums over whole parameters"):
        home_layout(layout, _two_nodes(NodePolicy()))
    assert home_layout(layout, _two_nodes(NodePolicy(local_steps=4))).rule.name == "sgd"
    assert home_layout(replace(layout, policy=parse_policy("bsp")), _two_nodes(NodePolicy())).rule.name == "lars", "replicas"


# -- what cannot be one --------------------------------------------------------------------------------


def other_squares(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return weight * weight, 2 * gradient * gradient


def of_state(weight, gradient, mean, learning_rate):  # type: ignore[no-untyped-def]
    return weight


def reads_two(weight, gradient, learning_rate, one, other):  # type: ignore[no-untyped-def]
    return weight - learning_rate * gradient * one / other


def reads_none(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return weight - learning_rate * gradient


def reads_eight(weight, gradient, learning_rate, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    return weight


def with_default(weight, gradient, learning_rate, total=1.0):  # type: ignore[no-untyped-def]
    return weight


@pytest.mark.parametrize(("function", "sums", "message"), [
    (reads_two, of_state, r"rule 'of_state': expected the parameters \(weight, gradient, learning_rate\), without"),
    (reads_two, reads_none, "rule 'reads_none': expected it to return 2 values of float32, a term for each sum"),
    (reads_none, squares, r"rule 'reads_none': expected the parameters .* and then 1 to 7 for the sums"),
    (reads_eight, squares, "and then 1 to 7 for the sums"),
    (with_default, reads_none, "rule 'with_default': expected the parameters .*, without defaults"),
    (reads_two, math.sqrt, "expected sums= to be a plain function, found builtin_function_or_method"),
    (reads_two, None, r"expected the parameters \(weight, gradient, learning_rate\), without defaults"),
])  # fmt: skip
def test_sums_that_do_not_fit_are_refused_in_one_sentence(function: Any, sums: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        fastps.rule(sums=sums)(function)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_the_digest_tells_other_terms_apart() -> None:
    made = [fastps.rule(sums=sums)(reads_two).digest for sums in (squares, squares, other_squares)]
    assert made[0] == made[1] != made[2]


# -- the examples --------------------------------------------------------------------------------------


State = dict[str, torch.Tensor]


def _lamb_by_torch(parameter: torch.Tensor, gradient: torch.Tensor, state: State, number: int) -> None:
    """Algorithm 2 of arXiv 1904.00962, with phi(z) = z, and without a ratio where a norm is zero."""
    mean = state.setdefault("m", torch.zeros_like(parameter)).mul_(0.9).add_(gradient, alpha=1 - 0.9)
    square = state.setdefault("v", torch.zeros_like(parameter)).mul_(0.99).addcmul_(gradient, gradient, value=1 - 0.99)
    direction = mean / (1 - 0.9**number) / ((square / (1 - 0.99**number)).sqrt() + 1e-6) + 0.01 * parameter
    norms = float(parameter.norm()), float(direction.norm())
    parameter.sub_(0.002 * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * direction)


def _lion_by_torch(parameter: torch.Tensor, gradient: torch.Tensor, state: State, number: int) -> None:
    """Algorithm 2 of arXiv 2302.06675."""
    mean = state.setdefault("m", torch.zeros_like(parameter))
    parameter.mul_(1 - 0.01 * 0.1).sub_(0.01 * (0.9 * mean + (1 - 0.9) * gradient).sign())
    mean.mul_(0.99).add_(gradient, alpha=1 - 0.99)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "by_torch", "options"), [
    ("lamb", _lamb_by_torch, {"learning_rate": 0.002, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "weight_decay": 0.01}),
    ("lion", _lion_by_torch, {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
], ids=["lamb", "lion"])  # fmt: skip
def test_the_rule_of_an_example_is_that_of_its_paper(
    name: str, by_torch: Callable[..., None], options: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """200 steps of two parameters. Where a sign of lion's differed, a weight would be moved by 0.02."""
    example = EXAMPLES / f"{name}.py"
    if not example.exists():
        pytest.skip("tests run without the source tree")
    rule = runpy.run_path(str(example))[name]
    assert float(capsys.readouterr().out.split(":")[1].split()[0]) > 95
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=generator) for shape in ((17, 13), (500,))]
    ours, states = [torch.nn.Parameter(each.clone()) for each in plain], list[State]([{}, {}])
    with fastps.DistributedOptimizer(fastps.RuleOptimizer(ours, rule, **options)) as optimizer:
        for number in range(1, 201):
            for parameter, other, state in zip(ours, plain, states, strict=True):
                parameter.grad = torch.randn(other.shape, generator=generator)
                by_torch(other, parameter.grad, state, number)
            optimizer.step()
    for parameter, other in zip(ours, plain, strict=True):
        assert float((parameter.detach() - other).abs().max()) < (1e-4 if name == "lion" else 1e-5)
