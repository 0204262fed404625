"""Traces of several nodes as one: synthetic traces with known clocks, and those of a real job in two time namespaces."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.advice.advise import advise
from fastps.errors import UsageError
from fastps.system.ports import free_port
from fastps.tracing.check import check
from fastps.tracing.file import (
    CLOCK_DTYPE,
    MESSAGE_DTYPE,
    PUSH_DTYPE,
    PUSH_POSTED,
    PUSH_SENT,
    STEP_DTYPE,
    WEIGHTS_SENT,
    WEIGHTS_TAKEN,
    Trace,
    TraceError,
    read,
    write,
)
from fastps.tracing.merging import before_it_was_sent, flows, merge_nodes, nodes_of
from fastps.tracing.perfetto import events
from tests.report.traces import header
from tests.support import commands, nodes
from tests.tracing.test_trace import recorded

STEPS = 20
MS = 1_000_000
SCRIPT = """
import time
import torch
import fastps
torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.zeros(SIZE))
with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), sync="SYNC") as optimizer:
    for _ in range(100):
        weight.grad = torch.ones(SIZE)
        optimizer.step()
        time.sleep(0.01)
    optimizer.wait_for_others()
"""


class Clocks:
    """The clock of node 1 shows `offset_ns` more than that of node 0, and drifts."""

    def __init__(self, offset_ns: int, drift_ppm: int) -> None:
        self.offset_ns, self.drift_ppm = offset_ns, drift_ppm

    def there(self, now_ns: int) -> int:
        return now_ns + self.offset_ns + self.drift_ppm * now_ns // 1_000_000


def _header(node: int, workers: int) -> dict[str, Any]:
    made = header("bsp", workers, job=f"job.node{node}", node={"node": node, "nodes": 2, "host": f"host{node}"})
    for note in made["of_worker"].values():
        note["posted"] = STEPS
    return {**made, "committed": {"folded": [STEPS] * workers, "dropped": [0] * workers}, "versions": [STEPS]}


def _step_times(step: int) -> int:
    return 10_000 * MS + step * 50 * MS


def _node(node: int, workers: int, clocks: Clocks, samples: list[tuple[int, int, int, int, int, int]]) -> Trace:
    """A node that computes for 10 ms, and whose push is at node 0 for 10 ms after a way of 5 ms; node 0's are there at once."""
    at = clocks.there if node else (lambda now_ns: now_ns)
    steps, pushes, messages = [], [], []
    for step in range(STEPS):
        begin = _step_times(step)
        for worker in range(workers):
            words = [begin, begin + 10 * MS, begin + 11 * MS, begin + 12 * MS, begin + 35 * MS, begin + 36 * MS]
            steps.append((*map(at, words), 0, -1, 0, 0, 0, step, step, 1, worker, 0, 1))
            pushes.append((step, step, step, step + 1, at(begin + 34 * MS), 0, worker, 0, 0, 1))
        if node:
            messages.append((at(begin + 12 * MS), at(begin + 16 * MS), step + 1, 1, 0, PUSH_SENT, 1))
            messages.append((at(begin + 30 * MS), at(begin + 33 * MS), step + 1, 1, 0, WEIGHTS_TAKEN, 1))
        else:
            messages.append((begin + 15 * MS, begin + 20 * MS, step + 1, 0, 1, PUSH_POSTED, 1))
            messages.append((begin + 27 * MS, begin + 31 * MS, step + 1, 0, 1, WEIGHTS_SENT, 1))
    order = np.argsort([row[14] for row in steps], kind="stable")
    tables = (
        np.array(steps, STEP_DTYPE)[order], np.array(pushes, PUSH_DTYPE)[order], np.array(messages, MESSAGE_DTYPE),
        np.array(samples, CLOCK_DTYPE),
    )  # fmt: skip
    return Trace(_header(node, workers), *tables)


