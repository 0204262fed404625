"""Advice: a recorded run's steps simulated under every discipline, ranked by speed, and one recommended with the reason.

Advice predicts speed, staleness and waiting, but not the effect of stale gradients on the loss. Of the disciplines that are
about equally fast it therefore recommends the least stale.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fastps.advice.replay import for_policy, policy_of, simulation_of, steady_part
from fastps.errors import UsageError
from fastps.job.disciplines import DISCIPLINES
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.simulation.simulate import Simulation, simulate
from fastps.tracing.file import Trace
from fastps.tracing.merging import nodes_of

Row = dict[str, Any]
ABOUT_AS_FAST = 0.05  # share of the fastest one's speed within which staleness decides


def candidates(workers: int, batch: int = 1) -> list[str]:
    """Return the specs to compare: every discipline with a range of parameters.

    One worker waits for no other, so for it only the disciplines without numbers are compared.

    >>> candidates(2)[:4], candidates(1)
    (['bsp', 'asp', 'ssp:1', 'ssp:2'], ['bsp', 'asp'])
    """
    rows = [row for row in DISCIPLINES.values() if workers > 1 or not row.numbers]
    return [spec for row in rows for spec in row.advised(workers, batch)]


def advise(
    trace: Trace, specs: Sequence[str] | None = None, *, cores: float = 0.0, tick: Callable[[int, int], None] | None = None
) -> list[Row]:
    """Return a row for each discipline, the fastest first, one of them recommended. `tick(done, of)` is called after each.

    `useful_steps_per_s` counts folded pushes only, and a tuned batch as the number of default batches it contains. Raises
    UsageError for a trace that is too short or of several nodes, PolicyError for specs that do not fit.
    """
    if len(nodes_of(trace)) > 1:
        raise UsageError("a trace of several nodes has several arenas, and one is played: expected the trace of one node")
    simulation = simulation_of(trace, cores)
    policies = [parse_policy(spec) for spec in specs or candidates(trace.workers, simulation.batch)]
    chosen = {policy.spec: policy for policy in ([] if specs else [policy_of(trace)]) + policies}
    return ranked(list(chosen.values()), lambda policy: predicted(policy, simulation), tick)


def ranked(policies: Sequence[Policy], predict: Callable[[Policy], Row], tick: Callable[[int, int], None] | None) -> list[Row]:
    """The rows that `predict` returns for each policy, the fastest first, the recommended one marked with its reason."""
    rows = []
    for number, policy in enumerate(policies, 1):
        rows.append(predict(policy))
        if tick is not None:
            tick(number, len(policies))
    rows.sort(key=lambda row: (-row["useful_steps_per_s"], row["staleness_mean"], row["sync"]))
    recommended, reason = recommend(rows)
    fastest = rows[0]["useful_steps_per_s"]
    return [
        {
            "rank": rank,
            **row,
            "speed": row["useful_steps_per_s"] / fastest,
            "recommended": row is recommended,
            "reason": reason if row is recommended else "",
        }
        for rank, row in enumerate(rows, 1)
    ]


def predicted(policy: Policy, simulation: Simulation) -> Row:
    """Simulate one policy, and return the row that advice compares."""
    return compared(policy, for_policy(simulation, policy))


def compared(policy: Policy, simulation: Simulation) -> Row:
    """Simulate one policy on the links that the simulation gives, and return the row that advice compares."""
    row = simulate(policy, simulation).row
    shards, seconds = row["shards"], row["seconds"]
    dropped_share = row["dropped"] / max(1, shards * row["steps"])
    return {
        "sync": policy.spec,
        "steps_per_s": row["steps_per_s"],
        "useful_steps_per_s": row["samples_per_s"] / simulation.batch * (1 - dropped_share),
        "staleness_mean": row["staleness_mean"],
        "staleness_max": row["staleness_max"],
        "wait_share": row["wait_share"],
        "dropped_share": dropped_share,
        "updates_per_s": row["updates"] / shards / seconds,
    }


def recommend(rows: Sequence[Row]) -> tuple[Row, str]:
    """Return the least stale of the rows that are about as fast as the first, with the reason."""
    fastest = rows[0]
    near = [row for row in rows if row["useful_steps_per_s"] >= (1 - ABOUT_AS_FAST) * fastest["useful_steps_per_s"]]
    chosen = min(near, key=lambda row: (row["staleness_mean"], row["staleness_max"], -row["useful_steps_per_s"]))
    behind = 1 - chosen["useful_steps_per_s"] / fastest["useful_steps_per_s"]
    if chosen is fastest and len(near) == 1:
        if len(rows) == 1:
            return chosen, "no other was compared"
        second = f"next is {rows[1]['sync']}, {1 - rows[1]['useful_steps_per_s'] / fastest['useful_steps_per_s']:.0%} slower"
        return chosen, f"the fastest by more than {ABOUT_AS_FAST:.0%}; {second}"
    speed = "the fastest" if chosen is fastest else f"within {behind:.1%} of the fastest, {fastest['sync']}"
    return chosen, (
        f"{speed}, and the least stale of the {len(near)} that are within {ABOUT_AS_FAST:.0%} of it:"
        f" {chosen['staleness_mean']:.2f} versions in the mean, {chosen['staleness_max']} at most"
    )


def self_test(trace: Trace, cores: float = 0.0) -> Row:
    """Compare the replay's steps per second with those of the recorded run's steady part."""
    measured = steady_part(trace).steps_per_s
    found = predicted(policy_of(trace), simulation_of(trace, cores))["steps_per_s"]
    return {"sync": trace.header["sync"], "measured": measured, "predicted": found, "error": found / measured - 1}
