"""The ledger of a trace, checked: every accepted push folded once, versions that only grow, and counts that agree.

Rules come from the protocol and from the policy's own words, not from the code that folds. Refuses to repair anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastps.tracing.file import DROPPED, FOLDED, UNDECIDED, Lines, Trace

Row = dict[str, Any]


@dataclass(frozen=True)
class Violation:
    """One thing that cannot be: which rule, of whom (-1: of nobody in particular), and a sentence."""

    rule: str
    sentence: str
    worker: int = -1
    shard: int = -1
    version: int = -1


def check(trace: Trace) -> list[Violation]:
    """Everything in a trace that cannot be; empty if all is well. The first of each kind and place stands for the others."""
    found = [*_steps(trace)]
    for worker in np.unique(trace.pushes["worker"]):
        for shard in range(int(trace.header["shards"])):
            lines = trace.pushes[(trace.pushes["worker"] == worker) & (trace.pushes["shard"] == shard)]
            found += _pushes_of(trace, lines, int(worker), shard)
    for shard in range(int(trace.header["shards"])):
        found += _versions_of(trace, shard)
    if not found:
        found += _missing(trace)
        found += _counts(trace)
    return found


def is_complete(trace: Trace) -> bool:
    """Whether all workers recorded, and none was cut short: only then must nothing be missing."""
    return len(trace.header["recorded"]) == trace.workers and not trace.header["unfinished"]


def ledger_row(trace: Trace) -> Row:
    """What the ledger has: pushes by their fate, updates, and whether it must be complete."""
    fates = trace.pushes["fate"]
    folded = trace.pushes[fates == FOLDED]
    return {
        "pushes": len(trace.pushes),
        "folded": int((fates == FOLDED).sum()),
        "dropped": int((fates == DROPPED).sum()),
        "undecided": int((fates == UNDECIDED).sum()),
        "versions": [
            int(folded["version"][folded["shard"] == shard].max(initial=0)) for shard in range(int(trace.header["shards"]))
        ],
        "complete": is_complete(trace),
    }


def _is_one_push_a_version(trace: Trace) -> bool:
    policy = trace.header["policy"]
    return policy["fold"] in ("each", "in-order") and not policy.get("combine", False)  # older traces do not know it


def _first(wrong: np.ndarray) -> int:
    """Where the first True is, or -1."""
    places = np.flatnonzero(wrong)
    return int(places[0]) if len(places) else -1


def _steps(trace: Trace) -> Iterator[Violation]:
    """A worker's steps follow each other, its times never go back, and neither do the versions that it reads."""
    for worker in np.unique(trace.steps["worker"]):
        lines = trace.steps_of(int(worker))
        at = _first(np.diff(lines["step"]) != 1)
        if at >= 0:
            first, then = lines["step"][at], lines["step"][at + 1]
            yield Violation("steps", f"worker {worker}: step {first} is followed by step {then}", int(worker))
        at = _first((lines["computed_ns"] < lines["begin_ns"]) | (lines["pushed_ns"] < lines["computed_ns"]))
        if at >= 0:
            yield Violation("times", f"worker {worker}: step {lines['step'][at]} ends before it begins", int(worker))
        at = _first(lines["begin_ns"][1:] < lines["computed_ns"][:-1])
        if at >= 0:
            sentence = f"worker {worker}: step {lines['step'][at + 1]} begins before the one before it was computed"
            yield Violation("times", sentence, int(worker))
        at = _first(np.diff(lines["read_version"]) < 0)
        if at >= 0:
            step, before, after = lines["step"][at + 1], lines["read_version"][at], lines["read_version"][at + 1]
            yield Violation("read", f"worker {worker}: step {step} reads version {after} after version {before}", int(worker))


