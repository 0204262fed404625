"""Rules of the user's own: compiled as they are written, refused in one sentence, and agreed on by all workers."""

import functools
import math
import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastps
from fastps.kernels.update import fold
from tests.job.test_summing_rules import EXAMPLES, assert_has_the_bits_of_its_text, lars, one_sum
from tests.support.rules import lazy_rule

SCALE = 0.5


@lazy_rule(hyper=("learning_rate", "decay"))
def stateless(weight, gradient, learning_rate, decay):  # type: ignore[no-untyped-def]
    return weight * (1 - decay) - 2 * SCALE * learning_rate * gradient


@lazy_rule(state=("momentum_buffer",), hyper=("learning_rate", "momentum"), initial=(0.25,))
def sign_sgd(weight, gradient, momentum_buffer, learning_rate, momentum):  # type: ignore[no-untyped-def]
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * gradient
    if momentum_buffer == 0:
        return weight, momentum_buffer
    return weight - learning_rate * math.copysign(1, momentum_buffer), momentum_buffer


@lazy_rule(state=("mean", "square"), hyper=("learning_rate", "beta1", "beta2", "epsilon", "step"))
def root(weight, gradient, mean, square, learning_rate, beta1, beta2, epsilon, step):  # type: ignore[no-untyped-def]
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient**2
    rate = learning_rate * min(step / 100, 1)
    return weight - rate * mean / (math.sqrt(square) + epsilon), mean, square


@lazy_rule(state=tuple("abcdefgh"))
def eight(weight, gradient, a, b, c, d, e, f, g, h, learning_rate):  # type: ignore[no-untyped-def]
    return weight - learning_rate * h, gradient, a, b, c, d, e, f, g


@functools.cache
def _updates() -> tuple[Any, ...]:
    return (
        stateless()(learning_rate=0.1, decay=0.01),
        sign_sgd()(learning_rate=0.1, momentum=0.9),
        root()(learning_rate=0.1, beta1=0.9, beta2=0.99, epsilon=1e-8),
        eight()(learning_rate=0.1),
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    update=st.deferred(lambda: st.sampled_from(_updates())),
    mode=st.sampled_from([fold.FOLD_SUM, fold.FOLD_EACH]),
    pushes=st.integers(1, 4),
    lengths=st.lists(st.sampled_from([1, 15, 64, 65, 255, 1025, 1100]), min_size=1, max_size=3),
    has_average=st.booleans(),
    is_half=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_compiled_rule_folds_to_the_bits_of_its_python_text(update: Any, **drawn: Any) -> None:
    assert_has_the_bits_of_its_text(update, fold.RULE_USER, **drawn)


def test_a_rule_without_its_address_is_refused() -> None:
    job = ([(0, 4, 0)], [(np.ones(4, np.float32), [_updates()[0].hyper], [True], 1.0)], np.ones(4, np.float32))
    with pytest.raises(ValueError, match="status -2"):
        fold.fold(fold.RULE_USER, fold.FOLD_SUM, *job, np.zeros((0, 4), np.float32), np.zeros(1, np.int64))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_store_trains_with_a_rule_of_the_users_own(sync: str) -> None:
    start = np.linspace(-1, 1, 37, dtype=np.float32)
    update = sign_sgd()(learning_rate=0.01, momentum=0.9)
    with fastps.Store.create({"w": start}, update, sync=sync) as store, store.attach(0) as worker:
        weights, state = start, [np.full(37, 0.25, np.float32)]
        for step in range(5):
            worker.step({"w": worker.weights["w"]})
            weights, state = update.rule.reference(weights, state, weights, update.hyper, 0.01, step)
            assert np.array_equal(worker.weights["w"], weights)


def _made(factor: float) -> fastps.UserRule:
    @fastps.rule()
    def scaled(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
        """Whatever this says."""
        return weight - factor * learning_rate * gradient

    return scaled


def _doubled() -> fastps.UserRule:
    @fastps.rule()
    def scaled(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
        return weight - learning_rate * gradient * 2

    return scaled


@pytest.mark.slow
def test_the_digest_tells_numbers_from_outside_and_code_apart_and_nothing_else() -> None:
    assert _made(1.0).digest == _made(1.0).digest
    assert len({_made(1.0).digest, _made(2.0).digest, _doubled().digest}) == 3


def test_a_worker_with_other_code_is_refused_by_name() -> None:
    weights = {"w": np.ones(3, np.float32)}
    with fastps.Store.create(weights, _made(1.0)(learning_rate=0.1)) as store:
        with fastps.Store.create(weights, _made(2.0)(learning_rate=0.1)) as other:
            with pytest.raises(fastps.LayoutError, match=r"here rule is .*code"):
                fastps.Store.connect(store.job, other.layout, other.hypers, timeout_s=5)


def too_few(weight, gradient, momentum, learning_rate):  # type: ignore[no-untyped-def]
    return weight - learning_rate * gradient


def in_double(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return weight - np.float64(learning_rate) * gradient


def unknown(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return weight.sideways(gradient)


def nested(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return weight - sum(gradient for _ in range(3))


def from_outside(weight, gradient, learning_rate):  # type: ignore[no-untyped-def]
    return too_few(weight, gradient, 0.0, learning_rate)


def with_default(weight, gradient, learning_rate=0.1):  # type: ignore[no-untyped-def]
    return weight


@pytest.mark.parametrize(("function", "options", "message"), [
    (too_few, {"state": ("momentum",)}, "expected it to return 2 values of float32"),
    (in_double, {}, "expected it to return 1 value of float32.*float64"),
    (unknown, {}, "rule 'unknown' cannot be compiled: .*sideways"),
    (nested, {}, "found a function or a comprehension within"),
    (from_outside, {}, "uses 'too_few' from outside, a function"),
    (with_default, {}, "without defaults"),
    (too_few, {}, r"expected the parameters \(weight, gradient, learning_rate\)"),
    (unknown, {"hyper": ("momentum",)}, "expected learning_rate as the first"),
    (unknown, {"state": [f"s{index}" for index in range(9)]}, "at most 8 states"),
    (too_few, {"state": ("momentum",), "initial": (1.0, 2.0)}, "initial value for each of 1 states, found 2"),
    (math.sqrt, {}, "expected a plain function"),
])  # fmt: skip
def test_what_cannot_be_a_rule_is_refused_in_one_sentence(function: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        fastps.rule(**options)(function)
    assert "\n" not in str(refusal.value)


def test_hyper_parameters_of_other_names_are_refused() -> None:
    with pytest.raises(TypeError, match="expected the hyper-parameters learning_rate, momentum, found learning_rate"):
        sign_sgd()(learning_rate=0.1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("made", [stateless, sign_sgd, root, lars, one_sum])
def test_rule_that_was_pickled_is_the_same_rule_in_code_of_its_own(made: Any) -> None:
    rule = made()
    again = pickle.loads(cloudpickle.dumps(rule))
    assert again == rule, "names, digest and initial values; the digest has the numbers that are compiled in"
    assert again.digest == rule.digest and again.sums == rule.sums
    assert again.address != rule.address


def test_importing_fastps_does_not_import_numba() -> None:
    text = "import sys, fastps; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


@pytest.mark.slow
def test_the_example_comes_close_to_the_truth() -> None:
    example = EXAMPLES / "own_rule.py"
    if not example.exists():
        pytest.skip("tests run without the source tree")
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 0.05
