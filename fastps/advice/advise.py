"""Advice: a recorded run's steps simulated under every discipline, ranked by expected progress, and one recommended.

Expected progress weighs a discipline's useful steps by their staleness and by how many make one update. What it assumes
of the task is in an interval. Advice recommends nothing where the replay does not predict the recorded run itself, and nothing
that is not expected to get further than that run did.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps.advice.progress import UNKNOWN_BATCH, UNKNOWN_MOMENTUM, gain_range, progress
from fastps.advice.replay import for_policy, policy_of, simulation_of, steady_part
from fastps.errors import UsageError
from fastps.job.disciplines import DISCIPLINES
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.simulation.simulate import Simulation, simulate
from fastps.tracing.file import Trace
from fastps.tracing.merging import nodes_of

Row = dict[str, Any]
ABOUT_AS_GOOD = 0.05  # share of the best one's progress within which the recorded discipline stays, or staleness decides
MOST_ERROR = 0.15  # of the replay of the recorded run, beyond which nothing is recommended
HIGH_MOMENTUM = 0.5  # from which on a momentum of each worker is tried
_ROUNDS = 400
_SAME_RATE = 1.25  # by which versions may have fewer pushes at one learning rate
_SAMPLES_ENOUGH = 128  # of a version, with which half as many pushes bore bsp's rate


@dataclass(frozen=True)
class Recorded:
    """What is known of the run that advice is about: its discipline, its samples a push, its optimizer, the replay's error."""

    own: str = "bsp"
    batch: int = UNKNOWN_BATCH
    momentum: float = UNKNOWN_MOMENTUM
    is_sgd: bool = False  # with momentum, which the workers can keep
    error: float = 0.0
    is_auto: bool = False  # whether nobody tunes the learning rate

    @staticmethod
    def of(trace: Trace, error: float, is_auto: bool = False) -> "Recorded":
        """The facts of a trace."""
        found, batch = trace.header.get("optimizer") or {}, int(np.median(trace.steps["samples"])) or UNKNOWN_BATCH
        momentum = float(found.get("momentum", UNKNOWN_MOMENTUM))
        return Recorded(policy_of(trace).spec, batch, momentum, bool(found.get("is_sgd")), error, is_auto)


def candidates(workers: int, batch: int = 1, recorded: Recorded | None = None, backups: int = 0) -> list[str]:
    """Return the specs to compare: every discipline with a range of parameters.

    One worker waits for no other, so for it only the disciplines without numbers are compared. `backups` is a number of backup
    workers to try beside those of the table. Where SGD has a high momentum, each worker's own is tried, too.

    >>> candidates(2)[:4], candidates(1)
    (['bsp', 'bsp,tune=true', 'asp', 'ssp:1'], ['bsp', 'asp'])
    """
    rows = [row for row in DISCIPLINES.values() if workers > 1 or not row.numbers]
    found = [spec for row in rows for spec in row.advised(workers, batch)]
    found += [f"backup:{backups}"] if 0 < backups < workers else []
    if recorded is not None and recorded.is_sgd and recorded.momentum >= HIGH_MOMENTUM:
        found += [f"{spec},momentum=worker" for spec in found if spec.startswith(("asp", "ssp", "dssp", "softsync"))]
    return list(dict.fromkeys(found))


def best_backups(simulation: Simulation, recorded: Recorded) -> int:
    """The number of backup workers with which rounds of these times of computing get furthest; 0: none.

    A round is a step of every worker, drawn from its own times, and lasts as long as the slowest worker that is waited for.
    """
    workers, model, random = simulation.workers, simulation.compute, np.random.default_rng(0)
    drawn = model.build(workers, simulation.seed)
    times = np.array([[drawn.draw(worker) for _ in range(_ROUNDS)] for worker in range(workers)], float)
    for worker, waits in enumerate(model.blocked):
        times[worker] += random.choice(np.array(waits, float), _ROUNDS)
    ends = np.sort(random.permuted(times, axis=1), axis=0).mean(axis=1)

    def progress_of(waited: int) -> float:
        rate = waited / ends[waited - 1]
        row = {"sync": "", "useful_steps_per_s": rate, "updates_per_s": rate / waited, "staleness_mean": 0.0}
        return progress(row, recorded.batch, 0.0)

    return workers - max(range(1, workers + 1), key=progress_of)


def advise(
    trace: Trace,
    specs: Sequence[str] | None = None,
    *,
    cores: float = 0.0,
    tick: Callable[[int, int], None] | None = None,
    is_auto: bool = False,
) -> list[Row]:
    """Return a row for each discipline, in order of expected progress, one of them recommended. `tick(done, of)`: after each.

    `useful_steps_per_s` counts folded pushes only, and a tuned batch as the number of default batches it has. `gain` is the
    expected progress over the recorded discipline's, less 1, and `gain_low` and `gain_high` are its range. Where nothing is
    recommended, the recorded discipline is marked, with the reason. Raises UsageError for a trace that is too short or of
    several nodes, PolicyError for specs that do not fit.
    """
    if len(nodes_of(trace)) > 1:
        raise UsageError("a trace of several nodes has several arenas, and one is played: expected the trace of one node")
    simulation = simulation_of(trace, cores)
    # On other cores than the run's own the replay is about another machine, and its error is not known.
    recorded = Recorded.of(trace, 0.0 if cores else self_test(trace)["error"], is_auto)
    tried = specs or candidates(trace.workers, simulation.batch, recorded, best_backups(simulation, recorded))
    chosen = {policy.spec: policy for policy in ([] if specs else [policy_of(trace)]) + [parse_policy(spec) for spec in tried]}
    return ranked(list(chosen.values()), lambda policy: predicted(policy, simulation), tick, recorded)