def _pushes_of(trace: Trace, lines: Lines, worker: int, shard: int) -> Iterator[Violation]:
    """One worker's pushes to one shard: each once, folded in the order in which they were posted, into what it says."""

    def violation(rule: str, at: int, what: str) -> Violation:
        line = lines[at]
        sentence = f"worker {worker}, shard {shard}: the push of step {line['step']} {what}"
        return Violation(rule, sentence, worker, shard, int(line["version"]))

    order = np.argsort(lines["position"], kind="stable")
    lines = lines[order]
    at = _first(np.diff(lines["position"]) == 0)
    if at >= 0:
        same = f"into versions {lines['version'][at]} and {lines['version'][at + 1]}"
        yield violation("once", at + 1, f"is in the ledger twice, {same}")
    at = _first(np.diff(lines["position"]) > 1)
    if at >= 0:
        yield violation("lost", at, "is followed by one that is missing")
    at = _first(lines["fate"] > UNDECIDED)
    if at >= 0:
        yield violation("fate", at, f"has a fate that there is not: {lines['fate'][at]}")
    lines = lines[lines["fate"] == FOLDED]
    at = _first(np.diff(lines["version"]) < (1 if _is_one_push_a_version(trace) else 0))
    if at >= 0:
        yield violation(
            "order", at + 1, f"is folded into version {lines['version'][at + 1]}, after one in {lines['version'][at]}"
        )
    read = lines["version"] - 1 - lines["staleness"]
    wrong = (lines["staleness"] < 0) | (read < 0) | (read > lines["read_version"])
    if int(trace.header["shards"]) == 1:
        wrong |= read != lines["read_version"]
    at = _first(wrong)
    if at >= 0:
        line = lines[at]
        says = f"read version {line['read_version']}, and is folded into {line['version']} as {line['staleness']} stale"
        yield violation("staleness", at, says)
    steps = trace.steps_of(worker)
    places = np.searchsorted(steps["step"], lines["step"])
    known = places < len(steps)
    posted_ns = np.where(known, steps["posted_ns"][np.minimum(places, max(0, len(steps) - 1))] if len(steps) else 0, 0)
    at = _first(lines["decided_ns"] < posted_ns)
    if at >= 0:
        yield violation("times", at, "is folded before it is posted")


def _versions_of(trace: Trace, shard: int) -> Iterator[Violation]:
    """A shard's versions come in order of time, and hold as many pushes as its policy says."""
    lines = trace.pushes[(trace.pushes["shard"] == shard) & (trace.pushes["fate"] == FOLDED)]
    lines = lines[np.argsort(lines["version"], kind="stable")]
    at = _first(np.diff(lines["decided_ns"]) < 0)
    if at >= 0:
        early, late = lines["version"][at], lines["version"][at + 1]
        sentence = f"shard {shard}: version {late} comes before version {early}: versions go back"
        yield Violation("monotone", sentence, shard=shard, version=int(late))
    if _is_one_push_a_version(trace):
        at = _first(np.diff(lines["version"]) == 0)
        if at >= 0:
            twice = lines["version"][at]
            sentence = f"shard {shard}: version {twice} has two pushes; under {trace.header['sync']} each push is a version"
            yield Violation("once", sentence, shard=shard, version=int(twice))


def _missing(trace: Trace) -> Iterator[Violation]:
    """Nothing is missing of a trace of all workers: each version has a push."""
    if not is_complete(trace):
        return
    for shard, most in enumerate(ledger_row(trace)["versions"]):
        lines = trace.pushes[(trace.pushes["shard"] == shard) & (trace.pushes["fate"] == FOLDED)]
        present = np.zeros(most + 1, bool)
        present[lines["version"]] = True
        at = _first(~present[1:])
        if at >= 0:
            yield Violation("lost", f"shard {shard}: no push is part of version {at + 1}", shard=shard, version=at + 1)


def _counts(trace: Trace) -> Iterator[Violation]:
    """The lines agree with what the combiners themselves have counted and committed."""
    committed = trace.header.get("committed")
    if committed is None or not is_complete(trace) or (trace.pushes["fate"] == UNDECIDED).any():
        return
    for name, fate in (("folded", FOLDED), ("dropped", DROPPED)):
        for worker, count in enumerate(committed[name]):
            lines = int(((trace.pushes["worker"] == worker) & (trace.pushes["fate"] == fate)).sum())
            if lines != count:
                sentence = f"worker {worker}: {lines} pushes are {name} by the ledger, and {count} by the combiners' count"
                yield Violation("counts", sentence, worker)
    for shard, version in enumerate(trace.header["versions"]):
        most = ledger_row(trace)["versions"][shard]
        if most != version:
            yield Violation("counts", f"shard {shard}: the ledger ends at version {most}, the store at {version}", shard=shard)
