"""Runs in virtual time of a policy: the row of figures, and the lines of the trace."""

from typing import Any

from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.simulation.simulate import TRACE_KINDS, ComputeModel, Outcome, Simulation, simulate


def played(policy: str | Policy, **options: Any) -> Outcome:
    """A run with its trace."""
    return simulate(parse_policy(policy), Simulation(**options), trace=True)


def row_of(policy: str | Policy, **options: Any) -> dict[str, Any]:
    """The figures of a run."""
    return simulate(parse_policy(policy), Simulation(**options)).row


def lines_of(outcome: Outcome, kind: str, worker: int | None = None) -> Any:
    """The lines of a kind of all workers, or of one."""
    assert outcome.trace is not None
    lines = outcome.trace[outcome.trace["kind"] == TRACE_KINDS.index(kind)]
    return lines if worker is None else lines[lines["worker"] == worker]


def times(outcome: Outcome, kind: str, worker: int) -> list[int]:
    """When the lines of a kind of one worker were written, in ns."""
    return [int(time_ns) for time_ns in lines_of(outcome, kind, worker)["time_ns"]]


def constant(*times_ns: int) -> ComputeModel:
    """Each worker always computes as long."""
    return ComputeModel("replay", replay=[[time_ns] for time_ns in times_ns])
