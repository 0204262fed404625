"""A user-defined rule: sign-SGD with momentum, folded by two workers through fastps.Store, without torch.

The sign of the momentum gives each step's direction, and the learning rate its size. So the weights move towards the truth at a
constant pace, and then stay within a step or two of it.
"""

import math
import os

import numpy as np

import fastps

WORKERS, STEPS, LENGTH = 2, 300, 1000


@fastps.rule(state=("momentum_buffer",), hyper=("learning_rate", "momentum"))
def sign_sgd(weight, gradient, momentum_buffer, learning_rate, momentum):
    """Follow the sign of the moving average of gradients."""
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * gradient
    if momentum_buffer == 0:
        return weight, momentum_buffer
    return weight - learning_rate * math.copysign(1, momentum_buffer), momentum_buffer


truth = np.random.default_rng(0).uniform(-1, 1, LENGTH).astype(np.float32)


def work(store: fastps.Store, rank: int) -> float:
    """Push noisy gradients of the squared distance to the truth; return the remaining mean distance."""
    noise = np.random.default_rng(1 + rank)
    with store.attach(rank) as worker:
        for _ in range(STEPS):
            gradient = worker.weights["w"] - truth + noise.normal(0, 0.1, LENGTH).astype(np.float32)
            worker.step({"w": gradient})
        return float(np.abs(worker.weights["w"] - truth).mean())


with fastps.Store.create(
    {"w": np.zeros(LENGTH, np.float32)}, sign_sgd(learning_rate=0.01, momentum=0.9), sync="bsp", workers=WORKERS
) as store:
    child = os.fork()
    if child == 0:
        work(store, 1)
        os._exit(0)
    print(f"mean distance to the truth after {STEPS} steps of {WORKERS} workers: {work(store, 0):.3f}")
    os.waitpid(child, 0)
