"""The benchmarks' method: sides alternate (A B A B), each repeat is long enough for the clock, and medians are shown.

Figures of one run are comparable only with each other.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.errors import Error, UsageError
from fastps.kernels.baseline import roofline

Row = dict[str, Any]
Floats = npt.NDArray[np.float32]

SYNC = ("bsp", "asp")  # fastps's own sides of a step
ABLATIONS = ("alone", "plain", "streaming", "attributes", "server")  # fastps itself with one design choice changed
PEERS = (
    "limit",
    "nccl",
    "gloo",
    "ddp",
    "hogwild",
    "handmade",
    "mpi",
    "rpc",
    "ray",
    "torchrl",
    *ABLATIONS,
)  # "limit" is the roofline


class WrongResultError(Error):
    """A benchmark computed a wrong result, so its figures mean nothing."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how long. `smoke` makes everything tiny: it shows that benchmarks run, and measures nothing."""

    smoke: bool = False
    repeats: int = 7
    workers: tuple[int, ...] = (2, 4)
    parameters: tuple[int, ...] = (25_000, 1_000_000, 25_000_000)
    against: tuple[str, ...] = ("limit", "gloo", "ddp", "hogwild", "handmade")
    repeat_s: float = 0.1
    train_repeat_s: float = 0.5
    backend: str = "cpu"  # of kernels
    device: str = "cpu"  # of a step
    sync: tuple[str, ...] = SYNC  # of a step

    def __post_init__(self) -> None:
        unknown = [name for name in self.against if name not in PEERS]
        for name, value in {"backend": self.backend, "device": self.device}.items():
            if value not in ("cpu", "cuda"):
                raise UsageError(f"--{name}: expected cpu or cuda, found {value!r}")
        if not self.sync or not {*self.sync} <= {*SYNC}:
            raise UsageError(f"--sync: expected some of {', '.join(SYNC)}, found {', '.join(self.sync) or 'none'}")
        if unknown:
            raise UsageError(f"--against: expected some of {', '.join(PEERS)}, found {', '.join(unknown)}")
        for name, values in {"repeats": (self.repeats,), "workers": self.workers, "parameters": self.parameters}.items():
            if not values or min(values) < 1:
                raise UsageError(f"--{name}: expected at least 1, found {', '.join(map(str, values)) or 'none'}")


SMOKE = BenchOptions(smoke=True, repeats=2, workers=(2,), parameters=(1_000,), repeat_s=0.001, train_repeat_s=0.02)


@dataclass(frozen=True)
class Spread:
    """Seconds of one operation over all repeats."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure shown."""
        return statistics.median(self.seconds)

    def row(self) -> Row:
        """Return the keys common to every row of a measurement."""
        keys = {"seconds_median": self.median, "seconds_min": min(self.seconds), "seconds_max": max(self.seconds)}
        return {**keys, "repeats": len(self.seconds)}


def interleaved(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Spread]:
    """Let every side measure once a round, one after the other; each returns the seconds of one operation."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, measure in sides.items():
            seconds[name].append(measure())
    return {name: Spread(tuple(values)) for name, values in seconds.items()}


def repeated(run: Callable[[int], object], repeat_s: float) -> Callable[[], float]:
    """Make a side of `interleaved` that calls `run(times)` for about `repeat_s`; warm-up calls determine `times`."""
    times = 1
    while (seconds := elapsed(run, times)) < repeat_s / 4:
        times *= 4
    times = max(1, round(times * repeat_s / seconds))
    return lambda: elapsed(run, times) / times


def elapsed(run: Callable[[int], object], times: int) -> float:
    """Return the seconds of one call."""
    began_ns = time.perf_counter_ns()
    run(times)
    return (time.perf_counter_ns() - began_ns) / 1e9


def aligned(rows: int, length: int, memory: Any = None) -> Floats:
    """Return float32[rows, length], whose rows begin on cache lines if length is a multiple of 16: zeros, or given memory."""
    floats = np.zeros(rows * length + 16, np.float32) if memory is None else np.frombuffer(memory, np.float32)
    skip = -floats.ctypes.data % roofline.LINE // 4
    found: Floats = floats[skip : skip + rows * length].reshape(rows, length)
    return found


def whole_lines(parameters: int) -> int:
    """Round a number of floats up to whole cache lines."""
    return -(-parameters // 16) * 16


def check(is_right: bool, what: str, found: object) -> None:
    """Raise WrongResultError unless the benchmark's result is right."""
    if not is_right:
        raise WrongResultError(f"expected {what}, found {found}: the benchmark did not do its work, so its time says nothing")
