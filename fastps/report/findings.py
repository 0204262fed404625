"""What a trace shows, in sentences, the worst first: lost workers, stragglers, waits, bounds, drops, and what would help."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps.advice.advise import MOST_ERROR
from fastps.advice.replay import limits
from fastps.errors import Error
from fastps.report.figure import listed, number_text, seconds_text
from fastps.tracing.check import check
from fastps.tracing.endings import ABSENT, CUT_SHORT, FAILED, KILLED, Ending, Pause, endings, pauses
from fastps.tracing.file import EVENT_DEATH, EVENT_EXPULSION, EVENT_JOIN, Trace
from fastps.tracing.merging import nodes_of
from fastps.tracing.series import leads, span_of
from fastps.tracing.summary import Row, pace_rows, summary_row, time_rows, worker_rows
from fastps.tracing.waiting import Times, waiting_matrix

BAD, WARNING, NOTE, GOOD = "bad", "warning", "note", "good"
_ORDER = (BAD, WARNING, NOTE, GOOD)
STRAGGLES = 1.25  # times the median of the others
_MUCH_WAITING, _MUCH_QUEUEING, _MUCH_STORE, _MUCH_BLOCKED, _MUCH_FASTER = 0.05, 0.25, 0.2, 0.25, 0.1


@dataclass(frozen=True)
class Finding:
    """One thing that a reader should know."""

    kind: str  # a word for programs, such as "killed", "straggler" or "drops"
    level: str  # "bad", "warning", "note" or "good"
    title: str  # the sentence
    detail: str = ""  # more of it; may be empty
    worker: int = -1  # the worker that it is about; -1: none in particular
    at_s: float = -1.0  # when, in seconds from the first step; -1: at no time in particular


@dataclass(frozen=True)
class Facts:
    """What findings and plots share of a trace; computed once."""

    trace: Trace
    run: Row
    workers: Sequence[Row]
    times: Sequence[Row]
    paces: Sequence[Row]
    endings: Sequence[Ending]
    pauses: Sequence[Pause]
    waited_ns: Times
    advice: Sequence[Row]

    @property
    def names(self) -> list[str]:
        """What the workers are called."""
        return [f"worker {worker}" for worker in range(self.trace.workers)]

    @property
    def begin_ns(self) -> int:
        """The beginning of the first step."""
        return span_of(self.trace)[0]

    @property
    def seconds(self) -> float:
        """From the first step's beginning to the last step's end."""
        begin_ns, end_ns = span_of(self.trace)
        return (end_ns - begin_ns) / 1e9

    def at_s(self, time_ns: int) -> float:
        """A time of the trace in seconds from the first step; 0 for a time before it."""
        return max(0.0, (time_ns - self.begin_ns) / 1e9)


def facts_of(trace: Trace, advice: Sequence[Row] = ()) -> Facts:
    """Compute what findings and plots share. `advice` is the rows of fastps.advice, if it can be given."""
    rows = worker_rows(trace), time_rows(trace), pace_rows(trace)
    return Facts(trace, summary_row(trace), *rows, endings(trace), pauses(trace), waiting_matrix(trace), advice)


def straggler_of(facts: Facts) -> Row | None:
    """Return the row of `pace_rows` of the worker that is slowest beside the others, if it stands out."""
    row = max(facts.paces, key=lambda each: float(each["factor"]), default=None)
    return row if row is not None and row["factor"] >= STRAGGLES else None


def findings_of(facts: Facts) -> list[Finding]:
    """Return the findings, the worst first; if nothing is wrong, one says so."""
    found = [
        *_lost(facts),
        *_replaced(facts),
        *_paused(facts),
        *_wrong_log(facts),
        *_straggler(facts),
        *_waits(facts),
        *_drops(facts),
        *_cores(facts),
        *_blocked(facts),
        *_store(facts),
        *_bound(facts),
        *_faster(facts),
    ]
    if any(each.kind == "limit" for each in found):  # says the same
        found = [each for each in found if each.kind not in ("blocked", "cores")]
    if not any(each.level in (BAD, WARNING) for each in found):
        several = "no worker was lost, none is slower than the others, and no push was dropped"
        alone = "the worker ran to its end, and no push was dropped"
        found.append(Finding("nothing", GOOD, f"Nothing is wrong: {alone if facts.trace.workers == 1 else several}."))
    order = _ORDER if found[-1].kind != "nothing" else (GOOD, *_ORDER)
    return sorted(found, key=lambda each: order.index(each.level))


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 or not value else "less than 1%"


def _lost(facts: Facts) -> Iterator[Finding]:
    for ending in facts.endings:
        worker, at_s = ending.worker, facts.at_s(ending.at_ns)
        if ending.kind == ABSENT:
            yield Finding(
                "absent", WARNING, f"Worker {worker} recorded no step.", "It did not start, or it did not record.", worker
            )
        if not ending.is_lost:
            continue
        when = f"{seconds_text(at_s)} into the run" if ending.is_exact else f"{seconds_text(at_s)} into the run or soon after"
        what = {
            KILLED: f"Worker {worker} was killed by {ending.how}, {when}.",
            FAILED: f"Worker {worker} failed, {when}.",
            CUT_SHORT: f"Worker {worker} was lost, {when}: it was killed, or it crashed.",
        }[ending.kind]
        yield Finding(ending.kind.replace(" ", "-"), BAD, what, _aftermath(facts, ending), worker, at_s)


def _replaced(facts: Facts) -> Iterator[Finding]:
    events = facts.trace.events[facts.trace.events["shard"] == 0]  # none where the run cannot be replayed
    unseen = {ending.worker for ending in facts.endings if not ending.is_lost} & set(facts.trace.header["unfinished"])
    for lost in events[np.isin(events["kind"], (EVENT_DEATH, EVENT_EXPULSION))]:
        worker, at_s = int(lost["worker"]), facts.at_s(int(lost["at_ns"]))
        joins = events["at_ns"][(events["kind"] == EVENT_JOIN) & (events["worker"] == worker)]
        later_s = [facts.at_s(int(join_ns)) - at_s for join_ns in joins if join_ns >= lost["at_ns"]]
        if later_s:
            unseen.discard(worker)
            when = f"{seconds_text(at_s)} into the run, and replaced {seconds_text(later_s[0])} later"
            yield Finding("replaced", WARNING, f"Worker {worker} was lost, {when}.", "", worker, at_s)
    for worker in sorted(unseen):
        yield Finding("replaced", WARNING, f"Worker {worker} was lost, and replaced.", "", worker)


def _aftermath(facts: Facts, ending: Ending) -> str:
    made = int(facts.workers[ending.worker]["steps"])
    reason = f"{ending.how.rstrip('.')}. " if ending.kind == FAILED else ""
    later = facts.trace.steps[(facts.trace.steps["begin_ns"] > ending.at_ns) & (facts.trace.steps["worker"] != ending.worker)]
    others = [str(worker) for worker in np.unique(later["worker"])]
    its = f"It had made {made:,} step{'s' if made != 1 else ''}"
    if not others:
        return f"{reason}{its}; the run ended with it."
    names = f"worker{'s' if len(others) > 1 else ''} {listed(others)}" if len(others) <= 6 else f"{len(others)} other workers"
    return f"{reason}{its}; {names} went on without it for {seconds_text(facts.seconds - facts.at_s(ending.at_ns))}."


def _paused(facts: Facts) -> Iterator[Finding]:
    for pause in facts.pauses[:5]:
        at_s, length = facts.at_s(pause.begin_ns), seconds_text((pause.end_ns - pause.begin_ns) / 1e9)
        if pause.is_known:
            title = f"Worker {pause.worker} was stopped (SIGSTOP) for {length}, {seconds_text(at_s)} into the run."
            yield Finding("stopped", BAD, title, "It was stopped on purpose, by --inject-faults.", pause.worker, at_s)
        else:
            title = f"Worker {pause.worker} stood still for {length}, {seconds_text(at_s)} into the run."
            detail = "In one step it neither computed nor waited for a core: it was stopped, or it waited for data."
            yield Finding("paused", WARNING, title, detail, pause.worker, at_s)
    if len(facts.pauses) > 5:
        yield Finding("pauses", WARNING, f"There are {len(facts.pauses) - 5} more times at which a worker stood still.")


def _wrong_log(facts: Facts) -> Iterator[Finding]:
    violations = check(facts.trace)
    if violations:
        more = f" There are {len(violations) - 1} more; fastps trace --check lists them." if len(violations) > 1 else ""
        yield Finding("push-log", BAD, "The push log is wrong.", f"{violations[0].sentence}.{more}")


def _straggler(facts: Facts) -> Iterator[Finding]:
    found = straggler_of(facts)
    if found is None:
        return
    worker = int(found["worker"])
    rows = [row for row in facts.workers if row["worker"] != worker and row["steps"]]
    mine = facts.workers[worker]
    until = ", until it was lost" if facts.endings[worker].is_lost else ""
    title = (
        f"Worker {worker} is the straggler{until}: its steps computed {found['factor']:.1f} times as long as the others',"
        f" {found['ms']:.3g} ms against {found['others_ms']:.3g} ms."
    )
    yield Finding("straggler", WARNING, title, _why_slow(mine, rows), worker)


def _why_slow(mine: Row, others: Sequence[Row]) -> str:
    names = {
        "cpu_ms_mean": "computing on a core",
        "queue_ms_mean": "waiting for a core",
        "blocked_ms_mean": "blocked: asleep, or waiting for files or data",
    }
    extra = {
        text: mine[name] - float(np.median([row[name] for row in others]))
        for name, text in names.items()
        if mine[name] is not None and all(row[name] is not None for row in others)
    }
    text, most_ms = max(extra.items(), key=lambda item: item[1])
    detail = f"Most of the difference, {most_ms:.3g} ms a step, it spends {text}." if most_ms > 0 else ""
    known = mine["queue_ms_mean"] is not None and all(row["queue_ms_mean"] is not None for row in others)
    if known:
        own = mine["cpu_ms_mean"] + mine["blocked_ms_mean"]
        other = float(np.median([row["cpu_ms_mean"] + row["blocked_ms_mean"] for row in others]))
        detail += f" Without waits for a core it takes {own / max(1e-9, other):.1f} times as long." if other > 0 else ""
    return detail.strip()


def _waits(facts: Facts) -> Iterator[Finding]:
    waited_s, share = facts.waited_ns.sum() / 1e9, facts.run["wait_share"]
    if share < _MUCH_WAITING or facts.trace.workers < 2:
        return
    of_worker = facts.waited_ns[:, :-1].sum(axis=0)
    worker = int(of_worker.argmax())
    row = facts.waited_ns[:, worker]
    by = int(row.argmax())
    part = of_worker[worker] / max(1, facts.waited_ns.sum())
    if of_worker.sum() < facts.waited_ns[:, -1].sum():
        what = "messages between nodes and folds" if len(nodes_of(facts.trace)) > 1 else "folds and wake-ups"
        title = f"Workers waited {_share(share)} of their time, mostly for no worker: for {what}."
        yield Finding("waits", NOTE, title)
        return
    title = f"Workers waited {_share(share)} of their time"
    title += (
        f", and {_share(part)} of that for worker {worker}." if part > 0.4 else ", for none of them much more than for others."
    )
    detail = (
        f"Together they waited {seconds_text(waited_s)}; worker {by} waited longest for worker {worker},"
        f" {seconds_text(row[by] / 1e9)}."
    )
    yield Finding("waits", WARNING if part > 0.5 and share > 0.1 else NOTE, title, detail, worker)


def _drops(facts: Facts) -> Iterator[Finding]:
    dropped = facts.run["dropped"]
    if not dropped:
        return
    worst = max(facts.workers, key=lambda row: int(row["dropped"]))
    share = dropped / max(1, len(facts.trace.pushes))
    title = f"{dropped:,} pushes were dropped, {_share(share)} of all."
    detail = (
        f"{_share(worst['dropped'] / dropped)} of them were worker {worst['worker']}'s: what it computed for them was lost."
    )
    yield Finding("drops", WARNING if share > 0.01 else NOTE, title, detail, int(worst["worker"]))


def _time_shares(facts: Facts) -> dict[str, float]:
    """Which share of all workers' time went where; 0 for a part that the machine does not tell."""
    total = {name: sum(row[name] or 0.0 for row in facts.times) for name in facts.times[0]}
    return {name: value / max(1e-9, sum(total.values())) for name, value in total.items()}


