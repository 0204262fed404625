"""Advice for several nodes: each node's steps from the trace of a run of one or two, played on measured links.

A node's step takes as long as the slowest of its workers computes, and then the sum of their pushes. The times are those of
the recorded run, with the cores that its node had. Where there are more nodes than traces, the traces repeat, each time from
another step on, so that equal nodes are not slow at the same moment.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fastps.advice.advise import Recorded, Row, candidates, compared, ranked
from fastps.errors import PolicyError, UsageError
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.lab.measuring.simulated_links import MeasuredLinks, ModelOnNodes, on_links
from fastps.simulation.simulate import ComputeModel, Simulation
from fastps.tracing.file import Trace

_LEAST_STEPS = 4
_STEPS = 200  # of each node in the simulation, or as many as were recorded
_MOST_STEPS = 2000


def model_of(traces: Sequence[Trace], nodes: int, link_dtype: str = "float32") -> ModelOnNodes:
    """What travels between so many nodes: the model of the recorded run. Raises UsageError for traces that do not fit."""
    if any(len(trace.header.get("of_nodes", ())) > 1 for trace in traces):
        raise UsageError("expected the traces of single nodes, found one that was merged from several: give those")
    counts = {int(trace.header["parameters"]) for trace in traces}
    if len(counts) != 1:
        raise UsageError(f"expected traces of one model, found {' and '.join(map(str, sorted(counts)))} parameters")
    return ModelOnNodes(counts.pop(), nodes, link_dtype)


def node_step_ns(trace: Trace, sum_bytes_s: float = 0.0) -> npt.NDArray[np.int64]:
    """The time of each step of a node in ns, until the sum of its workers' pushes is ready. Its first step is left out.

    `sum_bytes_s` is the rate at which a push is added; 0: that takes no time. Raises UsageError for too few steps.
    """
    each = [trace.steps_of(worker)[1:] for worker in range(trace.workers)]
    count = min(len(steps) for steps in each)
    if count < _LEAST_STEPS - 1:
        raise UsageError(
            f"expected a trace with at least {_LEAST_STEPS} steps of every worker, found {count + 1}: record longer"
        )
    slowest_ns = np.max([(steps["computed_ns"] - steps["begin_ns"])[:count] for steps in each], axis=0)
    model_bytes = 4 * int(trace.header["parameters"])
    sum_ns = round(1e9 * trace.workers * model_bytes / sum_bytes_s) if sum_bytes_s and trace.workers > 1 else 0
    found: npt.NDArray[np.int64] = np.maximum(1, slowest_ns + sum_ns).astype(np.int64)
    return found


def simulation_of_nodes(traces: Sequence[Trace], nodes: int, links: MeasuredLinks) -> Simulation:
    """The simulation of so many nodes that compute as the traces say, without their links. Raises UsageError."""
    if len(traces) > nodes:
        raise UsageError(f"--nodes: expected at least {len(traces)}, one for each trace, found {nodes}")
    times = [node_step_ns(trace, links.home.sum_bytes_s if links.home else 0.0) for trace in traces]
    replay = []
    for node in range(nodes):
        own, turn = times[node % len(times)], node // len(times)
        replay.append(np.roll(own, -turn * max(1, len(own) * len(times) // nodes)).tolist())
    samples = [int(np.median(trace.steps["samples"])) * trace.workers for trace in traces]
    return Simulation(
        workers=nodes,
        steps=int(np.clip(max(map(len, times)), _STEPS, _MOST_STEPS)),
        compute=ComputeModel("replay", replay=replay),
        batch=max(1, int(np.mean(samples))),
    )


def advise_nodes(
    traces: Sequence[Trace],
    links: MeasuredLinks,
    model: ModelOnNodes,
    specs: Sequence[str] | None = None,
    *,
    tick: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Return a row for each discipline between nodes, the fastest first, one of them recommended: the rows of `advise`.

    A step is one of a node. Without `specs`, disciplines that make no sense between nodes are left out. `tick(done, of)` is
    called after each. Raises UsageError for traces that do not fit, and PolicyError for specs that do not.
    """
    simulation = simulation_of_nodes(traces, model.nodes, links)
    policies = [parse_policy(spec) for spec in specs or candidates(model.nodes, simulation.batch)]
    if not specs:
        policies = [policy for policy in policies if not _reason_against(policy, model)]
    recorded = Recorded(batch=simulation.batch)
    return ranked(policies, lambda policy: compared(*on_links(simulation, policy, links, model)), tick, recorded)


def self_test(traces: Sequence[Trace], links: MeasuredLinks, model: ModelOnNodes) -> Row | None:
    """Compare the recorded nodes' steps per second with their prediction under bsp; None for the trace of one node alone.

    The traces of nodes do not say which discipline was between them: the comparison means something for bsp only.
    """
    count = len(traces)
    if count < 2:
        return None
    recorded = ModelOnNodes(model.parameters, count, model.link_dtype)
    policy, simulation = on_links(simulation_of_nodes(traces, count, links), parse_policy("bsp"), links, recorded)
    measured, predicted = sum(map(_node_steps_per_s, traces)), compared(policy, simulation)["steps_per_s"]
    return {"sync": "bsp", "measured": measured, "predicted": predicted, "error": predicted / measured - 1}


def _node_steps_per_s(trace: Trace) -> float:
    """The steps of a node per second, from the end of its first one on."""
    each = [trace.steps_of(worker)["computed_ns"] for worker in range(trace.workers)]
    count = min(map(len, each))
    ends = np.max([times[:count] for times in each], axis=0)
    return float(1e9 * (count - 1) / max(1, ends[-1] - ends[0]))


def _reason_against(policy: Policy, model: ModelOnNodes) -> str:
    """Why a discipline makes no sense between nodes; empty if it does."""
    try:
        model.check(policy)
    except PolicyError as error:
        return str(error)
    return ""
