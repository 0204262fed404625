"""TensorBoard's files: they hold what the observer saw, each run has a folder of its own, and every end closes them."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fastps
from fastps.errors import UsageError
from fastps.membership.node_board import NodeBoard
from fastps.store.worker import Worker
from fastps.system.clock import Clock
from fastps.telemetry import tensorboard
from fastps.telemetry.scalars import SCALARS, STALENESS, values_of
from fastps.telemetry.tensorboard import JobWriter, written
from tests.support import commands
from tests.support.scripts import program, started
from tests.telemetry.jobs import look_at, needs, step, stepping

needs("tensorboard", "tensorboard")


class Hours(Clock):
    """A clock on which an hour passes with each point, so that each tick writes one."""

    def __init__(self) -> None:
        self._hours_ns = 0

    def now_ns(self) -> int:  # type: ignore[override]
        return super().now_ns() + self._hours_ns

    def unix_ns(self) -> int:  # type: ignore[override]
        self._hours_ns += 3_600_000_000_000
        return 1_700_000_000_000_000_000 + self._hours_ns


def _read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def _last(folder: Path, tag: str) -> float:
    return float(_read(folder).Scalars(tag)[-1].value)


@contextmanager
def _ticking(folder: Path, job: str | None = None, clock: Clock | None = None, **how: Any) -> Iterator[tuple[Worker, Any]]:
    """The worker of a job, and what writes a point of it; by default an hour passes with each."""
    with stepping(job, **how) as worker, written(folder, lambda: worker.store.job, clock or Hours()) as tick:
        assert tick is not None
        yield worker, tick


def _folder_of(base: Path, owner: str, number: int) -> Path:
    return base if owner == "job" else base / f"{owner}{number}"


def test_the_last_point_is_what_the_observer_says(tmp_path: Path) -> None:
    with _ticking(tmp_path, sync="ssp:3,shards=1") as (worker, tick):
        step(worker, 4, loss=2.0)
        tick()
        step(worker, 3, loss=0.25)
        tick()
        look = look_at(worker.store.job)
    values = list(values_of(look))
    assert {scalar.owner for scalar, _, _ in values} == {"job", "worker", "shard"}
    for scalar, number, value in values:
        points = _read(_folder_of(tmp_path, scalar.owner, number)).Scalars(scalar.tag)
        assert points[-1].value == pytest.approx(value, rel=1e-6), scalar.tag
        assert [point.step for point in points] == [4, 7]
    [histogram] = _read(tmp_path / "shard0").Histograms(STALENESS.tag)[-1:]
    counts = zip(histogram.histogram_value.bucket_limit, histogram.histogram_value.bucket, strict=True)
    assert [(int(limit), int(count)) for limit, count in counts] == look.shards[0].staleness
    assert [point.value for point in _read(tmp_path).Scalars("job/loss")] == [2.0, 0.25]


def test_rates_are_of_the_time_between_two_points(tmp_path: Path) -> None:
    with _ticking(tmp_path) as (worker, tick):
        tick()
        step(worker, 7200)
        tick()
    [point] = _read(tmp_path).Scalars("job/updates_per_second")
    assert point.value == pytest.approx(2.0, rel=0.01), "in an hour"


def test_help_texts_reach_tensorboard(tmp_path: Path) -> None:
    with _ticking(tmp_path) as (_, tick):
        tick()
    found = _read(tmp_path).SummaryMetadata("job/updates")
    [text] = [scalar.help for scalar in SCALARS if scalar.tag == "job/updates"]
    assert (found.summary_description, found.plugin_data.plugin_name) == (text, "scalars")


def test_a_long_run_has_points_for_each_thousandth_of_its_time(tmp_path: Path) -> None:
    class Minutes(Clock):
        seconds = 0

        def now_ns(self) -> int:  # type: ignore[override]
            return self.seconds * 1_000_000_000

    clock = Minutes()
    with _ticking(tmp_path, clock=clock) as (worker, tick):
        for clock.seconds in range(1, 40_001):
            if clock.seconds <= 5 or 10_000 <= clock.seconds <= 10_050 or clock.seconds >= 39_900:
                step(worker)
                tick()
    points = [point.wall_time for point in _read(tmp_path).Scalars("job/updates")]
    assert len(points) == 5 + 5 + 4 + 1, "each second, each ten seconds, each thirty, and the last"


def test_a_second_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    for name in ("first", "second"):
        job = f"tensorboard-{os.getpid()}-{name}"
        with _ticking(folder, job) as (worker, tick):
            step(worker, 2 if name == "first" else 5)
            tick()
    assert _last(folder, "job/updates") == 2
    assert _last(folder / job, "job/updates") == 5
    assert _last(folder / job / "worker0", "worker/steps") == 5


def test_a_job_that_begins_anew_is_followed_again(tmp_path: Path) -> None:
    job, hours = f"tensorboard-{os.getpid()}-anew", Hours()
    with written(tmp_path, lambda: job, hours) as tick:
        assert tick is not None
        for steps in (5, 2):
            with stepping(job) as worker:
                step(worker, steps)
                for _ in range(3):
                    hours.unix_ns()
                    tick()
            hours.unix_ns()
            tick()
    assert [point.value for point in _read(tmp_path).Scalars("job/updates")] == [5, 5, 2, 2], "the second is of the end"
    assert len(list(tmp_path.glob("events*"))) == 2, "no arena is followed twice"


def test_a_scripts_second_optimizer_and_other_nodes_have_folders_of_their_own(tmp_path: Path) -> None:
    job = f"tensorboard-{os.getpid()}-several.node1"
    with stepping(f"{job}.1") as second, _ticking(tmp_path, job) as (first, tick):
        step(first, 1)
        step(second, 2)
        tick()
    assert _last(tmp_path / "node1-workers", "job/updates") == 1
    assert _last(tmp_path / "node1-workers" / "optimizer1", "job/updates") == 2


def test_nodes_and_their_links_have_folders_of_their_own(tmp_path: Path) -> None:
    job = f"tensorboard-{os.getpid()}-nodes.node0"

    def figures(seconds: int) -> list[fastps.NodeStatistics]:
        counted = {"steps": 10 * seconds, "sent_bytes": 500 * seconds, "heard_ns": seconds * 1_000_000_000}
        return [fastps.NodeStatistics(node, state="live", round_trip_ns=2_000_000, **counted) for node in range(2)]

    with _ticking(tmp_path, job) as (_, tick):
        tick()
        board = NodeBoard(job, 2)  # a node's agent begins after the first worker
        try:
            for seconds in (1, 3):
                board.write(figures(seconds))
                tick()
        finally:
            board.close()
    for node in range(2):
        folder = tmp_path / f"node{node}"
        assert (_last(folder, "node/updates"), _last(folder, "node/live")) == (30, 1)
        assert _last(folder, "node/sent_bytes_per_second") == 500, "by the times at which the figures came"
        assert _last(folder, "node/round_trip_seconds") == pytest.approx(0.002)
    assert len(_read(tmp_path).Scalars("job/updates")) >= 2


def test_points_come_once_a_second_and_only_with_steps(tmp_path: Path) -> None:
    with _ticking(tmp_path, clock=Clock()) as (worker, tick):
        for _ in range(50):
            step(worker)
            tick()
    assert [point.step for point in _read(tmp_path).Scalars("job/updates")] == [1, 50]
    with _ticking(tmp_path / "idle") as (_, tick):
        for _ in range(5):
            tick()
    assert [point.step for point in _read(tmp_path / "idle").Scalars("job/updates")] == [0]


def test_what_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--tensorboard .*: expected a folder, or a place for one, found: "):
        JobWriter(tmp_path / "file" / "below", lambda: "none", Clock())

    def full(self: tensorboard.EventFile) -> None:
        raise OSError(28, "No space left on device")

    with _ticking(tmp_path) as (worker, tick):
        monkeypatch.setattr(tensorboard.EventFile, "flush", full)
        tick()
        step(worker)
        tick()
    assert caplog.text.count("no more is written: [Errno 28] No space left on device") == 1


def test_a_launch_without_an_arena_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with written(tmp_path, lambda: "no-such-job") as tick:
        assert tick is not None
        tick()
    assert "nothing was written, because no arena was seen of job no-such-job" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_nothing_is_done() -> None:
    with written(None, lambda: "job") as tick:
        assert tick is None


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(fastps.UnsupportedError, match=r"tensorboard, which is not installed: pip install '\.\[tensorboard\]'"):
        with written(tmp_path, lambda: "job"):
            pass


# -- whole jobs --------------------------------------------------------------------------------------

_SCRIPT = """
import os, sys, time, torch, fastps
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync="asp")
steps = int(sys.argv[1])
for step in range(steps):
    opt.zero_grad()
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    opt.report_loss(loss.item(), 2)
    opt.step()
    if step == 20 and fastps.rank() == 1 and "die" in sys.argv:
        os.kill(os.getpid(), 9)
    if step == 20:
        print("twenty", flush=True)
    time.sleep(0.01)
