"""Seeded simulation of the sessions between nodes: many seeds, in one process a core, and one verdict."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

from fastps.errors import UsageError
from fastps.lab.worlds.node_edges import ViolationError
from fastps.lab.worlds.node_mutants import switched_on
from fastps.lab.worlds.node_worlds import World

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


def simulate(nodes: int, first: int, count: int, mutant: str | None = None, *, stop: bool = False) -> Findings:
    """Simulate `count` seeds from `first` on in this process; with `stop`, end at the first violation."""
    findings = Findings()
    with switched_on(mutant):
        for seed in range(first, first + count):
            world = World(seed, nodes)
            found: list[dict[str, Any]] = []
            try:
                world.run()
            except (ViolationError, AssertionError) as error:
                found.append({"seed": seed, "violation": str(error) or type(error).__name__})
            findings.add(Findings(1, world.turns, dict(world.faults), found))
            if stop and found:
                break
    return findings


def run(
    nodes: int, seeds: int, first: int = 0, *, mutant: str | None = None, watch: Callable[[Findings], None] | None = None
) -> Findings:
    """Simulate `seeds` seeds from `first` on, in one process a core; `watch` is called with the totals so far.

    Raises UsageError for fewer than two nodes or an unknown mutant.
    """
    if nodes < 2:
        raise UsageError(f"--nodes: expected 2 or more nodes, found {nodes}")
    with switched_on(mutant):  # an unknown name ends here
        return in_processes(partial(simulate, nodes, mutant=mutant), seeds, first, watch)


def in_processes(
    play: Callable[[int, int], Findings], seeds: int, first: int, watch: Callable[[Findings], None] | None
) -> Findings:
    """Add up what `play(first, count)` finds in batches of seeds, in one process a core. `play` must pickle."""
    total = Findings()
    batches = [(begin, min(_BATCH, first + seeds - begin)) for begin in range(first, first + seeds, _BATCH)]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(cores, len(batches)), get_context("spawn")) as pool:
        under_way = [pool.submit(play, begin, count) for begin, count in batches]
        try:
            for ended in as_completed(under_way):
                total.add(ended.result())
                if watch is not None:
                    watch(total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    total.violations.sort(key=lambda found: int(found["seed"]))
    return total
