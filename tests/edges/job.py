"""A small job without torch: each worker makes three steps, and says so. Run by `fastps run`."""

import secrets

import numpy as np

import fastps
from fastps.job import environment

WEIGHTS = {"w": np.zeros(1000, np.float32)}


def main() -> None:
    """Train as the worker that the environment says."""
    who = environment.identity()
    arguments = {"workers": who.workers, "sync": "bsp"}
    if who.rank == 0:
        store = fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), job=who.name, **arguments)
    else:
        with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), job=secrets.token_hex(8), **arguments) as like:
            layout, hypers = like.layout, like.hypers
        store = fastps.Store.connect(who.name, layout, hypers)
    with store, store.attach(who.rank) as worker:
        for _ in range(3):
            worker.step({"w": np.ones(1000)})
        print(f"trained to {worker.weights['w'][0]:g}", flush=True)


if __name__ == "__main__":
    main()