opt.close()
"""


def _launch(folder: Path, *arguments: str) -> list[str]:
    return ["run", "-n", "2", "--tensorboard", str(folder / "board"), program(folder, _SCRIPT)[1], *arguments]


@pytest.mark.slow
def test_a_launch_writes_its_whole_run(tmp_path: Path) -> None:
    commands.done(*_launch(tmp_path, "60"))
    board = tmp_path / "board"
    assert _last(board, "job/updates") == _last(board, "job/steps") == 120
    assert _last(board, "job/samples") == 240
    assert [_last(board / f"worker{rank}", "worker/steps") for rank in range(2)] == [60, 60]
    assert _last(board, "job/live_workers") == 0 and _last(board, "job/lost_workers") == 0
    losses = [point.value for point in _read(board).Scalars("job/loss")]
    assert losses[-1] < 0.01


@pytest.mark.slow
def test_a_workers_death_is_the_last_point(tmp_path: Path) -> None:
    outcome = commands.fastps(*_launch(tmp_path, "5000", "die"))
    assert outcome.returncode == 1, outcome.stderr
    board = tmp_path / "board"
    assert _last(board, "job/lost_workers") >= 1
    assert _last(board / "worker1", "worker/steps") == 21


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_seen(tmp_path: Path) -> None:
    launcher = started([sys.executable, "-m", "fastps.cli", *_launch(tmp_path, "5000")])
    assert launcher.stdout is not None
    assert "twenty" in launcher.stdout.readline()
    time.sleep(0.5)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert _last(tmp_path / "board", "job/updates") >= 21
    assert _last(tmp_path / "board", "job/live_workers") == 0


@pytest.mark.slow
def test_spawn_and_train_write_too(tmp_path: Path) -> None:
    spawning = (
        "import time, fastps, torch\n"
        "def work(rank):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync='bsp')\n"
        "    for _ in range(9):\n"
        "        opt.zero_grad(); model(torch.ones(1, 2)).sum().backward(); opt.step(); time.sleep(0.05)\n"
        "    opt.close()\n"
        f"fastps.spawn(work, workers=2, tensorboard={str(tmp_path / 'spawn')!r})\n"
    )
    commands.done(code=spawning)
    commands.done(
        "train", "-n", "2", "--data", "digits", "--epochs", "1", "--no-progress", "--tensorboard", str(tmp_path / "train")
    )
    assert _last(tmp_path / "spawn", "job/updates") == 9
    assert _last(tmp_path / "train", "job/loss") > 0
