"""A recorded run is played again: its weights are equal bit by bit, and what differs is named."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastps import SGD, DistributedOptimizer, Store
from fastps.checkpoint.loading import load
from fastps.errors import UsageError
from fastps.kernels.shm.arena import LANE_DEAD, LANE_FREE
from fastps.lab.virtual.counterfactual import Counterfactual
from fastps.lab.virtual.recorded import Recorded, recorded_of
from fastps.lab.virtual.replay import Player, ReplayDiffersError, Row
from fastps.store.worker import Worker
from fastps.tracing.check import check
from fastps.tracing.file import EVENT_DEATH, EVENT_EXPULSION, Trace, TraceError, read
from fastps.tracing.for_replay import GradientChecksum
from fastps.tracing.recorder import trace as recording
from tests.lab.virtual.test_driver import FIRST, SAMPLES, STEPS, WORKERS, Arrays, driven
from tests.support import commands

TABLES = {"t": np.linspace(-2, 2, 30, dtype=np.float32).reshape(6, 5)}
Gradient = Callable[[np.ndarray, int, int], np.ndarray]
Deaths = dict[int, tuple[int, bool]]


def gradient(weights: np.ndarray, worker: int, step: int) -> np.ndarray:
    """Of half the squared distance to a point that moves."""
    target = np.random.default_rng([worker, step]).standard_normal(weights.shape)
    return weights - target.astype(np.float32)


class DeathError(Exception):
    """A worker dies."""


def work(worker: Worker, steps: int, made: Gradient, joined: threading.Event, dies_at: tuple[int, bool] | None = None) -> None:
    """Make a worker's steps; `dies_at`: in which one it dies, and whether its push is posted then. One outlives all joins."""
    with worker:
        for step in range(worker.steps, steps):
            assert step < steps - 1 or worker.rank != 1 or joined.wait(60)
            time.sleep(0.0005 * ((worker.rank * 7 + step * 3) % 5))
            for name, view in worker.gradients.items():
                view[...] = made(worker.weights[name], worker.rank, step)
            if worker.store.tables:
                rows = sorted({worker.rank, step % 6})
                worker.put_rows("t", rows, made(worker.weights["t"][rows], worker.rank, step))
            if dies_at == (step, False):
                die(worker)
            worker.push(worker.store.hypers, samples=worker.batch_size or SAMPLES)
            if dies_at == (step, True):
                die(worker)
            worker.advance()
            worker.pull()


def die(worker: Worker) -> None:
    """End a worker as another one does that sees its process end, and with it its threads."""
    worker.combining.end_threads()
    worker.closed = True
    worker.store.stop_answering(worker._listener)
    worker.store.arena.mark_dead(worker.rank, worker.generation)
    worker._membership.close()
    raise DeathError


class Job:
    """A job whose workers are threads here; each makes another number of steps. In a live one they die as `deaths` says.

    Each of `joins`, ranks in order, joins once worker 0 has made 4 steps more; in a replay, once `join` is called.
    """

    def __init__(self, spec: str, made: Gradient, deaths: Deaths, joins: Sequence[int], **options: Any) -> None:
        self._made, self._deaths, self._joins, self._is_live = made, deaths, joins, "job" not in options
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._joined = threading.Event()
        if deaths or joins:
            options |= {"on_worker_loss": "continue", "max_workers": max([WORKERS, *(rank + 1 for rank in joins)])}
        tables = options.setdefault("tables", {})
        self._first, rule = FIRST | tables, SGD(lr=0.1, momentum=0.0 if tables else 0.5)
        self.store = Store.create(self._first, rule, sync=spec, workers=WORKERS, timeout_s=60, **options)

    def join(self, rank: int, attached: Worker | None = None, dies_at: tuple[int, bool] | None = None) -> None:
        """Let a worker begin."""
        thread = threading.Thread(target=self._run, args=(rank, attached, dies_at), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, rank: int, attached: Worker | None, dies_at: tuple[int, bool] | None) -> None:
        try:
            work(attached or self.store.attach(rank), STEPS + rank, self._made, self._joined, dies_at)
        except (SystemExit, DeathError):
            pass  # the replay stopped it
        except BaseException as error:
            self._failures.append(error)

    def weights(self) -> Arrays:
        """The last weights."""
        with self.store as store:
            attached = [store.attach(rank) if self._is_live else None for rank in range(WORKERS)]  # else for each other
            for rank in range(WORKERS):
                self.join(rank, attached[rank], self._deaths.get(rank))
            for number, rank in enumerate(self._joins if self._is_live else ()):
                while store.arena.clock(1) < 3 * (number + 1) or store.arena.lane_state(rank) not in (LANE_FREE, LANE_DEAD):
                    assert not self._failures, self._failures
                    time.sleep(0.0002)
                self.join(rank, store.attach(rank))
            self._joined.set()
            for thread in self._threads:
                thread.join(60)
                assert not thread.is_alive()
            assert not self._failures, self._failures
            return {name: view.copy() for name, view in zip(self._first, store.weight_views(store.committed()[0]), strict=True)}


