"""What simulated seeds found, and many seeds played in one process a core."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from typing import Any

from fastps.system.interrupts import ignored_by_children

_BATCH = 500  # seeds of one task of a process


@dataclass
class Findings:
    """The totals of simulated seeds, and the violations found.

    Attributes:
        seeds: the number of seeds.
        steps: the number of steps of leaves, servers and edges.
        faults: the number of faults by kind.
        violations: one dict for each failing seed: seed, violation.
    """

    seeds: int = 0
    steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    violations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: "Findings") -> None:
        """Add the other's totals."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.faults = {kind: self.faults.get(kind, 0) + count for kind, count in other.faults.items()}
        self.violations += other.violations


def in_processes(
    play: Callable[[int, int], Findings], seeds: int, first: int, watch: Callable[[Findings], None] | None
) -> Findings:
    """Add up what `play(first, count)` finds in batches of seeds, in one process a core. `play` must pickle."""
    total = Findings()
    batches = [(begin, min(_BATCH, first + seeds - begin)) for begin in range(first, first + seeds, _BATCH)]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(cores, len(batches)), get_context("spawn")) as pool:
        try:
            with ignored_by_children():
                under_way = [pool.submit(play, begin, count) for begin, count in batches]
            for ended in as_completed(under_way):
                total.add(ended.result())
                if watch is not None:
                    watch(total)
        except BaseException:
            for child in active_children():
                child.kill()  # the batches that have begun are waited for otherwise
            raise
    total.violations.sort(key=lambda found: int(found["seed"]))
    return total
