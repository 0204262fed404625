"""torch.profiler's export on the clock of a trace: the right worker, the right time, and numbers that meet no other's."""

import gzip
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.tracing.file import Trace, TraceError, read
from fastps.tracing.perfetto import origin_of, save
from fastps.tracing.torch_profile import profile_of
from tests.support.scripts import output, program

_SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """One worker's trace, of this process."""
    file = tmp_path_factory.mktemp("profile") / "run.trace"
    weights = {"w": np.ones(3, np.float32)}
    with fastps.trace(file), fastps.Store.create(weights, fastps.SGD(lr=0.5)) as store, store.attach(0) as worker:
        for _ in range(3):
            worker.step({"w": np.ones(3)})
    return read(file)


def _offset_ns(trace: Trace) -> int:
    return int(trace.header["of_worker"]["0"]["unix_offset_ns"])


def _document(trace: Trace, **more: Any) -> dict[str, Any]:
    """An export whose base is the trace's origin less a second, with a range from 1 s to 1.5 s on it, and a flow."""
    base_ns = origin_of(trace) + _offset_ns(trace) - _SECOND_NS
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": os.getpid(), "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1e6, "dur": 5e5, "pid": os.getpid(), "tid": 7},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "ts": 1e6, "id": 3, "pid": os.getpid(), "tid": 7},
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "GPU 1"}},
    ]
    return {"baseTimeNanoseconds": base_ns, "host_name": "here", "traceEvents": events, **more}


def _write(folder: Path, document: Any, name: str = "torch.json") -> Path:
    file = folder / name
    text = json.dumps(document).encode()
    file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return file


@pytest.mark.parametrize("name", ["torch.json", "torch.pt.trace.json.gz"])
def test_times_are_from_the_first_step_and_numbers_meet_no_others(trace: Trace, tmp_path: Path, name: str) -> None:
    profile = profile_of(_write(tmp_path, _document(trace), name), trace)
    assert (profile.worker, profile.error_ns < _SECOND_NS) == (0, True)
    file = tmp_path / "all.json"
    count = save(trace, file, [profile, profile])
    events = json.loads(file.read_text())["traceEvents"]
    assert len(events) == count
    products = [event for event in events if event["name"] == "aten::mm"]
    assert [(event["ts"], event["dur"]) for event in products] == [(pytest.approx(0, abs=0.01), 5e5)] * 2
    assert {event["pid"] for event in events if event.get("cat") == "worker"} == {1}
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [named[event["pid"]] for event in products] == ["worker 0, torch: python"] * 2
    assert len(named) == 2 + 2 * 2 and "worker 0, torch: GPU 1" in named.values()
    assert len({event["id"] for event in events if event.get("cat") == "fwdbwd"}) == 2


def test_a_processs_name_that_is_missing_stays_missing(trace: Trace, tmp_path: Path) -> None:
    document = _document(trace)
    for more in ({}, {"args": {}}, {"args": 3}):
        document["traceEvents"].append({"ph": "M", "name": "process_name", "pid": 2, **more})
    moved = list(profile_of(_write(tmp_path, document), trace).events(0, 5))
    assert [event.get("args") for event in moved[-3:]] == [None, {}, 3]


def test_a_wall_clock_that_was_set_is_stated_as_the_error(trace: Trace, tmp_path: Path) -> None:
    note = {**trace.header["of_worker"]["0"], "unix_offset_end_ns": _offset_ns(trace) + 2_500_000}
    moved = replace(trace, header={**trace.header, "of_worker": {"0": note}})
    assert ", clock ± 2.50 ms" in profile_of(_write(tmp_path, _document(trace)), moved).line


def test_of_two_nodes_with_equal_process_numbers_the_host_decides(trace: Trace, tmp_path: Path) -> None:
    note = trace.header["of_worker"]["0"]
    nodes = [
        {"node": node, "host": f"node{node}", "first_worker": node, "workers": 1, "first_shard": node, "shards": 1}
        | {"offset_ns": 7_000 * node, "error_ns": 30 * node}
        for node in range(2)
    ]
    header = {**trace.header, "workers": 2, "of_worker": {"0": note, "1": note}, "of_nodes": nodes}
    both = replace(trace, header=header)
    first, second = (
        profile_of(_write(tmp_path, _document(trace, host_name=f"node{node}"), f"{node}.json"), both) for node in range(2)
    )
    assert (first.worker, second.worker) == (0, 1)
    assert second.base_ns - first.base_ns == 7_000, "on node 0's clock"
    assert second.error_ns - first.error_ns == 30