def record(
    spec: str,
    file: Path,
    made: Gradient = gradient,
    deaths: Deaths | None = None,
    joins: Sequence[int] = (),
    **options: Any,
) -> tuple[Arrays, Trace]:
    with recording(file):
        weights = Job(spec, made, deaths or {}, joins, **options).weights()
    return weights, read(file)


def replayed(
    run: Recorded | Counterfactual,
    monkeypatch: pytest.MonkeyPatch,
    made: Gradient = gradient,
    joins: Sequence[int] = (),
    tables: Arrays | None = None,
    **options: Any,
) -> tuple[Arrays, Row]:
    """The last weights of a replay, and its row."""
    run = Counterfactual(run) if isinstance(run, Recorded) else run
    recorded = run.recorded
    monkeypatch.setenv("FASTPS_VIRTUAL", "1")
    name = f"replay-{threading.get_native_id()}-{time.monotonic_ns()}"
    player = Player(run, **options)
    with driven(name, recorded.sync, player.play):
        job = Job(recorded.sync, made, {}, joins, server="process", job=name, tables=tables or {})
        player.start = job.join
        weights = job.weights()
    return weights, player.row


CHANGES: list[tuple[Deaths, Sequence[int]]] = [
    ({2: (5, True)}, ()),
    ({2: (5, False)}, (2,)),
    ({0: (7, True), 2: (3, False)}, (2, 0)),
    ({2: (4, True)}, (3, 2)),
]
SERVED = [("asp", {}, ()), ("ssp:1,shards=2", {}, ()), ("bsp", *CHANGES[2])]


