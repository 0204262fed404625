"""What the documents state of the parts of a policy holds in virtual time, also where they are combined.

Jobs of drawn policies run in virtual time, with slow servers, late messages and a straggler. The trace shows what must hold.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fastps.errors import PolicyError
from fastps.job.policy import Policy
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.lab.worlds.chaos_worlds import bound_of
from fastps.simulation.simulate import TRACE_KINDS, ComputeModel
from tests.job.test_policy import SCALES, SENSIBLE
from tests.support.sizes import sample_and_full
from tests.support.virtual_runs import lines_of, played, row_of

WORKERS, STEPS, MS = 4, 25, 1_000_000
NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "low": st.integers(0, 3),
    "high": st.integers(0, 5),
    "release": st.sampled_from(["printed", "next-push"]),
    "hard_bound": st.booleans(),
    "bound": st.sampled_from(["grant", "push"]),
    "credit": st.sampled_from(["listed", "prose"]),
    "combine": st.booleans(),
    "count": st.integers(1, WORKERS),
    "backups": st.integers(0, WORKERS - 1),
    "push_timeout": st.sampled_from([0.0, 0.004]),
    "divisor": st.integers(1, WORKERS),
    "groups": st.integers(0, WORKERS),
    "relay": st.sampled_from([0.0, 0.0, 0.5]),
    "relax": st.sampled_from([0.0, 0.8, 1.0]),
    "tune": st.booleans(),
    "pull": st.sampled_from([0.25, 0.5, 0.75]),
    "pull_timeout": st.sampled_from([0.0, 0.004]),
    "shards": st.integers(2, 4),
    "overlap": st.just(True),
}
READ_WITH = {
    "bounded": ["low", "high", "release", "hard_bound", "bound", "credit"],
    "round-robin": ["relax", "tune"],
    "each": ["combine"],
    "quorum": ["push_timeout"],
    "count": ["groups", "relay"],
}
DELAYS: list[tuple[float, int]] = [(0.0, 0), (0.05, 300 * MS), (0.3, 15 * MS)]
SURROUNDINGS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 1000),
    "late_pushes": st.sampled_from(DELAYS),
    "late_pulls": st.sampled_from(DELAYS),
    "service_ns": st.sampled_from([0, 2 * MS]),
    "update_ns": st.sampled_from([0, MS]),
    "latency_ns": st.sampled_from([0, MS]),
    "slow_servers": st.sampled_from([{}, {0: 8.0}]),
    "compute": st.builds(
        ComputeModel, st.just("lognormal"), st.just(10 * MS), st.sampled_from([0.0, 0.3]), st.sampled_from([{}, {0: 4.0}])
    ),
}


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any policy for WORKERS workers that is accepted, and none that is refused."""
    fold, grant = draw(st.sampled_from([(fold, grant) for fold, grants in SENSIBLE.items() for grant in sorted(grants)]))
    names = [*READ_WITH.get(fold, []), *READ_WITH.get(grant, [])]
    names += draw(st.lists(st.sampled_from(["pull", "pull_timeout", "shards", "overlap"]), unique=True))
    names += [draw(st.sampled_from(["count", "backups"]))] if fold == "quorum" else ["divisor"] * (fold == "count")
    values = {name: draw(NUMBERS[name]) for name in names}
    values["high"] = max(values.get("low", 0), values.get("high", 0))
    scale = draw(st.sampled_from([scale for scale in SCALES if scale != "square-root"]))
    try:
        policy = Policy(fold=fold, grant=grant, scale=scale, **values)
        policy.check_workers(WORKERS)
    except PolicyError:
        reject()
    return policy


def staleness_of(policy: Policy) -> int | None:
    """The largest staleness that docs/disciplines.md states; None: it states none."""
    lead = bound_of(policy)
    if policy.pull < 1 or policy.overlap or policy.groups:
        return None
    if policy.fold in ("all", "quorum"):
        return 0
    if policy.fold == "in-order":
        return WORKERS - 1
    return (2 * lead + 1) * (WORKERS - 1) if lead >= 0 else None


