"""The amount of fuzzing: a few examples of a fixed seed in `make test`, or as many as a time allows (`make fuzz`).

FASTPS_FUZZ_SECONDS is the time of all targets together. FASTPS_FUZZ_SEED, printed at the end, repeats a run. This module reads
the clock directly, because the time only decides when to stop.
"""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

SECONDS = float(os.environ.get("FASTPS_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FASTPS_FUZZ_SEED", secrets.randbelow(1 << 32) if SECONDS else 0))
_ROUND = 100  # examples per seed


@dataclass(frozen=True)
class Target:
    """A fuzz target: its share of the time beside the others', and its number of examples if no time is given."""

    share: float
    examples: int


TARGETS = {
    "attach messages": Target(0.2, 120),
    "answers to a joiner": Target(0.13, 40),
    "words of the arena": Target(0.34, 60),
    "checkpoint.json": Target(0.11, 60),
    "tensors.safetensors": Target(0.12, 60),
    "bits of a checkpoint": Target(0.1, 60),
    "traces": Target(0.1, 60),
    "lists of sockets": Target(0.05, 40),
    "names of sockets": Target(0.05, 40),
    "files of processes": Target(0.05, 40),
    "environment": Target(0.1, 40),
    "specs": Target(0.1, 100),
    "texts of options": Target(0.05, 60),
    "descriptions of jobs": Target(0.05, 20),
}
_SHARES = sum(target.share for target in TARGETS.values())
_counts: dict[str, tuple[int, float]] = {}


def fuzz(target: str, check: Callable[[st.DataObject], None]) -> None:
    """Run `check` on the target's number of drawn examples. An exception is a failure, and its example is shrunk."""
    began, seed, examples = time.monotonic(), SEED, 0

    def counted(data: st.DataObject) -> None:
        nonlocal examples
        examples += 1
        check(data)

    settings = hypothesis.settings(
        max_examples=_ROUND if SECONDS else TARGETS[target].examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    try:
        while True:
            hypothesis.seed(seed)(settings(hypothesis.given(st.data())(counted)))()
            seed += 1
            if time.monotonic() - began >= SECONDS * TARGETS[target].share / _SHARES:
                return
    finally:
        _counts[target] = examples, time.monotonic() - began


def counted() -> list[str]:
    """One line for each target that was run."""
    return [
        f"fuzzed {target}: {examples:,} examples in {seconds:.1f} s (FASTPS_FUZZ_SEED={SEED})"
        for target, (examples, seconds) in _counts.items()
    ]