def _cores(facts: Facts) -> Iterator[Finding]:
    share = _time_shares(facts)["queue"]
    if share < _MUCH_QUEUEING:
        return
    cores = facts.trace.header["machine"]["cores"]
    title = f"Workers spent {_share(share)} of their time ready to compute, without a core."
    detail = (
        f"{facts.trace.workers} workers and what else ran shared {cores:g} cores: fewer workers, or more cores, would help."
    )
    yield Finding("cores", NOTE, title, detail)


def _blocked(facts: Facts) -> Iterator[Finding]:
    share = _time_shares(facts)["blocked"]
    if share >= _MUCH_BLOCKED and straggler_of(facts) is None:
        title = f"Workers were blocked for {_share(share)} of their time: asleep, or waiting for files or data."
        yield Finding("blocked", NOTE, title, "Read batches ahead in a thread, if it is the data pipeline.")


def _store(facts: Facts) -> Iterator[Finding]:
    share = _time_shares(facts)["store"]
    if share >= _MUCH_STORE:
        title = f"Pushing, folding and pulling took {_share(share)} of the workers' time."
        yield Finding("store", NOTE, title, "The steps are short for so many parameters: larger batches make fewer pushes.")


def lead_bound(policy: dict[str, Any]) -> int | None:
    """The most pushes by which a worker may lead the slowest right after a push; None where nothing bounds it.

    >>> lead_bound({"grant": "bounded", "low": 3, "high": 3, "release": "printed"})
    4
    """
    if policy.get("grant") != "bounded":
        return None
    if policy.get("bound") == "push":
        return int(policy["high"])
    is_bound = policy["low"] == policy["high"] or policy.get("hard_bound")
    return int(policy["high"]) + 1 if is_bound else None


