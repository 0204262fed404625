"""The accuracies of plain.py and of main.py with the same seeds: `python seeds.py [EPOCHS [SEEDS]]`.

The workers are forks of this process, so each run begins at once. One thread each.
"""

import contextlib
import functools
import io
import os
import re
import statistics
import sys
import tempfile
import warnings

import main
import plain
import torch

from fastps.integrations.lightning import FastpsStrategy


def accuracy(program, epochs: int, seed: int) -> float:
    """What a program prints as its accuracy."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        program.main(epochs, seed)
    return float(re.search(r"accuracy ([\d.]+)", printed.getvalue())[1])


def compare(epochs: int = 10, seeds: int = 5) -> None:
    """Print a line for each seed, and each program's mean and standard deviation."""
    warnings.filterwarnings("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    main.FastpsStrategy = functools.partial(FastpsStrategy, start_method="fork")
    found = {"plain": [], "main": []}
    for seed in range(seeds):
        found["plain"].append(accuracy(plain, epochs, seed))
        found["main"].append(accuracy(main, epochs, seed))
        print(f"seed {seed}: plain {found['plain'][-1]:.3f}, main {found['main'][-1]:.3f}", flush=True)
    for name, values in found.items():
        deviation = statistics.stdev(values) if seeds > 1 else 0.0
        print(f"{name}: mean {statistics.mean(values):.4f}, standard deviation {deviation:.4f}")


if __name__ == "__main__":
    compare(*map(int, sys.argv[1:]))