@pytest.mark.parametrize(("spec", "deaths", "joins", "options"), [
    *(pytest.param(spec, {}, (), {}, marks=pytest.mark.sampled(4)) for spec in (
        "bsp", "asp", "ssp:1", "dssp:1,4", "softsync:2", "backup:1", "psp:2,0.75,push_timeout=0.003", "r2sp:0.8", "hardsync:64",
        "adv*:1", "ssp:1,shards=2", "asp,combine=true", "dssp:1,4,shards=2,combine=true",
    )),
    *(pytest.param(*case, {}, marks=pytest.mark.sampled(4)) for case in (
        *(("bsp", *change) for change in CHANGES), *(("dssp:1,4,shards=2", *change) for change in CHANGES),
        ("asp", *CHANGES[0]), ("ssp:1", *CHANGES[1]), ("softsync:2", *CHANGES[2]), ("backup:1", *CHANGES[3]),
        ("r2sp:0.8", *CHANGES[1]), ("psp:2,0.75,push_timeout=0.003", *CHANGES[2]),
        *(("adv*:1", *change) for change in CHANGES),
    )),
    *((*case, {"server": "process"}) for case in SERVED),
])  # fmt: skip
@pytest.mark.sampled(3)
def test_the_weights_of_a_replay_are_those_of_the_recorded_run_whose_deaths_and_joins_come_where_they_came(
    spec: str, deaths: Deaths, joins: Sequence[int], options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, trace = record(spec, tmp_path / "run.trace", deaths=deaths, joins=joins, **options)
    assert not check(trace)
    found, row = replayed(recorded_of(trace, tmp_path / "run.trace"), monkeypatch, joins=joins or (0,) * bool(deaths))
    for name in FIRST:
        np.testing.assert_array_equal(found[name], weights[name])
    assert row["joined"] == len(joins) and (trace.events["kind"] == EVENT_DEATH).sum() >= len(deaths)
    assert deaths or row["pushes"] == sum(STEPS + rank for rank in range(WORKERS))
    assert row["checksums"] >= trace.header["shards"] and row["nonfinite"] is None


@pytest.mark.parametrize(("spec", "deaths", "joins"), [
    ("bsp", {}, ()), ("hardsync:64", {}, ()), ("bsp,shards=2", {}, ()), ("bsp", *CHANGES[1]), ("hardsync:64", *CHANGES[2]),
])  # fmt: skip
def test_rows_of_tables_are_those_of_the_recorded_run(
    spec: str, deaths: Deaths, joins: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, trace = record(spec, tmp_path / "run.trace", deaths=deaths, joins=joins, tables=TABLES)
    recorded = recorded_of(trace, tmp_path / "run.trace")
    found, row = replayed(recorded, monkeypatch, joins=joins, tables=TABLES)
    for name in weights:
        np.testing.assert_array_equal(found[name], weights[name])
    assert row["checksums"] >= 2 * trace.header["shards"]

    def other(weights: np.ndarray, worker: int, step: int) -> np.ndarray:
        return gradient(weights, worker, step) + np.float32(worker == 1 and step == 4 and weights.ndim == 2)

    with pytest.raises(ReplayDiffersError, match=r"^worker 1, step 4: it pushes another gradient than the recorded worker"):
        replayed(recorded, monkeypatch, other, joins=joins, tables=TABLES)


@pytest.mark.parametrize("tables", [{}, TABLES])
def test_after_its_last_step_each_worker_of_a_level_policy_has_the_weights_that_it_had_live(
    tables: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[int, Arrays] = {}
    close = Worker.close

    def closed(worker: Worker, *arguments: Any, **options: Any) -> None:
        if not worker.closed:
            taken[worker.rank] = {name: worker.weights[name].copy() for name in FIRST | tables}
        close(worker, *arguments, **options)

    monkeypatch.setattr(Worker, "close", closed)
    _, trace = record("bsp", tmp_path / "run.trace", tables=tables)
    live = taken.copy()
    taken.clear()
    replayed(recorded_of(trace, tmp_path / "run.trace"), monkeypatch, tables=tables)
    assert sorted(taken) == sorted(live) == list(range(WORKERS))
    for rank, name in product(live, FIRST | tables):
        np.testing.assert_array_equal(taken[rank][name], live[rank][name])


@pytest.fixture
def asp(tmp_path: Path) -> Recorded:
    return recorded_of(record("asp", tmp_path / "run.trace")[1], tmp_path / "run.trace")


def test_the_first_step_that_differs_is_named(asp: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(weights: np.ndarray, worker: int, step: int) -> np.ndarray:
        return gradient(weights, worker, step) + np.float32(worker == 1 and step >= 4)

    with pytest.raises(ReplayDiffersError, match=r"^worker 1, step 4: it pushes another gradient than the recorded worker"):
        replayed(asp, monkeypatch, other)


def test_a_difference_in_a_few_values_of_many_is_named_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a row of an embedding. Two rows that change places have the same sum."""
    first = {"embedding": np.zeros(600_000, np.float32), "rest": np.zeros(7, np.float32)}

    def pushed(store: Store, worker: Worker, rows: Sequence[int]) -> int:
        made = np.zeros(600_000, np.float32)
        for number, row in enumerate(rows, 1):
            made[32 * row : 32 * row + 32] = number
        worker.step({"embedding": made, "rest": np.ones(7)})
        return GradientChecksum(store).of(0, 0)

    with Store.create(first, SGD(lr=0.5)) as store, store.attach(0) as worker:
        same = [pushed(store, worker, (3, 9)) for _ in range(2)]
        others = [pushed(store, worker, rows) for rows in ((3, 10), (9, 3), (3,), (3, 9 + 1018 // 32))]
    assert same[0] == same[1] and len({*same, *others}) == 5


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
    old, expelled = trace.events.copy(), trace.events.copy()
    old["kind"][0], old["worker"][0] = 4, -1
    expelled["kind"][0] = EVENT_EXPULSION
    for found, message in (
        (without(trace, "replay"), "recorded by fastps .*, which did not record the order of commits: record the run again"),
        (without(trace, "weights"), "the trace has no checksum of the last weights"),
        (replace(trace, header={**trace.header, "replay": {"against": "of several nodes"}}), "a job of several nodes cannot"),
        (
            replace(trace, header={**trace.header, "replay": {**trace.header["replay"], "gradients": 1}}),
            "whose checksums of gradients were others: record the run again",
        ),
        (replace(trace, header={**trace.header, "sync": "unheard-of"}), "expected a discipline that this fastps knows"),
        (record("asp", tmp_path / "rows.trace", tables=TABLES)[1], r"a job with tables \(sparse=True\) under asp, whose"),
        (replace(trace, events=old), "which did not record who died or joined: record the run again"),
        (replace(trace, events=expelled), "a worker was expelled because its memory was damaged"),
    ):
        with pytest.raises(UsageError, match=message):
            recorded_of(found, tmp_path / "run.trace")
    damaged = trace.events.copy()
    damaged["order"][damaged["commit"] == 3] += 1
    with pytest.raises(TraceError, match=r"is damaged: an event of commit 3 is missing"):
        recorded_of(replace(trace, events=damaged), tmp_path / "run.trace")
    for position in (10_000, 1 << 27, 1 << 33, (1 << 63) - 1):
        far = trace.inputs.copy()
        far["position"][-1] = position
        with pytest.raises(TraceError, match=r"is damaged: (a push at position|what the pushes of worker)"):
            recorded_of(replace(trace, inputs=far), tmp_path / "run.trace")
    with pytest.raises(UsageError, match="the trace is of another script: expected its model"):
        replayed(replace(asp, about={**asp.about, "model": "another"}), monkeypatch)
    with pytest.raises(UsageError, match=r"expected the arguments that the run was recorded with .*, found --lr 2"):
        asp.check_command(["python", "train.py", "--lr", "2"])


@pytest.mark.parametrize("change", ["load_state_dict(optimizer.state_dict())", "replace_weights(lambda weights: weights)"])
def test_changes_between_steps_are_named_as_what_cannot_be_replayed(change: str, tmp_path: Path) -> None:
    inner = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.5)
    with recording(tmp_path / "run.trace"), DistributedOptimizer(inner) as optimizer:
        for step in range(4):
            sum(each.sum() for each in inner.param_groups[0]["params"]).backward()
            optimizer.step()
            if step == 1:
                eval(f"optimizer.{change}", {"optimizer": optimizer})
    with pytest.raises(UsageError, match=r"commit \d of shard 0 has no record: the script changed weights or"):
        recorded_of(read(tmp_path / "run.trace"), tmp_path / "run.trace")


# -- real processes ------------------------------------------------------------------------------------

SCRIPT = """
import hashlib, os, random, signal, sys, time
import fastps, torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 1))
if has_table := sys.argv[2:] == ["table"]:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(40, 8, sparse=True), torch.nn.Linear(8, 1))
made = torch.optim.Adagrad if has_table else torch.optim.Adam
optimizer = fastps.DistributedOptimizer(made(model.parameters(), lr=0.01), batch_size=16)
rank = fastps.rank()
torch.manual_seed(rank)
for step in range(int(sys.argv[1])):
    if step == 5 and rank == 1 and sys.argv[2:] == ["unseeded"]:
        torch.seed()
    if "KILLED" in os.environ and "FASTPS_JOINS" in os.environ:
        open(sys.argv[0] + ".replaced", "w").close()
    elif step == 9 and str(rank) == os.environ.get("KILLED"):
        os.kill(os.getpid(), signal.SIGKILL)
    while step == 20 and "KILLED" in os.environ and not os.path.exists(sys.argv[0] + ".replaced"):
        time.sleep(0.01)
    inputs = torch.randint(40, (16, 5)) if has_table else torch.randn(16, 8)
    time.sleep(random.random() * 0.002 * (1 + 2 * (rank == 0)))
    optimizer.zero_grad()
    (model(inputs) - inputs.float().sum(1, keepdim=True)).square().mean().backward()
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
    """Record four processes; options of `fastps run` may come first. Returns the line about the last weights."""
    found = commands.done("run", "-n", "4", "--sync", spec, "--trace", str(file), *command)
    return next(line for line in found.stdout.splitlines() if "weights" in line)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("spec", "variables", "arguments"), [
    ("ssp:3,shards=2", {}, ()),
    ("psp:3,0.75,push_timeout=0.02", {}, ()),
    ("adv*:1", {}, ()),
    ("bsp", {}, ("table",)),
    ("ssp:3,shards=2", {"KILLED": "0", "FASTPS_SERVER": "workers"}, ()),
    ("dssp:3,15", {"KILLED": "2", "FASTPS_SERVER": "process"}, ()),
    ("adv*:1", {"KILLED": "2", "FASTPS_SERVER": "process"}, ()),
    ("bsp", {"KILLED": "2"}, ("table",)),
])  # fmt: skip
def test_live_processes_one_of_them_killed_and_replaced_are_replayed_bit_by_bit(
    spec: str, variables: dict[str, str], arguments: Sequence[str], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, command = tmp_path / "run.trace", (script, "40", *arguments)
    with monkeypatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        line = recorded_live(spec, file, *(["--restarts", "1"] if variables else []), *command)
    assert not check(read(file))
    found = commands.done("replay", str(file), *command)
    assert line in found.stdout.splitlines()
    assert variables or "160 pushes of 4 workers" in " ".join(found.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_unseeded_dropout_is_named_at_its_first_step(script: str, tmp_path: Path) -> None:
    file, replayed_run = tmp_path / "run.trace", (str(tmp_path / "run.trace"), script, "20", "unseeded")
    recorded_live("asp", file, *replayed_run[1:])
    found = commands.fastps("replay", *replayed_run)
    assert found.returncode == 1
    assert found.stderr.startswith("fastps: worker 1, step 5: it pushes another gradient") and found.stderr.count("\n") == 1
    first = recorded_of(read(file), file).commits[0][0][0].version  # what is folded in one commit is not divided
    at = ("--checkpoint", str(tmp_path / "at"), *replayed_run)
    commands.done("replay", "--until", str(first), *at)
    assert load(tmp_path / "at").description["version"] == first
    sentence = f"--checkpoint: expected --until {first} or more, the first version that the run published"
    assert sentence in commands.refused("replay", "--until", str(first - 1), *at)


OWN = """
import sys
import fastps, torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
torch.set_num_threads(2)
sgd = torch.optim.SGD(model.parameters(), lr=0.02)
optimizer = fastps.DistributedOptimizer(sgd, model=model, checkpoint=sys.argv[1], every=4)
generator = torch.Generator().manual_seed(fastps.rank())
for step in range(9):
    inputs = torch.randn(16, 8, generator=generator)
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
if fastps.rank() == 0:
    optimizer.wait_for_others()
    print("version", fastps.load(fastps.save(optimizer, sys.argv[1])).version)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_that_saves_its_own_checkpoints_is_replayed_and_the_real_ones_stay(script: str, tmp_path: Path) -> None:
    Path(script).write_text(OWN)
    file, folder, new = str(tmp_path / "run.trace"), tmp_path / "own", tmp_path / "new"
    commands.done("run", "-n", "2", "--trace", file, script, str(folder))
    assert read(Path(file)).header["replay"]["threads"] == "2"
    before = {each: each.stat().st_mtime_ns for each in folder.rglob("*")}
    found = commands.done("replay", "--checkpoint", str(new), file, script, str(folder))
    assert "version 9" in found.stdout and "18 pushes of 2 workers" in " ".join(found.stdout.split()), found.stdout
    assert "in virtual time this checkpoint is kept until the run ends" in found.stderr
    assert before == {each: each.stat().st_mtime_ns for each in folder.rglob("*")} and load(new).version == 9