def ranked(
    policies: Sequence[Policy],
    predict: Callable[[Policy], Row],
    tick: Callable[[int, int], None] | None,
    recorded: Recorded = Recorded(),
) -> list[Row]:
    """The rows that `predict` returns for each policy, by expected progress, the recommended one marked with its reason."""
    rows = []
    for number, policy in enumerate(policies, 1):
        rows.append(predict(policy))
        if tick is not None:
            tick(number, len(policies))
    own = next((row for row in rows if row["sync"] == recorded.own), rows[0])
    for row in rows:
        row["progress"] = progress(row, recorded.batch, recorded.momentum)
    for row in rows:
        row["gain"] = row["progress"] / max(own["progress"], 1e-9) - 1
        row["gain_low"], row["gain_high"] = gain_range(row, own, recorded.batch, recorded.momentum)
    rows.sort(key=lambda row: (-row["progress"], row["staleness_mean"], row["sync"]))
    recommended, reason = recommend(rows, own, recorded)
    fastest = max(row["useful_steps_per_s"] for row in rows)
    return [
        {
            "rank": rank,
            **row,
            "speed": row["useful_steps_per_s"] / fastest,
            "expected": row["progress"] / rows[0]["progress"],
            "recommended": row is recommended,
            "reason": reason if row is recommended else "",
            "replay_error": recorded.error,
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


def recommend(rows: Sequence[Row], own: Row, recorded: Recorded) -> tuple[Row, str]:
    """Return the row to take, of rows by expected progress, with the reason: the recorded one where nothing is recommended."""
    if len(rows) == 1:
        return own, "no other was compared"
    if abs(recorded.error) > MOST_ERROR:
        off = (
            f"the replay is off by {recorded.error:+.0%} from the recorded run, and more than {MOST_ERROR:.0%} decides nothing"
        )
        return own, f"nothing else is recommended: {off}"
    rows = [row for row in rows if row is own or not recorded.is_auto or bears_rate(row, own, recorded.batch)]
    near = [row for row in rows if row["progress"] >= (1 - ABOUT_AS_GOOD) * rows[0]["progress"]]
    if own in near:
        ahead = rows[0]["progress"] / own["progress"] - 1
        text = "no other is expected to get further" if ahead <= 0 else f"{rows[0]['sync']} is expected {ahead:.1%} ahead"
        return own, f"nothing else is recommended: {text}, which is no more than {ABOUT_AS_GOOD:.0%}"
    near = [row for row in near if row["gain_low"] > 0]
    if not near:
        ahead = f"{rows[0]['sync']} is expected {rows[0]['gain']:.0%} ahead, but for some tasks {rows[0]['gain_low']:+.0%}"
        return own, f"nothing else is recommended: {ahead}"
    kept = {row["sync"]: keeps_rate(parse_policy(row["sync"])) for row in near}
    chosen = min(near, key=lambda row: (not kept[row["sync"]], row["staleness_mean"], row["dropped_share"], -row["progress"]))
    if chosen["progress"] <= own["progress"] / (1 + recorded.error):
        return own, f"nothing else is recommended: {chosen['sync']} is expected below what was measured"
    gain = f"expected to get {chosen['gain']:.0%} further in the same time than {own['sync']}"
    return chosen, f"{gain} ({chosen['gain_low']:+.0%} to {chosen['gain_high']:+.0%} by the task); {tuning(chosen, own)}"


def tuning(row: Row, own: Row) -> str:
    """What a change to this discipline asks for: of its learning rate, and of data that is dropped."""
    kept = keeps_rate(parse_policy(row["sync"])) and keeps_rate(parse_policy(own["sync"]))
    divisor = _in_sum(own) / _in_sum(row) if kept else 1 + row["staleness_mean"]
    stays = kept and divisor <= _SAME_RATE
    rate = "the learning rate stays" if stays else f"tune the learning rate: begin with bsp's / {divisor:.2g}"
    drawn = (
        "; draw with fastps.shard or fastps.BatchSampler, whose batches follow the grants"
        if parse_policy(row["sync"]).tune
        else ""
    )
    dropped = f"; {row['dropped_share']:.0%} of the pushes are dropped, those of the slowest" if row["dropped_share"] else ""
    return rate + drawn + dropped


def bears_rate(row: Row, own: Row, batch: int) -> bool:
    """Whether a row may be taken at the recorded run's learning rate, although its versions have fewer pushes, so more noise.

    They have about as many, or samples enough, or the gain is more than the square of the ratio.
    """
    ratio = _in_sum(own) / _in_sum(row)
    return ratio <= _SAME_RATE or _in_sum(row) * batch >= _SAMPLES_ENOUGH or row["gain"] + 1 >= ratio**2


def _in_sum(row: Row) -> float:
    return float(row["useful_steps_per_s"] / max(row["updates_per_s"], 1e-9))


def keeps_rate(policy: Policy) -> bool:
    """Whether a learning rate that is right for bsp is right here: a version is the mean of fresh pushes."""
    return policy.grant == "next-version" and policy.fold in ("all", "quorum") and policy.scale in ("mean", "batch")


def self_test(trace: Trace, cores: float = 0.0) -> Row:
    """Compare the replay's steps per second with those of the recorded run's steady part."""
    measured = steady_part(trace).steps_per_s
    found = predicted(policy_of(trace), simulation_of(trace, cores))["steps_per_s"]
    return {"sync": trace.header["sync"], "measured": measured, "predicted": found, "error": found / measured - 1}
