"""Checks of a trace's push log: every accepted push is folded once, versions only grow, and counts agree.

The rules come from the protocol and from the policy's definition, not from the code that folds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps.tracing.file import DROPPED, FOLDED, MESSAGES, OUTCOMES, REJECTED, UNDECIDED, Lines, Trace
from fastps.tracing.merging import before_it_was_sent, nodes_of
from fastps.tracing.summary import folded_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class Violation:
    """One violation: its rule, a sentence, and the worker, shard and version concerned (-1: none in particular)."""

    rule: str
    sentence: str
    worker: int = -1
    shard: int = -1
    version: int = -1


def check(trace: Trace) -> list[Violation]:
    """Return the violations in a trace, the first of each kind and place; empty if the trace is consistent."""
    found = [*_steps(trace)]
    for worker in np.unique(trace.pushes["worker"]):
        for shard in range(int(trace.header["shards"])):
            records = trace.pushes[(trace.pushes["worker"] == worker) & (trace.pushes["shard"] == shard)]
            found += _pushes_of(trace, records, int(worker), shard)
    for shard in range(int(trace.header["shards"])):
        found += _versions_of(trace, shard)
    if len(nodes_of(trace)) > 1:
        found += _causes(trace)
    if not found:
        found += _missing(trace)
        found += _counts(trace)
    return found


def is_complete(trace: Trace) -> bool:
    """Return whether all workers recorded to their end: only then must the push log be complete."""
    return len(trace.header["recorded"]) == trace.workers and not trace.header["unfinished"]


def push_log_row(trace: Trace) -> Row:
    """Return the push log's totals: pushes by outcome, versions, and whether it must be complete."""
    outcomes = trace.pushes["fate"]
    made = _of_versions(trace.pushes)
    return {
        "pushes": len(trace.pushes),
        "folded": int((outcomes == FOLDED).sum()),
        "dropped": int((outcomes == DROPPED).sum()),
        "undecided": int((outcomes == UNDECIDED).sum()),
        "rejected": int((outcomes == REJECTED).sum()),
        "versions": [
            int(made["version"][made["shard"] == shard].max(initial=0)) for shard in range(int(trace.header["shards"]))
        ],
        "complete": is_complete(trace),
    }


def _of_versions(pushes: Lines) -> Lines:
    """The pushes that made a version: folded ones, and rejected ones, which count as steps without a gradient."""
    found: Lines = pushes[(pushes["fate"] == FOLDED) | (pushes["fate"] == REJECTED)]
    return found


def _begins(trace: Trace, worker: int) -> list[int]:
    return [position for rank, _, position in trace.header.get("owners") or () if rank == worker]


def _is_one_push_a_version(trace: Trace) -> bool:
    policy = trace.header["policy"]
    return policy["fold"] in ("each", "in-order") and not policy.get("combine", False)  # older traces lack the key


def _first(wrong: np.ndarray) -> list[int]:
    return [int(place) for place in np.flatnonzero(wrong)[:1]]


def _steps(trace: Trace) -> Iterator[Violation]:
    """Check that a worker's steps are consecutive, and that its times and the versions it reads never decrease."""
    for worker in np.unique(trace.steps["worker"]):
        records = trace.steps_of(int(worker))
        pushes = trace.pushes[(trace.pushes["worker"] == worker) & (trace.pushes["shard"] == 0)]
        begins = [pushes["step"][pushes["position"] >= first][:1] for first in _begins(trace, int(worker))]
        is_first = np.isin(records["step"][1:], np.concatenate([[-1], *begins]))
        for at in _first((np.diff(records["step"]) != 1) & ~is_first):
            first, then = records["step"][at], records["step"][at + 1]
            yield Violation("steps", f"worker {worker}: step {first} is followed by step {then}", int(worker))
        for at in _first((records["computed_ns"] < records["begin_ns"]) | (records["pushed_ns"] < records["computed_ns"])):
            yield Violation("times", f"worker {worker}: step {records['step'][at]} ends before it begins", int(worker))
        for at in _first(records["begin_ns"][1:] < records["computed_ns"][:-1]):
            sentence = f"worker {worker}: step {records['step'][at + 1]} begins before the one before it was computed"
            yield Violation("times", sentence, int(worker))
        for at in _first(np.diff(records["read_version"]) < 0):
            step, before, after = records["step"][at + 1], records["read_version"][at], records["read_version"][at + 1]
            yield Violation("read", f"worker {worker}: step {step} reads version {after} after version {before}", int(worker))


