"""Seeded simulation of the sessions between nodes: many seeds, in one process a core, and one verdict."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastps.errors import UsageError
from fastps.lab.worlds.findings import Findings, in_processes
from fastps.lab.worlds.node_edges import ViolationError
from fastps.lab.worlds.node_mutants import switched_on
from fastps.lab.worlds.node_worlds import World


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