@pytest.mark.parametrize(("change", "message"), [
    ({"traceEvents": []}, r"whose processes are \d+; found 0 of them in it"),
    ({"traceEvents": None}, "found another document"),
    ({"traceEvents": [3]}, "found another document"),
    ({"traceEvents": [{"pid": [3]}]}, "found another document"),
    ({"traceEvents": [{"pid": 3, "ts": "soon"}]}, "found another document"),
    ({"baseTimeNanoseconds": None}, "expected baseTimeNanoseconds in torch's file, found none"),
])  # fmt: skip
def test_what_is_no_profile_of_this_run_is_said(trace: Trace, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    document = {name: value for name, value in (_document(trace) | change).items() if value is not None}
    with pytest.raises(TraceError, match=message):
        profile_of(_write(tmp_path, document), trace)


def test_other_files_and_older_traces_are_said(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"--with .*: cannot be read: "):
        profile_of(tmp_path / "none.json", trace)
    for text in ("text", "[" * 200_000):
        (tmp_path / "text.json").write_text(text)
        with pytest.raises(TraceError, match=r"expected the JSON of torch.profiler's export_chrome_trace, found: "):
            profile_of(tmp_path / "text.json", trace)
    whole = gzip.compress(b'{"traceEvents": []}' * 100)
    for damaged in (whole[:-9], whole[:12] + bytes(8)):
        (tmp_path / "torch.json.gz").write_bytes(damaged)
        with pytest.raises(TraceError, match=r"expected the JSON of torch.profiler's export_chrome_trace, found: "):
            profile_of(tmp_path / "torch.json.gz", trace)
    older = replace(trace, header={**trace.header, "of_worker": {"0": {"process_id": os.getpid()}}})
    with pytest.raises(TraceError, match="expected a trace that knows the Unix time, found an older one; record it again"):
        profile_of(_write(tmp_path, _document(trace)), older)


# -- a whole job -------------------------------------------------------------------------------------

_SCRIPT = """
import sys, torch, fastps
from torch.profiler import ProfilerActivity, profile, record_function
model = torch.nn.Linear(64, 64)
opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync="bsp")
def step():
    opt.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    opt.step()
for _ in range(5):
    step()
with profile(activities=[ProfilerActivity.CPU]) as found:
    for number in range(5, 25):
        with record_function(f"step {number}"):
            step()
found.export_chrome_trace(f"{sys.argv[1]}/torch-{fastps.rank()}.json")
opt.close()
"""
_TOLERANCE_US = 100.0


@pytest.mark.slow
def test_torchs_range_of_a_step_contains_fastps_push_and_wait_of_that_step(tmp_path: Path) -> None:
    script = program(tmp_path, _SCRIPT)[1]
    recorded, merged = tmp_path / "run.trace", tmp_path / "all.json"
    profiles = [str(tmp_path / f"torch-{rank}.json") for rank in range(2)]
    for command in (
        ["run", "-n", "2", "--trace", str(recorded), script, str(tmp_path)],
        ["trace", str(recorded), "--perfetto", str(merged), "--with", profiles[0], "--with", profiles[1]],
    ):
        output([sys.executable, "-m", "fastps.cli", *command])
    events = json.loads(merged.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for worker in range(2):
        own = [event for event in events if names.get(event["pid"]) == f"worker {worker}, torch: python"]
        whole = {event["name"]: event for event in own if event["ph"] == "X" and event["name"].startswith("step ")}
        assert len(whole) == 20
        for event in events:
            if event.get("cat") == "worker" and event["tid"] == worker and event["name"] in ("push", "wait"):
                around = whole.get(f"step {event['args']['step']}")
                if around is not None:
                    assert around["ts"] - _TOLERANCE_US <= event["ts"]
                    assert event["ts"] + event["dur"] <= around["ts"] + around["dur"] + _TOLERANCE_US
