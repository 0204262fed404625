"""A disk that hangs: training goes on, what was missed is said and counted, and the end waits no longer than the timeout."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.checkpoint import loading, periodic, runs, snapshot
from fastps.checkpoint.periodic import Checkpointing
from fastps.checkpoint.runs import check_folder
from tests.support.table_models import TableModel, batches_of, train_on
from tests.support.torch_optimizers import one_worker

WEIGHTS = {"w": np.ones(3, np.float32)}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that hangs until the event is set."""
    answers = threading.Event()
    write = snapshot.write_tensors

    def hang(*arguments: Any) -> None:
        assert answers.wait(30), "somebody waited for the disk"
        write(*arguments)

    monkeypatch.setattr(snapshot, "write_tensors", hang)
    yield answers
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "fastps-checkpoint":
            thread.join(30)


@contextlib.contextmanager
def _job(folder: Path, timeout_s: float = 0.4) -> Iterator[tuple[fastps.Worker, Checkpointing]]:
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), timeout_s=timeout_s) as store, store.attach(0) as worker:
        yield worker, Checkpointing(worker, folder, 2, lambda: snapshot.pin(worker, {}, waits=False), dict)


def _steps(worker: fastps.Worker, checkpointing: Checkpointing, count: int) -> None:
    for _ in range(count):
        worker.step({"w": np.ones(3)})
        checkpointing.after_step()


def test_the_end_of_a_job_waits_for_a_hung_disk_as_long_as_the_timeout_and_says_so(
    tmp_path: Path, disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with _job(tmp_path) as (worker, checkpointing):
        _steps(worker, checkpointing, 3)
        checkpointing.close()
        assert (checkpointing.written, checkpointing.failures) == (0, 1)
    assert f"waiting for at most 0.4 s until the checkpoint of version 2 is written to {tmp_path}" in caplog.text
    assert f"the checkpoint of version 2 was not written to {tmp_path} within 0.4 s, and is missed" in caplog.text
    assert not disk.is_set()


def test_a_folder_whose_reads_hang_holds_up_the_end_of_a_job_and_the_start_of_the_next_as_long_as_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    with _job(tmp_path) as (worker, checkpointing):
        fastps.save(worker, tmp_path)
        _steps(worker, checkpointing, 1)
        for module in (runs, periodic):
            monkeypatch.setattr(module, "read_description", lambda folder: answers.wait(30) and pytest.fail("it waited"))
        checkpointing.close()
        assert checkpointing.failures == 1
    assert f"the checkpoint of version 1 was not written to {tmp_path} within 0.4 s, and is missed" in caplog.text
    with pytest.raises(fastps.CheckpointError, match=r"expected an answer, found none within 0.2 s: its disk hangs"):
        check_folder(tmp_path, None, overwrite=False, timeout_s=0.2)
    assert not answers.is_set()
    answers.set()


def test_save_and_load_wait_for_a_hung_disk_as_long_as_the_timeout_and_say_so(
    tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with _job(tmp_path) as (worker, checkpointing):
        checkpointing.close()
        with pytest.raises(fastps.CheckpointError, match=r"cannot be written within 0.4 s: the disk hangs, or is slow"):
            fastps.save(worker, tmp_path)
        assert not disk.is_set()
        worker.store.with_timeout(60)  # a disk that answers may still be slow
        disk.set()
        worker.store.with_timeout(60.0)  # a disk that works may be slow, too
        folder = fastps.save(worker, tmp_path)  # once the late one is written
    assert f"waiting for at most 0.4 s until the checkpoint of version 0 is written to {tmp_path}" in caplog.text
    assert (fastps.load(folder).version, len(list(tmp_path.iterdir()))) == (0, 2)
    monkeypatch.setenv("FASTPS_TIMEOUT", "0.4")
    answers = threading.Event()
    monkeypatch.setattr(loading, "read", lambda folder: answers.wait(30))
    with pytest.raises(fastps.CheckpointError, match=r"expected it to be read within 0.4 s, found that its disk hangs, or is"):
        fastps.load(tmp_path)
    answers.set()
    assert f"waiting for at most 0.4 s until the checkpoint {tmp_path} is read" in caplog.text


def test_a_checkpoint_that_is_missed_because_the_one_before_takes_so_long_is_a_warning(
    tmp_path: Path, disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with _job(tmp_path, timeout_s=60) as (worker, checkpointing):
        _steps(worker, checkpointing, 5)
        assert (checkpointing.failures, caplog.text) == (0, "")
        _steps(worker, checkpointing, 1)
        assert checkpointing.failures == 1
        assert "no checkpoint of version 4: the one of version 2 is still being written" in caplog.text
        disk.set()
        checkpointing.close()
        assert checkpointing.written == 2
    assert fastps.load(tmp_path).version == 6


def test_another_writer_of_the_folder_is_waited_for_as_long_as_the_timeout(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with _job(tmp_path) as (worker, checkpointing):
            with pytest.raises(fastps.CheckpointError, match=r"another process has written there for more than 0.2 s"):
                fastps.save(worker, tmp_path)
            _steps(worker, checkpointing, 2)
            checkpointing.close()
            assert checkpointing.failures == 1
    finally:
        os.close(descriptor)


def test_two_jobs_that_write_into_one_folder_are_told_and_keep_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _job(tmp_path, timeout_s=60) as (first, of_first), _job(tmp_path, timeout_s=60) as (second, of_second):
        for _ in range(4):
            for worker, checkpointing in ((first, of_first), (second, of_second)):
                _steps(worker, checkpointing, 2)
                checkpointing.close()
    assert caplog.text.count(f"{tmp_path} has checkpoints of another run, too, which stay") == 2
    assert sorted(fastps.load(found).version for found in tmp_path.iterdir()) == [6, 6, 8, 8]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("room", [True, False], ids=["a copy fits into memory", "it does not fit"])
def test_tables_are_copied_and_a_hung_disk_stops_no_step(
    room: bool, tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not room:
        monkeypatch.setattr(snapshot, "available_bytes", lambda: (0, "nothing"))
        disk.set()
    with one_worker(TableModel(), sync="bsp", named=True, checkpoint=tmp_path, every=2) as (model, optimizer):
        batches = batches_of(5, 8)
        train_on(model, [optimizer], batches[:2])
        expected = model.bag.weight.detach().numpy().copy()
        train_on(model, [optimizer], batches[2:3])
        assert disk.is_set() is not room
        assert ("the other workers wait while a checkpoint is written" in caplog.text) is not room
        disk.set()
    saved = {fastps.load(found).version: fastps.load(found) for found in tmp_path.iterdir()}
    assert np.array_equal(saved[2].weights()["bag.weight"], expected)


def test_a_folder_without_room_or_that_does_not_answer_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(fastps.CheckpointError, match=r"expected \d+ MB of room for a checkpoint, found \d+ MB"):
        check_folder(tmp_path, None, overwrite=False, needed_bytes=1 << 62)
    answers = threading.Event()

    def hang(**where: Path) -> None:
        answers.wait(30)
        raise OSError("too late")

    monkeypatch.setattr(runs.tempfile, "TemporaryFile", hang)
    with pytest.raises(fastps.CheckpointError, match=r"expected an answer, found none within 0.2 s: its disk hangs"):
        check_folder(tmp_path, None, overwrite=False, timeout_s=0.2)
    answers.set()