def _bound(facts: Facts) -> Iterator[Finding]:
    run, sync = facts.run, facts.trace.header["sync"]
    staleness = f"Staleness was {run['staleness_mean']:.2f} versions in the mean and {run['staleness_max']} at most"
    if facts.trace.workers == 1:
        return
    bound = lead_bound(dict(facts.trace.header["policy"]))
    if bound is None:
        none = run["staleness_max"] == 0
        text = (
            "No gradient was stale: all were computed with the newest weights."
            if none
            else f"{staleness}; {sync} bounds it by no number."
        )
        is_open = none or facts.trace.header["policy"].get("fold") == "each"
        yield Finding("staleness", NOTE, text if is_open else f"{staleness}.")
        return
    lead = leads(facts.trace)[1]
    most, at_bound = int(lead.max(initial=0)), float((lead >= bound).mean()) if len(lead) else 0.0
    if most < bound:
        title = f"The lead never reached its bound: at most {most} pushes of {bound}."
        yield Finding("bound", NOTE, title, f"{sync} held no worker up. {staleness}.")
    else:
        title = f"The lead reached its bound of {bound} pushes at {_share(at_bound)} of all pushes."
        yield Finding("bound", NOTE, title, f"There {sync} holds the fast workers up. {staleness}.")


def _faster(facts: Facts) -> Iterator[Finding]:
    own = next((row for row in facts.advice if row["sync"] == facts.trace.header["policy"].get("spec")), None)
    chosen = next((row for row in facts.advice if row["recommended"]), None)
    if own is not None and chosen is not None and abs(chosen["replay_error"]) > MOST_ERROR:
        title = f"No other discipline is recommended: a replay of this run's steps is off by {chosen['replay_error']:+.0%}."
        yield Finding("advice", NOTE, title, "Other programs on the machine may be the reason: record where none run.")
    elif own is not None and chosen is not None and chosen is not own and chosen["gain"] >= _MUCH_FASTER:
        title = f"--sync {chosen['sync']} is expected to get {chosen['gain']:.0%} further in the same time."
        detail = f"It is {chosen['reason']}. Its mean staleness is {chosen['staleness_mean']:.2f}, this run's"
        detail += f" {own['staleness_mean']:.2f}. A replay of this run's own steps is off by {chosen['replay_error']:+.0%}."
        yield Finding("advice", NOTE, title, detail)
        return
    yield from _bounded_by(facts)


