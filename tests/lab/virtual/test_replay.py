"""A recorded run is played again: its weights are equal bit by bit, and what differs is named."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastps import SGD, Store
from fastps.checkpoint.loading import load
from fastps.errors import UsageError
from fastps.lab.virtual.driver import Listener
from fastps.lab.virtual.hosting import Hosting
from fastps.lab.virtual.recorded import Recorded, recorded_of
from fastps.lab.virtual.replay import Player, ReplayDiffersError, Row
from fastps.processes.options import JobOptions
from fastps.store.worker import Worker
from fastps.tracing.file import EVENT_CHANGE, Trace, TraceError, read
from fastps.tracing.recorder import trace as recording
from tests.support.commands import fastps

WORKERS, STEPS, SAMPLES = 3, 12, 16
FIRST = {name: np.linspace(-1, 1, 5, dtype=np.float32) + index for index, name in enumerate("abcd")}
Arrays = dict[str, np.ndarray]
Gradient = Callable[[np.ndarray, int, int], np.ndarray]


def gradient(weights: np.ndarray, worker: int, step: int) -> np.ndarray:
    """Of half the squared distance to a point that moves."""
    target = np.random.default_rng([worker, step]).standard_normal(weights.shape)
    return weights - target.astype(np.float32)


def work(worker: Worker, steps: int, made: Gradient) -> None:
    with worker:
        for step in range(steps):
            time.sleep(0.0005 * ((worker.rank * 7 + step * 3) % 5))
            for name, view in worker.gradients.items():
                view[...] = made(worker.weights[name], worker.rank, step)
            worker.push(worker.store.hypers, samples=worker.batch_size or SAMPLES)
            worker.advance()
            worker.pull()


def job(spec: str, made: Gradient, **options: str) -> Arrays:
    """The last weights of a job whose workers are threads here; each makes another number of steps."""
    failures: list[BaseException] = []

    def run(store: Store, rank: int, attached: Worker | None) -> None:
        try:
            work(attached or store.attach(rank), STEPS + rank, made)
        except SystemExit:
            pass  # the replay stopped
        except BaseException as error:
            failures.append(error)

    with Store.create(FIRST, SGD(lr=0.1, momentum=0.5), sync=spec, workers=WORKERS, timeout_s=60, **options) as store:
        attached = [None if options else store.attach(rank) for rank in range(WORKERS)]  # a replay's wait for each other
        threads = [threading.Thread(target=run, args=(store, rank, attached[rank]), daemon=True) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not failures, failures
        return {name: view.copy() for name, view in zip(FIRST, store.weight_views(store.committed()[0]), strict=True)}


def record(spec: str, file: Path, made: Gradient = gradient) -> tuple[Arrays, Trace]:
    with recording(file):
        weights = job(spec, made)
    return weights, read(file)


def replayed(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, made: Gradient = gradient, **options: Any
) -> tuple[Arrays, Row]:
    """The last weights of a replay, and its row."""
    monkeypatch.setenv("FASTPS_VIRTUAL", "1")
    name = f"replay-{threading.get_native_id()}-{time.monotonic_ns()}"
    player, listener = Player(recorded, **options), Listener(name)
    hosting = Hosting([], WORKERS, recorded.sync, JobOptions(), player.play)
    thread = threading.Thread(target=hosting.drive, args=(listener,), daemon=True)
    thread.start()
    try:
        weights = job(recorded.sync, made, server="process", job=name)
    finally:
        listener.close()
        thread.join(60)
        listener.free()
    if hosting.error is not None:
        raise hosting.error
    return weights, player.row


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "spec",
    [
        "bsp",
        "asp",
        "ssp:1",
        "dssp:1,4",
        "softsync:2",
        "backup:1",
        "psp:2,0.75,push_timeout=0.003",
        "r2sp:0.8",
        "hardsync:64",
        "ssp:1,shards=2",
        "asp,combine=true",
        "dssp:1,4,shards=2,combine=true",
    ],
)
def test_the_weights_of_a_replay_are_those_of_the_recorded_run(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, trace = record(spec, tmp_path / "run.trace")
    found, row = replayed(recorded_of(trace, tmp_path / "run.trace"), monkeypatch)
    for name in FIRST:
        np.testing.assert_array_equal(found[name], weights[name])
    assert row["pushes"] == sum(STEPS + rank for rank in range(WORKERS))
    assert row["checksums"] >= trace.header["shards"] and row["nonfinite"] is None


@pytest.fixture
def asp(tmp_path: Path) -> Recorded:
    return recorded_of(record("asp", tmp_path / "run.trace")[1], tmp_path / "run.trace")


def test_the_first_step_that_differs_is_named(asp: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(weights: np.ndarray, worker: int, step: int) -> np.ndarray:
        return gradient(weights, worker, step) + np.float32(worker == 1 and step >= 4)

    with pytest.raises(ReplayDiffersError, match=r"^worker 1, step 4: it pushes another gradient than the recorded worker"):
        replayed(asp, monkeypatch, other)


def test_a_replay_stops_at_a_version(asp: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = replayed(asp, monkeypatch)
    _, row = replayed(asp, monkeypatch, until=10)
    published = {commit[0].version for commit in asp.commits[0]}
    assert row["updates"] == max(version for version in published if version <= 10) and row["weights"] != whole["weights"]
    _, again = replayed(asp, monkeypatch, until=10)
    assert again["weights"] == row["weights"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_first_gradient_that_is_not_finite_is_found(value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(weights: np.ndarray, worker: int, step: int) -> np.ndarray:
        found = gradient(weights, worker, step)
        found[3] = value if (worker, step) == (2, 5) and weights[0] < 1 else found[3]
        return found

    weights, trace = record("asp", tmp_path / "run.trace", planted)
    recorded = recorded_of(trace, tmp_path / "run.trace")
    _, row = replayed(recorded, monkeypatch, planted, find_nonfinite=True)
    assert row["nonfinite"].startswith("worker 2, step 5: the gradient of ")
    found, _ = replayed(recorded, monkeypatch, planted)  # the push was rejected, and is again
    for name in FIRST:
        np.testing.assert_array_equal(found[name], weights[name])


def without(trace: Trace, *names: str) -> Trace:
    return replace(trace, header={name: value for name, value in trace.header.items() if name not in names})


def test_what_cannot_be_replayed_is_refused(asp: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = read(tmp_path / "run.trace")
    changed = trace.events.copy()
    changed["kind"][0] = EVENT_CHANGE
    for found, message in (
        (without(trace, "replay"), "recorded by fastps .*, which did not record the order of commits: record the run again"),
        (without(trace, "weights"), "the trace has no checksum of the last weights"),
        (replace(trace, header={**trace.header, "replay": {"against": "of several nodes"}}), "a job of several nodes cannot"),
        (replace(trace, header={**trace.header, "sync": "unheard-of"}), "expected a discipline that this fastps knows"),
        (replace(trace, events=changed), "a worker died or joined, which cannot be replayed yet"),
    ):
        with pytest.raises(UsageError, match=message):
            recorded_of(found, tmp_path / "run.trace")
    with pytest.raises(TraceError, match=r"is damaged: commit \d+ of shard 0 is missing"):
        recorded_of(replace(trace, events=trace.events[1:]), tmp_path / "run.trace")
    with pytest.raises(UsageError, match="the trace is of another script: expected its model"):
        replayed(replace(asp, about={**asp.about, "model": "another"}), monkeypatch)
    with pytest.raises(UsageError, match=r"expected the arguments that the run was recorded with .*, found --lr 2"):
        asp.check_command(["python", "train.py", "--lr", "2"])


# -- real processes ------------------------------------------------------------------------------------

SCRIPT = """
import hashlib, random, sys, time
import fastps, torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = fastps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), batch_size=16)
rank = fastps.rank()
torch.manual_seed(rank)
for step in range(int(sys.argv[1])):
    if step == 5 and rank == 1 and sys.argv[2:] == ["unseeded"]:
        torch.seed()
    inputs = torch.randn(16, 8)
    time.sleep(random.random() * 0.002 * (1 + 2 * (rank == 0)))
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
if rank == 0:
    optimizer.wait_for_others()
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
    print("weights", digest.hexdigest())
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("FASTPS_VIRTUAL", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def recorded_live(spec: str, file: Path, *command: str) -> str:
    """Record four processes. Returns the line about the last weights."""
    found = fastps("run", "-n", "4", "--sync", spec, "--trace", str(file), *command, timeout=300)
    assert found.returncode == 0, found.stderr
    return next(line for line in found.stdout.splitlines() if "weights" in line)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spec", ["asp", "ssp:3,shards=2", "dssp:3,15", "backup:1", "psp:3,0.75,push_timeout=0.02", "r2sp:0.8"])
def test_live_processes_are_replayed_bit_by_bit(spec: str, script: str, tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    line = recorded_live(spec, file, script, "40")
    found = fastps("replay", str(file), script, "40", timeout=300)
    assert found.returncode == 0, found.stderr
    assert line in found.stdout.splitlines()
    assert "160 pushes of 4 workers" in " ".join(found.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_unseeded_dropout_is_named_at_its_first_step(script: str, tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    recorded_live("asp", file, script, "20", "unseeded")
    found = fastps("replay", str(file), script, "20", "unseeded", timeout=300)
    assert found.returncode == 1
    assert found.stderr.startswith("fastps: worker 1, step 5: it pushes another gradient") and found.stderr.count("\n") == 1
    found = fastps(
        "replay", "--until", "3", "--checkpoint", str(tmp_path / "at"), str(file), script, "20", "unseeded", timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert load(tmp_path / "at").description["version"] in (1, 2, 3)  # what is folded in one commit is not divided