def _pair(clocks: Clocks, error_ns: int = 200_000, share: int = 50) -> list[tuple[Path, Trace]]:
    """Samples twice a second, each off by a share of its error."""
    samples = []
    for now_ns in range(10_000 * MS, 11_000 * MS, 500 * MS):
        there_ns = clocks.there(now_ns)
        samples.append((there_ns, now_ns - there_ns + share * error_ns // 100, error_ns, 0, 1, 1))
    first = _node(0, 2, clocks, [(0, 0, 0, 0, 0, 1)])
    return [(Path("a"), _node(1, 3, clocks, samples)), (Path("b"), first)]


@settings(max_examples=30)
@given(
    offset_ns=st.integers(-(10**17), 10**17), drift_ppm=st.integers(-100, 100), error_ns=st.integers(0, 2 * MS),
    share=st.integers(-100, 100),
)  # fmt: skip
def test_traces_with_known_clocks_merge_into_the_order_of_causes(
    offset_ns: int, drift_ppm: int, error_ns: int, share: int
) -> None:
    merged = merge_nodes(_pair(Clocks(offset_ns, drift_ppm), error_ns, share))
    first, second = nodes_of(merged)
    assert (first.offset_ns, first.error_ns) == (0, 0)
    assert error_ns <= second.error_ns <= error_ns + 0.0001 * 1.5e9 + 2
    for worker in range(5):
        found = merged.steps_of(worker)
        expected = np.array([_step_times(step) for step in range(STEPS)])
        assert (np.abs(found["begin_ns"] - expected) <= second.error_ns + 1).all()
    assert check(merged) == []
    assert len(flows(merged)) == 2 * STEPS
    assert before_it_was_sent(merged) == []


def test_a_merged_trace_is_a_trace_like_any_other(tmp_path: Path) -> None:
    merged = merge_nodes(_pair(Clocks(10**12, 0)))
    write(merged, tmp_path / "all.trace")
    found = read(tmp_path / "all.trace")
    assert (found.workers, found.header["shards"], found.header["job"]) == (5, 2, "job")
    assert (found.header["recorded"], found.header["versions"]) == ([0, 1, 2, 3, 4], [STEPS, STEPS])
    assert np.array_equal(found.messages, merged.messages) and np.array_equal(found.clock, merged.clock)
    assert nodes_of(found) == nodes_of(merged) and check(found) == []
    with pytest.raises(UsageError, match="expected the trace of one node"):
        advise(found)


def test_a_message_that_comes_before_it_was_sent_is_a_violation() -> None:
    """Node 1's samples are wrong by 6 ms, and say that they are right to 0.2 ms; the way takes 3 ms."""
    pair = _pair(Clocks(10**12, 0))
    for wrong_ns, kind in ((6 * MS, "push"), (-6 * MS, "weights")):
        clock = pair[0][1].clock.copy()
        clock["offset_ns"] += wrong_ns
        [violation] = check(merge_nodes([(pair[0][0], replace(pair[0][1], clock=clock)), pair[1]]))
        assert violation.rule == "cause" and f"takes the {kind} of step 1 " in violation.sentence


def test_unfinished_times_stay_as_they_are() -> None:
    pair = _pair(Clocks(10**12, 0))
    pair[0][1].steps["end_ns"][-1] = pair[0][1].steps["granted_ns"][-1] = 0
    pair[0][1].pushes["decided_ns"][-1] = -1
    merged = merge_nodes(pair)
    assert (merged.steps["end_ns"][-1], merged.steps["granted_ns"][-1], merged.pushes["decided_ns"][-1]) == (0, 0, -1)


@pytest.mark.parametrize(("change", "message"), [
    pytest.param({"node": {"node": 0, "host": "x"}}, "found two of node 0: ", id="one node twice"),
    pytest.param({"job": "other.node1"}, "found b of job job and a of job other", id="another job"),
    pytest.param({"sync": "asp"}, "expected traces of one job", id="another discipline"),
    pytest.param({"node": None}, "expected the trace of a node of a job of several, found one of another kind: a", id="none"),
])  # fmt: skip
def test_files_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    pair = _pair(Clocks(0, 0))
    other = {name: value for name, value in {**pair[0][1].header, **change}.items() if value is not None}
    with pytest.raises(TraceError, match=message):
        merge_nodes([(pair[0][0], replace(pair[0][1], header=other)), pair[1]])


def test_a_node_without_an_offset_is_named() -> None:
    pair = _pair(Clocks(0, 0))
    with pytest.raises(TraceError, match="expected the offset of node 1's clock to node 0's, found none in a"):
        merge_nodes([(pair[0][0], replace(pair[0][1], clock=pair[0][1].clock[:0])), pair[1]])


def test_perfetto_shows_each_node_as_a_group() -> None:
    found = list(events(merge_nodes(_pair(Clocks(10**12, 0)))))
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert len(names) == 2 and all(f"node {node}, host{node}" in name for node, name in enumerate(names.values()))
    workers = {event["pid"]: Counter[str]() for event in found if event["ph"] == "X"}
    for event in found:
        if event["ph"] == "X":
            workers[event["pid"]][event["name"].split()[0]] += 1
            assert event["ts"] >= 0 and event["dur"] >= 0
    assert {counts["compute"] for counts in workers.values()} == {2 * STEPS, 3 * STEPS}
    assert {counts["version"] for counts in workers.values()} == {STEPS}
    arrows = Counter(event["name"] for event in found if event["ph"] == "s" and event["cat"] == "node")
    assert arrows == {"push": STEPS, "weights": STEPS}
    threads = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert {"worker 4", "shard 1", "node 0: send push", "node 1: post push"} <= set(threads)


def test_older_traces_and_those_of_one_node_have_no_messages(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.trace", "bsp", workers=1, steps=5)
    assert nodes_of(trace) == [] and len(trace.messages) == len(trace.clock) == 0
    data = (tmp_path / "run.trace").read_bytes()
    older = json.loads(data[24 : 24 + int.from_bytes(data[16:24], "little")])
    assert list(older["tables"])[:4] == ["steps", "pushes", "messages", "clock"]
    del older["tables"]["messages"], older["tables"]["clock"], older["checksum"]
    text = json.dumps(older).encode()
    text += b" " * (int.from_bytes(data[16:24], "little") - len(text))
    (tmp_path / "old.trace").write_bytes(data[:24] + text + data[24 + len(text) :])
    assert np.array_equal(read(tmp_path / "old.trace").steps, trace.steps)


# -- a real job ------------------------------------------------------------------------------------


def _missing() -> str:
    if shutil.which("unshare") is None:
        return "the command unshare is not installed (util-linux)"
    tried = subprocess.run(["unshare", "--time", "--monotonic", "5", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this user may not make a time namespace"


def _start(folder: Path, script: str, workers: tuple[int, int], offset_s: int = 0, more: Sequence[str] = ()) -> Any:
    """The launchers of two nodes with a trace each; the clock of node 1 shows `offset_s` more."""
    (folder / "train.py").write_text(script)
    options = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--trace", "run.trace", *more]
    environment = {name: value for name, value in os.environ.items() if name not in commands.OF_A_JOB}
    running = []
    for node, count in enumerate(workers):
        inside = ["unshare", "--time", "--monotonic", str(offset_s), "--"] if node and offset_s else []
        command = [*inside, sys.executable, "-m", "fastps", "run", *options, "--node-rank", str(node), "-n", str(count)]
        pipes: Any = {"stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen([*command, "train.py"], cwd=folder, env=environment, **pipes))
    return running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset_s", "sync", "size"),
    [(0, "asp", 5_000), (-100, "bsp", 4_000_000)],
    ids=["one clock", "two clocks, several parts"],
)
def test_every_push_of_a_real_job_leaves_before_it_is_posted(offset_s: int, sync: str, size: int, tmp_path: Path) -> None:
    if offset_s and (reason := _missing()):
        pytest.skip(reason)
    script = SCRIPT.replace("SIZE", str(size)).replace("SYNC", sync)
    running = _start(tmp_path, script, (2, 1), offset_s, ["--link-dtype", "bfloat16"] if sync == "bsp" else [])
    ended = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], ended
    files = sorted(tmp_path.glob("run*.trace"))
    assert [file.name for file in files] == ["run.node0.trace", "run.node1.trace"]
    assert not list(tmp_path.glob("*.parts"))
    merged = merge_nodes([(file, read(file)) for file in files])
    first, second = nodes_of(merged)
    assert (first.workers, second.workers, second.node) == (2, 1, 1)
    print(f"node 1 is {second.offset_ns / 1e9:+.6f} s away, with an error of {second.error_ns / 1e6:.3f} ms")
    assert abs(second.offset_ns + offset_s * 10**9) <= second.error_ns < 1e9
    assert check(merged) == []
    found = flows(merged)
    kinds = Counter(int(merged.messages["kind"][flow.sent]) for flow in found)
    assert kinds == {PUSH_SENT: 100, WEIGHTS_SENT: 100}
    early = [int(merged.messages["begin_ns"][flow.sent] - merged.messages["begin_ns"][flow.taken]) for flow in found]
    assert max(early) <= second.error_ns
    assert -np.median(early) + second.error_ns > 0, "a message takes some time"


@pytest.mark.slow
def test_the_records_of_a_killed_agent_stay(tmp_path: Path) -> None:
    """Its node ends with an error, and the launcher merges what the agent and the workers have written."""
    script = SCRIPT.replace("SIZE", "5000").replace("SYNC", "asp").replace("range(100)", "range(100_000)")
    running = _start(tmp_path, script, (1, 1))
    try:
        deadline = time.monotonic() + 200
        while not any(_written(file) for file in tmp_path.glob("run.node1.trace.*/agent.clock")):
            assert time.monotonic() < deadline, "the nodes have not come so far"
            time.sleep(0.1)
        os.kill(nodes.agents()[1], signal.SIGKILL)
        errors = [process.communicate(timeout=150)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all("node 1" in error or "agent" in error for error in errors), errors
    merged = merge_nodes([(file, read(file)) for file in sorted(tmp_path.glob("run.node?.trace"))])
    assert [node.node for node in nodes_of(merged)] == [0, 1]
    assert check(merged) == [] and len(flows(merged)) > 10


def _written(clock: Path) -> bool:
    """Whether an agent's table of offsets has a record."""
    data = clock.read_bytes()
    return len(data) > 0 and bool(np.frombuffer(data, CLOCK_DTYPE, 1)["written"][0])


@pytest.mark.slow
def test_the_command_merges(tmp_path: Path) -> None:
    for number, (_, trace) in enumerate(_pair(Clocks(10**12, 0))):
        write(trace, tmp_path / f"{number}.trace")
    files = [str(tmp_path / f"{number}.trace") for number in (0, 1)]
    whole, picture = tmp_path / "all.trace", tmp_path / "all.json"
    outcome = commands.done("trace", *files, "-o", str(whole), "--check", "--perfetto", str(picture))
    assert "node 0 (host0, workers 0, 1): whose clock all times are on" in outcome.stdout
    assert "node 1 (host1, workers 2, 3, 4): its times moved by -999999.900 ms" in outcome.stdout
    assert "with an error of at most 0.2" in outcome.stdout and "the push log is right" in outcome.stdout
    assert json.loads(picture.read_text())["traceEvents"]
    assert [row["kind"] for row in commands.rows("trace", str(whole))] == ["node"] * 2 + ["run"] + ["worker"] * 5
    assert "expected traces of different nodes, found two of node 1" in commands.refused("trace", files[0], files[0])
