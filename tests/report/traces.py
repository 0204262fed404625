"""Traces with known facts: made by a few lines of arithmetic, and right by the check of the push log."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastps.job.specs import parse_policy
from fastps.tracing.file import FOLDED, PUSH_DTYPE, STEP_DTYPE, Lines, Trace

MS = 1_000_000
BEGIN = 5_000 * MS
PUSH, FOLD, PULL = MS // 20, MS // 10, MS // 50


def header(sync: str, workers: int, **more: Any) -> dict[str, Any]:
    """The header of a trace whose workers all recorded to their end."""
    notes = {"began_ns": 0, "transfer_ns": 0, "posted": 0, "failure": None, "load": None}
    of_worker = {str(worker): dict(notes) for worker in range(workers)}
    machine = {"cores": 8, "cpu": "a CPU", "python": "3.11"}
    made = {"version": "0", "machine": machine, "job": "job", "sync": sync, "workers": workers}
    made |= {"shards": 1, "policy": asdict(parse_policy(sync)), "parameters": 1000, "model_bytes": 4000, "slots": 1, "spins": 0}
    return {**made, "recorded": list(range(workers)), "unfinished": [], "of_worker": of_worker, **more}


def bsp(compute_ms: list[float], rounds: int, ends: dict[int, int] | None = None, **more: Any) -> Trace:
    """A run under bsp: worker w computes for about compute_ms[w], and makes `ends[w]` steps only."""
    workers = len(compute_ms)
    made = [min(rounds, (ends or {}).get(worker, rounds)) for worker in range(workers)]
    vary = np.random.default_rng(0).uniform(0.95, 1.05, (workers, rounds))
    compute = (np.array(compute_ms)[:, None] * vary * MS).astype(np.int64)
    is_there = np.arange(rounds)[None, :] < np.array(made)[:, None]
    slowest = np.where(is_there, compute, 0).max(axis=0)
    begin = BEGIN + np.append(0, np.cumsum(slowest + PUSH + FOLD + PULL))[:-1]
    granted = begin + slowest + PUSH + FOLD
    edges, versions = [], []
    for worker in range(workers):
        computed = begin + compute[worker]
        columns = [begin, computed, computed + PUSH, computed + PUSH + FOLD // 2, granted, granted + PULL]
        edges.append(np.stack(columns, axis=1)[: made[worker]])
        versions.append(np.arange(1, made[worker] + 1))
    decided = (begin + slowest + PUSH)[None, :].repeat(workers, axis=0)
    return _trace("bsp", edges, versions, [decided[worker][: made[worker]] for worker in range(workers)], **more)


def asp(compute_ms: list[float], steps: int, **more: Any) -> Trace:
    """A run under asp: no worker waits, and each push is a version."""
    edges, posted = [], []
    for worker, mean_ms in enumerate(compute_ms):
        vary = np.random.default_rng(worker).uniform(0.9, 1.1, steps)
        compute = (mean_ms * vary * MS).astype(np.int64) + worker  # no two posts at the same time
        begin = BEGIN + np.append(0, np.cumsum(compute + PUSH + FOLD + PULL))[:-1]
        computed = begin + compute
        pushed = computed + PUSH + FOLD
        edges.append(np.stack([begin, computed, computed + PUSH, pushed, pushed, pushed + PULL], axis=1))
        posted.append(edges[-1][:, 2])
    order = np.argsort(np.concatenate(posted), kind="stable")
    versions = np.empty(len(order), np.int64)
    versions[order] = np.arange(1, len(order) + 1)
    parts = np.split(versions, np.cumsum([len(each) for each in posted])[:-1])
    return _trace("asp", edges, parts, posted, **more)


def _trace(
    sync: str,
    edges: list[npt.NDArray[np.int64]],
    versions: list[npt.NDArray[np.int64]],
    decided: list[npt.NDArray[np.int64]],
    **more: Any,
) -> Trace:
    """A trace of these times; what a step reads follows from when it begins."""
    by_time = np.sort(np.concatenate([np.stack([d, v], axis=1) for d, v in zip(decided, versions, strict=True)]), axis=0)
    steps, pushes = [], []
    for worker, (times, version, at_ns) in enumerate(zip(edges, versions, decided, strict=True)):
        read = np.append(0, by_time[:, 1])[np.searchsorted(by_time[:, 0], times[:, 0], "right")]
        step: Lines = np.zeros(len(times), STEP_DTYPE)
        for number, name in enumerate(("begin_ns", "computed_ns", "posted_ns", "pushed_ns", "granted_ns", "end_ns")):
            step[name] = times[:, number]
        step["cpu_ns"], step["queue_ns"] = (times[:, 1] - times[:, 0]) // 2, 0
        step["store_cpu_ns"], step["read_version"], step["step"] = PUSH + FOLD, read, np.arange(len(times))
        step["samples"], step["worker"], step["written"] = 16, worker, 1
        push: Lines = np.zeros(len(times), PUSH_DTYPE)
        push["position"] = push["step"] = step["step"]
        push["read_version"], push["version"], push["decided_ns"] = read, version, at_ns
        push["staleness"], push["worker"], push["fate"], push["written"] = version - 1 - read, worker, FOLDED, 1
        steps.append(step)
        pushes.append(push)
    return Trace(header(sync, len(edges), **more), np.concatenate(steps), np.concatenate(pushes))


def assert_plotly_takes(figures: Iterable[Any]) -> None:
    """Colours are names that the style defines; anything stands for them here."""
    graphs = pytest.importorskip("plotly.graph_objects")
    for figure in figures:
        text = json.dumps(figure.spec, allow_nan=False)
        graphs.Figure(json.loads(re.sub(r"var\(--[\w-]+\)", "#123456", text)))


def with_end(trace: Trace, worker: int, exit_code: int, at_ns: int) -> Trace:
    """The same trace of a worker whose process ended so, by the launcher."""
    notes = dict(trace.header["of_worker"])
    notes[str(worker)] = {**notes[str(worker)], "end": {"at_ns": at_ns, "exit_code": exit_code}}
    return replace(trace, header={**trace.header, "of_worker": notes, "unfinished": [worker]})
