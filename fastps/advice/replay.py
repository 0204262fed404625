"""A recorded run as the simulator's input: each step's time on a core, its waiting time without one, and what bounds the run.

A step's processor time competes with the other workers' for the cores that other processes left; sleeping, files and a
straggler's extra wait do not depend on other workers.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.errors import UsageError
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.simulation.simulate import ComputeModel, Simulation
from fastps.tracing.file import Lines, Trace, TraceError
from fastps.tracing.merging import nodes_of
from fastps.tracing.summary import blocked_ns

_MODEL_BYTES = 1e6  # size of an injected transfer in the simulation: arbitrary, because the bandwidth follows from it
_MOST_STEPS = 5000
_LEAST_STEPS = 200


@dataclass(frozen=True)
class Steady:
    """The part of a run in which every worker was active: its beginning and end in ns, and its steps."""

    begin_ns: int
    end_ns: int
    steps: Lines

    @property
    def steps_per_s(self) -> float:
        """Pushes of all workers per second."""
        return 1e9 * len(self.steps) / max(1, self.end_ns - self.begin_ns)


def policy_of(trace: Trace) -> Policy:
    """Return the run's policy; for a warm-up (`auto`) bsp. Raises TraceError."""
    try:
        policy = Policy(**trace.header["policy"])
    except TypeError as error:
        raise TraceError(f"the trace's policy is from another version of fastps: {error}; record it again") from None
    return parse_policy("bsp") if policy.warm_up else policy


def steady_part(trace: Trace) -> Steady:
    """Return the part from the end of all first steps until the first worker's end. Raises UsageError if it is too short.

    First steps are left out because they include libraries' one-time costs.
    """
    per_worker = [trace.steps_of(worker) for worker in range(trace.workers)]
    short = next((worker for worker, steps in enumerate(per_worker) if len(steps) < 4), None)
    if short is not None:
        count = len(per_worker[short])
        raise UsageError(
            f"expected a trace with at least 4 steps of every worker, found {count} of worker {short}: record longer"
        )
    begin_ns = max(int(steps["computed_ns"][0]) for steps in per_worker)
    end_ns = min(int(steps["computed_ns"][-1]) for steps in per_worker)
    inside = trace.steps[(trace.steps["computed_ns"] > begin_ns) & (trace.steps["computed_ns"] <= end_ns)]
    counts = np.bincount(inside["worker"], minlength=trace.workers)
    if counts.min() < 2:
        raise UsageError(
            f"expected workers that are at work at the same time, found worker {counts.argmin()} alone: record longer"
        )
    return Steady(begin_ns, end_ns, inside)


def cores_left(trace: Trace) -> float:
    """Return the run's cores: the machine's, less the mean use by anything except the workers' own threads.

    A worker's helper threads (for prefetching, or a library's) count as other use, because steps' records do not contain them.
    The kernel prefers a worker that mostly sleeps, so others' mean use overstates what they take: at least `cores_got` is left.
    """
    cores = float(trace.header["machine"]["cores"])
    loads = [note["load"] for note in trace.notes if note.get("load") and note["load"]["now_ns"] > 0]
    if not loads:
        return cores
    machine = float(np.mean([load["machine_ns"] / load["now_ns"] for load in loads]))
    own = float(np.sum([load["thread_ns"] / load["now_ns"] for load in loads]))
    least = min(cores, max(0.01 * cores, cores_got(trace.steps)))
    return float(np.clip(cores - max(0.0, machine - own), least, cores))


def cores_got(steps: Lines) -> float:
    """The cores that the workers had: the share of a core of a runnable worker, times the mean number of these, or 1 if less.

    0 if the machine does not report how long threads waited for a core.
    """
    if (steps["queue_ns"] < 0).any():
        return 0.0
    used_ns, wanted_ns = float(steps["cpu_ns"].sum()), float((steps["cpu_ns"] + steps["queue_ns"]).sum())
    return used_ns / max(wanted_ns, 1.0) * max(1.0, wanted_ns / float(steps["computed_ns"].max() - steps["begin_ns"].min()))


def core_ns(trace: Trace, steps: Lines) -> npt.NDArray[np.int64]:
    """Return each step's core time in ns: for computing, posting, combining and pulls, but not for spinning."""
    store_ns = steps["store_cpu_ns"]
    if trace.header["spins"]:
        store_ns = np.minimum(store_ns, (steps["pushed_ns"] - steps["computed_ns"]) + (steps["end_ns"] - steps["granted_ns"]))
    needed_ns: npt.NDArray[np.int64] = np.maximum(1, steps["cpu_ns"] + np.maximum(0, store_ns)).astype(np.int64)
    return needed_ns


def limits(trace: Trace) -> dict[str, dict[str, float]]:
    """Return bounds on the steps per second of a run's steady part, and what it reached. Raises UsageError for a short run.

    "measured" is the run. "cores" is the cores that other programs left, over the processor time of a step; it is left out over
    several nodes, whose machines the trace does not describe.
    """
    steady = steady_part(trace)
    found = {"measured": {"steps_per_s": steady.steps_per_s}}
    if len(nodes_of(trace)) < 2:
        needed_ns, cores = float(core_ns(trace, steady.steps).mean()), cores_left(trace)
        found["cores"] = {"steps_per_s": 1e9 * cores / needed_ns, "cores": cores, "core_ms": needed_ns / 1e6}
    return found


def simulation_of(trace: Trace, cores: float = 0.0) -> Simulation:
    """Return the simulation that replays a trace's steps on `cores` cores; 0: the run's own. Raises UsageError."""
    steady = steady_part(trace)
    demand, blocked = core_ns(trace, steady.steps), blocked_ns(steady.steps)
    of = [steady.steps["worker"] == worker for worker in range(trace.workers)]
    transfer_ns = max((int(note.get("transfer_ns") or 0) for note in trace.notes), default=0)
    link: dict[str, Any] = {}
    if transfer_ns:
        link = {"model_bytes": _MODEL_BYTES, "bandwidth": 1e9 * _MODEL_BYTES / transfer_ns, "half_duplex": True}
    samples = steady.steps["samples"]
    return Simulation(
        workers=trace.workers,
        steps=int(np.clip(len(steady.steps) // trace.workers, _LEAST_STEPS, _MOST_STEPS)),
        compute=ComputeModel(
            "replay", replay=[demand[lines].tolist() for lines in of], blocked=[blocked[lines].tolist() for lines in of]
        ),
        batch=max(1, int(np.median(samples))),
        cores=cores or cores_left(trace),
        **link,
    )


def for_policy(simulation: Simulation, policy: Policy) -> Simulation:
    """Return the simulation with links like those of this policy's injected transfers: one transfer at a time.

    A server that handles one message at a time models such a link. The few transfers that meet on links of leaves and of
    workers share them evenly.
    """
    if not simulation.bandwidth or policy.groups or policy.overlap:
        return simulation
    return replace(simulation, bandwidth=0.0, service_rate=simulation.bandwidth)
