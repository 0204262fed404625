"""A small job without torch, which `fastps run` starts: each worker makes so many steps, and says so.

Its arguments are the discipline, the number of steps, and Python code, with os and signal, that the last worker runs after
its twentieth step.
"""

import os
import secrets
import signal
import sys
from typing import Any

import numpy as np

import fastps
from fastps.job import environment

WEIGHTS = {"w": np.zeros(1000, np.float32)}


def command(sync: str, steps: int, mishap: str = "") -> list[str]:
    """The command of a worker."""
    return [sys.executable, __file__, sync, str(steps), mishap]


def main(sync: str, steps: str, mishap: str) -> None:
    """Train as the worker that the environment says."""
    who = environment.identity()
    arguments: dict[str, Any] = {"workers": who.workers, "sync": sync}
    if who.rank == 0:
        store = fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), job=who.name, **arguments)
    else:
        with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), job=secrets.token_hex(8), **arguments) as like:
            layout, hypers = like.layout, like.hypers
        store = fastps.Store.connect(who.name, layout, hypers)
    with store, store.attach(who.rank) as worker:
        worker.wait_for_start()
        for step in range(1, int(steps) + 1):
            worker.step({"w": np.ones(1000)})
            if step == 20 and who.rank == who.workers - 1:
                exec(mishap, {"os": os, "signal": signal})
        print(f"trained to {worker.weights['w'][0]:g}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
