"""The speed of a user's own rule beside the built-in rule of the same arithmetic, SGD with momentum, and with two sums more.

Run it: python -m fastps.bench.user_rule. It prints medians of interleaved folds and their ratios.
"""

import math
import statistics
import time
from collections.abc import Callable

import numpy as np

import fastps
from fastps.kernels.update import fold

LENGTH = 1 << 20
ROUNDS = 31
FOLDS = 20  # a call allocates its results once for this many folds, so the allocation is negligible


@fastps.rule(state=("momentum_buffer",), hyper=("learning_rate", "momentum"))
def momentum_sgd(weight, gradient, momentum_buffer, learning_rate, momentum):  # type: ignore[no-untyped-def]
    """Compute torch.optim.SGD with momentum and no dampening; a first buffer of zeros gives the same first step."""
    momentum_buffer = momentum * momentum_buffer + gradient
    return weight - learning_rate * momentum_buffer, momentum_buffer


def squares(weight, gradient, momentum_buffer, learning_rate, momentum):  # type: ignore[no-untyped-def]
    """Return the terms of the squared norms of the weights and of the step."""
    momentum_buffer = momentum * momentum_buffer + gradient
    return weight * weight, momentum_buffer * momentum_buffer


@fastps.rule(state=("momentum_buffer",), hyper=("learning_rate", "momentum"), sums=squares)
def summing_sgd(weight, gradient, momentum_buffer, learning_rate, momentum, weights, steps):  # type: ignore[no-untyped-def]
    """Compute the same with a trust ratio, as LARS has it."""
    momentum_buffer = momentum * momentum_buffer + gradient
    return weight - learning_rate * math.sqrt(weights / steps) * momentum_buffer, momentum_buffer


def folding(rule: int, address: int) -> Callable[[], None]:
    """Return a function that folds one push into LENGTH weights FOLDS times, from and to the same memory each time."""
    random = np.random.default_rng(0)
    weights, gradient = (random.standard_normal(LENGTH).astype(np.float32) for _ in range(2))
    state = random.standard_normal((1, LENGTH)).astype(np.float32)
    hyper = (0.1, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    pushes = [(gradient, [hyper], [True], 1.0)]
    steps = np.ones(1, np.int64)

    def run() -> None:
        ranges = [(0, LENGTH)] * FOLDS
        fold.fold(rule, fold.FOLD_SUM, [(0, LENGTH, 0)], pushes, weights, state, steps, user_rule=address, ranges=ranges)

    return run


def main() -> None:
    """Print both medians and the ratio."""
    sides = {"built-in": folding(fold.RULE_SGD, 0), "user": folding(fold.RULE_USER, momentum_sgd.address)}
    sides["two sums"] = folding(fold.RULE_SUMMING, summing_sgd.address)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            seconds[name].append((time.perf_counter() - began) / FOLDS)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:10} {median * 1e6:8.1f} us for {LENGTH:,} parameters")
    print(f"ratios     {medians['user'] / medians['built-in']:8.2f} {medians['two sums'] / medians['user']:8.2f}")


if __name__ == "__main__":
    main()
