"""What a trace has for a replay: events, inputs and checksums; and what an older trace, or another job, has not."""

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps import SGD, Store
from fastps.tracing.check import check
from fastps.tracing.file import DTYPES, EVENT_LEAVE, EVENT_NULL, EVENT_PUSH, INPUT_DTYPE, Trace, read, write

STEPS = 5


def recorded(file: Path, spec: str = "asp", **options: list[str]) -> Trace:
    """One worker that makes a step without a gradient behind the others."""
    first = {"a": np.zeros(5, np.float32), "t": np.zeros((4, 2), np.float32)}
    with fastps.trace(file), Store.create(first, SGD(lr=0.5), sync=spec, **options) as store, store.attach(0) as worker:
        for step in range(STEPS):
            worker.step({"a": np.full(5, step)} | ({} if options else {"t": np.ones((4, 2))}))
        worker.push(store.hypers, null=True)
        worker.advance()
    return read(file)


def test_a_trace_has_every_event_every_read_and_the_last_weights(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.trace", "asp,shards=2")
    for shard in range(2):
        events = np.sort(trace.events[trace.events["shard"] == shard], order=["commit", "order"])
        assert events["kind"].tolist() == [EVENT_PUSH] * STEPS + [EVENT_NULL, EVENT_LEAVE]
        assert events["commit"].tolist() == list(range(2, STEPS + 4)), "the first commit is number 2"
        assert events["version"].tolist() == [1, 2, 3, 4, 5, 6, 6]
        assert events["position"].tolist() == list(range(STEPS + 2))
        decided = trace.pushes[trace.pushes["shard"] == shard]["decided_ns"]
        assert events["at_ns"][: STEPS + 1].tolist() == decided.tolist()
        inputs = trace.inputs[trace.inputs["shard"] == shard]
        assert inputs["version"].tolist() == [0, 1, 2, 3, 4, 5]
        assert len(set(inputs["sample"].tolist())) == STEPS + 1 and inputs["sample"][-1] == 0
    last = np.full(5, -0.5 * sum(range(STEPS)), np.float32)
    assert trace.header["weights"][0] == zlib.crc32(last) and trace.header["versions"] == [6, 6]
    zero = zlib.crc32(np.zeros(5, np.float32))
    assert (trace.checksums[0]["version"], trace.checksums[0]["checksum"]) == (0, zero)


@pytest.mark.parametrize("spec", ["asp", "adv*:1,groups=1"])
def test_a_job_that_cannot_be_replayed_says_so_and_records_no_more_than_before(spec: str, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.trace", spec, tables=["t"])
    reason = f"with tables (sparse=True) under {spec}, whose workers may read rows while they change,"
    assert trace.header["replay"] == {"against": reason}
    assert not len(trace.events) and not len(trace.inputs) and not len(trace.checksums)


def test_a_trace_without_these_tables_is_read_as_before(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.trace")
    header = {name: value for name, value in trace.header.items() if name not in ("replay", "weights")}
    write(Trace(header, trace.steps, trace.pushes), tmp_path / "old.trace")
    old = read(tmp_path / "old.trace")
    assert not len(old.events) and old.pushes.tolist() == trace.pushes.tolist()


def test_in_several_shards_the_check_takes_what_each_push_read_there(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.trace", "asp,shards=2")
    pushes, inputs = trace.pushes.copy(), trace.inputs.copy()
    pushes["read_version"] = np.maximum(pushes["read_version"] - 1, 0)  # another shard was pulled at an older version
    assert check(replace(trace, pushes=pushes)) == []
    inputs["version"][4] -= 1
    [found] = check(replace(trace, inputs=inputs))
    assert (found.rule, found.worker, found.shard) == ("staleness", 0, int(inputs["shard"][4]))


def test_a_trace_whose_records_for_a_replay_have_another_layout_is_read_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recorded(tmp_path / "run.trace")
    fields = [(name, kind) for name, kind in INPUT_DTYPE.descr if name != "timestamp"]
    with monkeypatch.context() as patched:
        patched.setitem(DTYPES, "inputs", np.dtype(fields))
        write(
            replace(whole, inputs=whole.inputs[[name for name, _ in fields]].astype(np.dtype(fields))), tmp_path / "old.trace"
        )
    trace = read(tmp_path / "old.trace")
    assert trace.header["replay"] == {"against": f"recorded by another fastps ({whole.header['version']})"}
    assert len(trace.pushes) == len(whole.pushes) and not len(trace.inputs)
