"""Seeded simulation of jobs on several devices, and the mutants that leave one call out. Every other job has a server."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastps.errors import UsageError
from fastps.lab.gpus.hazards import HazardError
from fastps.lab.worlds.device_workers import FORGET_NOTHING, ONE_SIDE, POST_FIRST, RELEASE_FIRST, ViolationError
from fastps.lab.worlds.device_worlds import World
from fastps.lab.worlds.findings import Findings, in_processes
from fastps.lab.worlds.served_worlds import ServedWorld

CALLS = (
    "record computed at the hook",
    "record computed at the push",
    "record computed at the end",
    "record folded",
    "record copied",
    "record finished at the push",
    "record finished at the pull",
    "fold stream waits for own computed",
    "fold stream waits for others computed",
    "fold stream waits for others folded",
    "compute stream waits for own folded",
    "compute stream waits for others folded",
    "compute stream waits for own copied",
    "copies stream waits for others folded",
    "host waits for finished at the push",
    "host waits for finished at the pull",
)
"""Every record of an event, and every wait for one, of a job in its steady state."""

SERVED_CALLS = (
    "compute stream waits for folded of a further device",
    "copies stream waits for folded of a further device",
    "record snapshot",
    "host waits for snapshot",
    "snapshots stream waits for others folded",
    "snapshots stream waits for folded of a further device",
)
"""The calls that only a job with a server makes, which goes on without lost workers, and those of its checkpoints."""

MUTANTS = {key.replace(" ", "-"): key for key in (*CALLS, *SERVED_CALLS, POST_FIRST, RELEASE_FIRST, FORGET_NOTHING, ONE_SIDE)}
"""By the name on the command line: what is left out, which two steps are swapped, or what is done wrongly."""


def simulate(devices: int, first: int, count: int, *, mutant: str | None = None, stop: bool = False) -> Findings:
    """Simulate `count` seeds from `first` on in this process; with `stop`, end at the first violation.

    >>> simulate(4, 0, 2).violations
    []
    """
    findings = Findings()
    for seed in range(first, first + count):
        kind = ServedWorld if seed % 2 else World
        world = kind(seed, devices, MUTANTS[mutant] if mutant is not None else None)
        found: list[dict[str, Any]] = []
        try:
            world.run()
        except (ViolationError, HazardError) as error:
            found.append({"seed": seed, "spec": world.spec, "violation": str(error)})
        findings.add(Findings(1, world.turns, dict(world.faults), found))
        if stop and found:
            break
    return findings


def run(
    devices: int, seeds: int, first: int = 0, *, mutant: str | None = None, watch: Callable[[Findings], None] | None = None
) -> Findings:
    """Simulate `seeds` seeds from `first` on, in one process a core; `watch` is called with the totals so far.

    Raises UsageError for fewer than one device or an unknown mutant.
    """
    if devices < 1:
        raise UsageError(f"--devices: expected 1 or more devices, found {devices}")
    if mutant is not None and mutant not in MUTANTS:
        raise UsageError(f"--mutant: expected one of {', '.join(MUTANTS)}, found {mutant!r}")
    return in_processes(partial(simulate, devices, mutant=mutant), seeds, first, watch)