def least_of(policy: Policy) -> int:
    """Pushes that a version takes at least while no worker leaves."""
    counts = {"all": WORKERS, "quorum": policy.count or WORKERS - policy.backups}
    return WORKERS // policy.divisor if policy.fold == "count" else counts.get(policy.fold, 1)


def _keeps_its_bounds(policy: Policy, surroundings: dict[str, Any]) -> None:
    """Run the job, and hold its trace against what the documents state."""
    trace = played(policy, workers=WORKERS, steps=STEPS, **surroundings).trace
    assert trace is not None
    lead, most = bound_of(policy), staleness_of(policy)
    clocks = {shard: dict.fromkeys(range(WORKERS), 0) for shard in range(policy.shards)}
    sums: Counter[tuple[int, int]] = Counter()
    fresh = dict.fromkeys(range(WORKERS), policy.shards)
    for line in trace:
        kind, worker, shard, detail = TRACE_KINDS[line["kind"]], int(line["worker"]), int(line["shard"]), int(line["detail"])
        if kind == "receive":
            clocks[shard][worker] += 1
        if kind == "pull":
            fresh[worker] += 1
        elif kind == "begin":
            assert policy.overlap or fresh[worker] >= policy.pull * policy.shards, "a share f of the shards is fresh"
            fresh[worker] = 0
        elif kind in ("receive", "grant") and lead >= 0:
            ahead = clocks[shard][worker] - min(clocks[shard].values())
            assert ahead <= lead + (kind == "receive"), f"worker {worker} leads shard {shard} by {ahead} at a {kind}"
        elif kind == "drop":
            assert policy.fold == "quorum"
        elif kind == "fold":
            sums[shard, int(line["version"]) + detail] += 1
            assert most is None or detail <= most, f"a staleness of {detail}, not {most} at most"
    assert min(sums.values()) >= least_of(policy)


@sample_and_full(25, 2_000, "draws")
def test_every_accepted_combination_keeps_the_bounds_of_its_parts(draws: int) -> None:
    jobs: Callable[..., Any] = given(policies(), st.fixed_dictionaries(SURROUNDINGS))
    skipped = [HealthCheck.filter_too_much, HealthCheck.too_slow]
    settings(max_examples=draws, deadline=None, derandomize=True, suppress_health_check=skipped)(jobs(_keeps_its_bounds))()


@pytest.mark.parametrize("seed", range(3))
def test_late_pushes_under_a_full_pull_are_dropped_and_never_stale(seed: int) -> None:
    """PSP-SGD, server, line 7: "if t' < t then drop", with the t' of the oldest block that the gradient was computed with."""
    compute = parse_compute("lognormal:10ms,0.4")
    row = row_of("psp:3,1,shards=4", workers=4, steps=200, compute=compute, late_pushes=(0.05, 300_000_000), seed=seed)
    assert row["staleness_max"] == row["stale_blocks"] == 0
    assert row["dropped"] > 0


def test_softsyncs_mean_staleness_is_more_than_n_where_n_does_not_divide_the_workers() -> None:
    """(lambda - 1) / c: with 19 learners and n = 10 each gradient is an update, and <sigma> is 18."""
    row = row_of("softsync:10", workers=19, steps=400, compute=parse_compute("normal:10ms,1ms"))
    assert row["sigma_mean"] == pytest.approx(18, rel=0.02)


def test_a_tuned_batch_follows_a_worker_that_becomes_slower() -> None:
    """After 59 steps at a quarter of its speed it is as slow as the other, and has its first batch again."""
    model = ComputeModel("replay", replay=[[40_000_000], [10_000_000] * 100 + [40_000_000] * 100])
    outcome = played("r2sp:0.8,tune=true", workers=2, steps=161, compute=model, batch=8)
    batches = lines_of(outcome, "begin", 1)["detail"].tolist()
    assert batches[99] == 32 and batches[159] == 8
