"""The simulated job of each seed of `fastps chaos`: its sizes, its policy and its faults, drawn from the seed.

One seed is one history: the numbers are the same on every machine.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fastps.job.disciplines import DISCIPLINES
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy

SPECS = tuple(spec for row in DISCIPLINES.values() for spec in row.chaos)


@dataclass(frozen=True)
class Plan:
    """One simulated job. `measures` are the arguments of World.run."""

    seed: int
    spec: str
    measures: Mapping[str, Any] = field(repr=False)


@cache
def _policy_of(spec: str) -> Policy:
    """Return the policy, with scale=mean for sums: the checker knows the mean alone (that of one-sample pushes by "batch")."""
    policy = parse_policy(spec)
    if policy.fold not in ("each", "in-order") and policy.scale not in ("mean", "batch"):
        return policy.with_options("scale=mean", scale="mean")
    return policy


@cache
def _values_of(spec: str, workers: int) -> Mapping[str, Any]:
    return _policy_of(spec).values(workers)


def bound_of(policy: Policy) -> int:
    """Return the largest lead over the slowest worker at a grant; -1 if the policy guarantees none."""
    if policy.fold == "all":
        return 0
    if policy.grant == "bounded" and (policy.hard_bound or (policy.release == "printed" and policy.low == policy.high)):
        return policy.high - (policy.bound == "push")
    return -1


def plan_of(seed: int) -> Plan:
    """Draw the seed's job.

    >>> plan_of(7) == plan_of(7)
    True
    """
    rng = random.Random(seed)
    spec = rng.choice(SPECS)
    policy = _policy_of(spec)
    workers = rng.choice((2, 3, 3, 4, 5))
    faulty = rng.random() < 0.9
    restarts = rng.choice((0, 1, 3)) if faulty else 0
    shards = max(policy.shards, rng.choice((1, 1, 2)))
    measures = {
        "workers": workers,
        "steps": rng.randint(3, 10 if restarts == 0 else 6),
        "shards": shards,
        "slots": policy.slots(workers),
        "adagrad": rng.random() < 0.5,
        "is_sum": policy.is_sum,
        "is_mean": policy.is_mean,
        "may_drop": policy.fold == "quorum",
        "bound": bound_of(policy),
        "partial": policy.pull < 1,
        "at_once": policy.at_once,
        "helpers": rng.choice((0, workers - 1)),
        "shared_least": rng.choice((64, 1000)),  # 1000: folds of one push are not shared, those of several are
        "spins": rng.choice((0, 2, 20)),
        "switch": rng.choice((0.003, 0.03, 0.2, 0.6)),
        "crash": rng.choice((1 / 300, 1 / 2000, 1 / 10_000)) if faulty else 0.0,
        "stall": rng.choice((1 / 300, 1 / 2000, 1 / 10_000)) if faulty else 0.0,
        "wake": rng.choice((0.0, 0.01)),
        "null": rng.choice((0.0, 0.1)),
        "crashes": rng.randint(0, workers - 1) if faulty else 0,
        "restarts": restarts,
        "stalls": rng.randint(0, 6) if faulty else 0,
        "busy_factor": rng.choice((1, 1, 10, 100)),
        "skew_ns": rng.choice((0.0, 1e4, 1e7)),
        "policy": dict(_values_of(spec, workers)),
        "tables": seed % 3 == 2,
        "passes": random.Random(-1 - seed).choice((0.0, 0.02, 0.2, 0.9)) if faulty else 0.0,
        "server": random.Random(f"server {seed}").random() < 0.3,
        "wounds": random.Random(f"wounds {seed}").choice((0, 0, 1, 4)) if faulty else 0,
    }
    if policy.at_once and policy.fold == "count":
        measures["fetches"] = random.Random(f"fetches {seed}").random() < 0.5  # as under adv*
    # Many a combiner is stopped, and passed by. Not under R2SP, which paces its grants by the times of the steps.
    if measures["passes"] == 0.9 and policy.grant != "round-robin":
        measures |= {"stalls": 30, "stall": 1 / 300, "busy_factor": 100}
    return Plan(seed, spec, measures)


def publishing_of(seed: int) -> dict[str, Any]:
    """Draw the job of a seed whose worker publishes: the arguments of Publishing and of its `run`."""
    rng = random.Random(f"publisher {seed}")
    faulty = rng.random() < 0.9
    return {
        "readers": rng.randint(1, 5),
        "versions": rng.randint(3, 30),
        "policy": dict(_values_of("asp", 1)),
        "switch": rng.choice((0.003, 0.03, 0.2, 0.6)),
        "crash": rng.choice((1 / 300, 1 / 2000, 1 / 10_000)) if faulty else 0.0,
        "stall": rng.choice((1 / 300, 1 / 2000)) if faulty else 0.0,
        "wake": rng.choice((0.0, 0.01)),
        "crashes": rng.randint(0, 6) if faulty else 0,
        "stalls": rng.randint(0, 6) if faulty else 0,
        "restarts": rng.choice((0, 3, 6)),
        "busy_factor": rng.choice((1, 1, 10, 100)),
    }