def _bounded_by(facts: Facts) -> Iterator[Finding]:
    try:
        rows = limits(facts.trace)
    except Error:
        return
    lead = "No other discipline would be much faster" if facts.advice else "What would speed it up"
    shares, cores, found = _time_shares(facts), rows.get("cores"), straggler_of(facts)
    most = max(shares, key=lambda name: shares[name])
    if cores is not None and rows["measured"]["steps_per_s"] >= 0.75 * cores["steps_per_s"]:
        reached = rows["measured"]["steps_per_s"]
        most_text, reached_text = number_text(cores["steps_per_s"]), number_text(reached)
        title = f"{lead}: the cores are the limit, at {most_text} steps/s, and the run made {reached_text}."
        left = f"Other programs left {cores['cores']:.2g} of {facts.trace.header['machine']['cores']:g} cores, and a step takes"
        detail = f"{left} {cores['core_ms']:.3g} ms of one. More cores, or less work in a step, would speed it up."
        yield Finding("limit", NOTE, title, detail)
        return
    texts = {
        "core": ("is computing", "Less work in a step, or more workers if there are cores for them, would speed it up."),
        "queue": (
            "is waiting for a core",
            "Fewer workers, or a machine with more cores or less other work, would speed it up.",
        ),
        "blocked": ("is sleep, or waiting for files or data", "A faster data pipeline, or batches that are read ahead, would."),
        "store": ("is pushing, folding and pulling", "Larger batches make fewer pushes."),
        "waiting": ("is waiting for grants", "Larger batches make fewer of them."),
    }
    text, detail = texts[most]
    if most == "waiting" and found is not None:
        detail = f"Worker {found['worker']} as fast as the others would speed it up, or a discipline that does not wait for it."
    elif most == "waiting" and len(nodes_of(facts.trace)) > 1:
        detail = "The way to the other nodes takes it: larger batches, or a faster link, would speed it up."
    yield Finding("limit", NOTE, f"{lead}: {_share(shares[most])} of the time {text}.", detail)