def _pushes_of(trace: Trace, records: Lines, worker: int, shard: int) -> Iterator[Violation]:
    """Check one worker's pushes to one shard: each once, folded in the order posted, with the right staleness."""

    def violation(rule: str, at: int, what: str) -> Violation:
        record = records[at]
        sentence = f"worker {worker}, shard {shard}: the push of step {record['step']} {what}"
        return Violation(rule, sentence, worker, shard, int(record["version"]))

    order = np.argsort(records["position"], kind="stable")
    records = records[order]
    for at in _first(np.diff(records["position"]) == 0):
        same = f"into versions {records['version'][at]} and {records['version'][at + 1]}"
        yield violation("once", at + 1, f"is in the push log twice, {same}")
    at_begins = np.isin(records["position"][1:], _begins(trace, worker))  # what a lost worker saw undecided has no record
    for at in _first((np.diff(records["position"]) > 1) & ~at_begins):
        yield violation("lost", at, "is followed by one that is missing")
    for at in _first(records["fate"] >= len(OUTCOMES)):
        yield violation("fate", at, f"has an unknown outcome: {records['fate'][at]}")
    records = _of_versions(records)
    for at in _first(np.diff(records["version"]) < (1 if _is_one_push_a_version(trace) else 0)):
        yield violation(
            "order", at + 1, f"is folded into version {records['version'][at + 1]}, after one in {records['version'][at]}"
        )
    read = records["version"] - 1 - records["staleness"]
    wrong = (records["staleness"] < 0) | (read < 0) | (read != _read_of(trace, records, worker, shard, read))
    for at in _first(wrong):
        record = records[at]
        says = f"read version {record['read_version']}, and is folded into {record['version']} as {record['staleness']} stale"
        yield violation("staleness", at, says)
    steps = trace.steps_of(worker)
    places = np.searchsorted(steps["step"], records["step"])
    known = (places < len(steps)) & (not _begins(trace, worker))  # step numbers of two owners may be the same
    posted_ns = np.where(known, steps["posted_ns"][np.minimum(places, max(0, len(steps) - 1))] if len(steps) else 0, 0)
    for at in _first(records["decided_ns"] < posted_ns):
        yield violation("times", at, "is folded before it is posted")


def _read_of(trace: Trace, records: Lines, worker: int, shard: int, otherwise: np.ndarray) -> np.ndarray:
    """The versions that pushes were computed with, where the trace has them. Shards may be pulled at different versions."""
    if int(trace.header["shards"]) == 1:
        found: np.ndarray = records["read_version"]
        return found
    inputs = trace.inputs[(trace.inputs["worker"] == worker) & (trace.inputs["shard"] == shard)]
    known = dict(zip(inputs["position"].tolist(), inputs["version"].tolist(), strict=True))
    nulls = trace.steps_of(worker)["step"][trace.steps_of(worker)["null"] == 1]  # they name one version for all shards
    given = np.array([known.get(position, -1) for position in records["position"].tolist()], np.int64)
    return np.where((given < 0) | np.isin(records["step"], nulls), otherwise, given)


def _versions_of(trace: Trace, shard: int) -> Iterator[Violation]:
    """Check that a shard's versions are ordered by time, and that their numbers of pushes fit the policy."""
    records = _of_versions(trace.pushes[trace.pushes["shard"] == shard])
    records = records[np.argsort(records["version"], kind="stable")]
    for at in _first(np.diff(records["decided_ns"]) < 0):
        early, late = records["version"][at], records["version"][at + 1]
        sentence = f"shard {shard}: version {late} comes before version {early}: versions go back"
        yield Violation("monotone", sentence, shard=shard, version=int(late))
    if _is_one_push_a_version(trace):
        for at in _first(np.diff(records["version"]) == 0):
            twice = records["version"][at]
            sentence = f"shard {shard}: version {twice} has two pushes; under {trace.header['sync']} each push is a version"
            yield Violation("once", sentence, shard=shard, version=int(twice))


def _missing(trace: Trace) -> Iterator[Violation]:
    if not is_complete(trace):
        return
    for shard, most in enumerate(push_log_row(trace)["versions"]):
        records = _of_versions(trace.pushes[trace.pushes["shard"] == shard])
        present = np.zeros(most + 1, bool)
        present[records["version"]] = True
        first = (records["version"] - 1 - records["staleness"]).min(initial=most)  # what is read first: where the job began
        present[: max(first, 0) + 1] = True
        for at in _first(~present[1:]):
            yield Violation("lost", f"shard {shard}: no push is part of version {at + 1}", shard=shard, version=at + 1)


def _causes(trace: Trace) -> Iterator[Violation]:
    """Check that on one clock no node takes a message before another one sends it, apart from the clocks' errors."""
    for flow, early_ns in before_it_was_sent(trace)[:1]:
        sent, taken = trace.messages[flow.sent], trace.messages[flow.taken]
        what = MESSAGES[int(sent["kind"])].removeprefix("send ")
        yield Violation(
            "cause",
            f"node {taken['node']} takes the {what} of step {sent['step']} {early_ns / 1e6:.3f} ms before node {sent['node']}"
            " sends it, which is more than the errors of their clocks",
        )


def _counts(trace: Trace) -> Iterator[Violation]:
    """Check that the records agree with the combiners' own counts and commits."""
    committed = trace.header.get("committed")
    if not committed or not is_complete(trace) or (trace.pushes["fate"] == UNDECIDED).any():
        return
    for name, outcomes in (("folded", (FOLDED,)), ("dropped", (DROPPED, REJECTED))):
        for worker, count in enumerate(committed[name]):
            logged = int(((trace.pushes["worker"] == worker) & np.isin(trace.pushes["fate"], outcomes)).sum())
            if logged != count:
                sentence = f"worker {worker}: {logged} pushes are {name} in the push log, {count} by the combiners' count"
                yield Violation("counts", sentence, worker)
    for worker, count in enumerate(committed.get("rows", [])):
        rows = folded_rows(trace)
        logged = int(rows["rows"][rows["worker"] == worker].sum())
        if logged != count:
            yield Violation(
                "counts", f"worker {worker}: {logged} rows are folded in the push log, {count} by the combiners'", worker
            )
    for shard, version in enumerate(trace.header.get("versions", [])):
        most = push_log_row(trace)["versions"][shard]
        if most != version:
            yield Violation(
                "counts", f"shard {shard}: the push log ends at version {most}, the store at {version}", shard=shard
            )
