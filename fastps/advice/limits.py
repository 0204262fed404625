"""What bounds a recorded run: its cores, and its own steps if no worker ever waited for another."""

from typing import Any

from fastps.advice.replay import core_ns, cores_left, steady_part
from fastps.tracing.file import Trace
from fastps.tracing.merging import nodes_of

Row = dict[str, Any]


def limits(trace: Trace) -> list[Row]:
    """Return bounds on the steps per second of a run's steady part, and what it reached. Raises UsageError for a short run.

    "measured" is the run. "no waiting" is the sum over the workers of the speed that each would have if every grant came at
    once. "cores" is the cores that other programs left, over the processor time of a step; it is left out over several nodes,
    whose machines the trace does not describe.
    """
    steady = steady_part(trace)
    rows: list[Row] = [{"name": "measured", "steps_per_s": steady.steps_per_s}]
    free = 0.0
    for worker in range(trace.workers):
        steps = steady.steps[(steady.steps["worker"] == worker) & (steady.steps["end_ns"] > 0)]
        if len(steps):
            busy_ns = (steps["pushed_ns"] - steps["begin_ns"]) + (steps["end_ns"] - steps["granted_ns"])
            free += 1e9 / max(1.0, float(busy_ns.mean()))
    rows.append({"name": "no waiting", "steps_per_s": free})
    if len(nodes_of(trace)) < 2:
        needed_ns, cores = float(core_ns(trace, steady.steps).mean()), cores_left(trace)
        rows.append({"name": "cores", "steps_per_s": 1e9 * cores / needed_ns, "cores": cores, "core_ms": needed_ns / 1e6})
    return rows
