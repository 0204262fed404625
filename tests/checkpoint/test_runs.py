"""A folder of checkpoints belongs to a run: no other run deletes what is there, or begins there without saying so."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import fastps
from fastps.checkpoint import runs, snapshot
from fastps.checkpoint.format import read_description, sealed
from fastps.checkpoint.runs import Run, check_folder
from tests.support import commands
from tests.support.scripts import program

WEIGHTS = {"w": np.ones(3, np.float32)}


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process remembers no run of an earlier test."""
    monkeypatch.setattr(runs, "_begun", set())


def _saved(folder: Path, times: int = 1, job: str | None = None) -> list[str]:
    """Save some times from a job of its own; returns what the folder has then."""
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), job=job) as store, store.attach(0) as worker:
        for _ in range(times):
            fastps.save(worker, folder)
    runs._begun.clear()
    return sorted(found.name for found in folder.iterdir())


def test_a_run_deletes_its_own_old_checkpoints_and_none_of_another_run(tmp_path: Path) -> None:
    assert _saved(tmp_path, 3) == ["checkpoint-000002", "checkpoint-000003"]
    assert _saved(tmp_path, 3) == ["checkpoint-000002", "checkpoint-000003", "checkpoint-000005", "checkpoint-000006"]


def test_a_run_that_resumes_deletes_the_checkpoints_of_the_run_before_and_keeps_the_one_that_it_resumed(tmp_path: Path) -> None:
    """A lost worker's replacement reads that one again."""
    _saved(tmp_path)
    _saved(tmp_path, 2)
    resumed = fastps.load(tmp_path)
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        for _ in range(2):
            snapshot.write(snapshot.pin(worker, {}), {}, tmp_path, Run.of(store, resumed), keep=1)
    assert sorted(found.name for found in tmp_path.iterdir()) == [f"checkpoint-00000{number}" for number in (1, 3, 5)]
    assert runs.earlier_runs(fastps.load(tmp_path))[0] == resumed.description["run"]


def test_damaged_checkpoints_and_those_of_format_1_are_nobodys_until_they_are_resumed(tmp_path: Path) -> None:
    _saved(tmp_path)
    file = tmp_path / "checkpoint-000001" / "checkpoint.json"
    description = read_description(file.parent)
    assert Run(description["run"]).owns(file.parent)
    file.write_bytes(sealed(description)[:-9])
    assert not Run(description["run"], ("",)).owns(file.parent)
    old = {key: value for key, value in description.items() if key not in ("header", "digest", "run", "earlier_runs")}
    file.write_text(json.dumps({**old, "format": 1}))
    assert not Run(description["run"]).owns(file.parent)
    assert Run("another", runs.earlier_runs(fastps.load(tmp_path))).owns(file.parent)


def test_a_folder_with_another_runs_checkpoints_is_refused_with_both_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path)
    with pytest.raises(fastps.CheckpointError, match=r"found checkpoint-000001 of an earlier run: .*--resume .*--overwrite"):
        check_folder(tmp_path, None, overwrite=False)
    check_folder(tmp_path, fastps.load(tmp_path), overwrite=False)
    with pytest.raises(fastps.CheckpointError, match="an earlier run"):
        _saved(tmp_path / "elsewhere")
        check_folder(tmp_path, fastps.load(tmp_path / "elsewhere"), overwrite=False)
    with monkeypatch.context() as restarted:
        restarted.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        check_folder(tmp_path, None, overwrite=False)
    check_folder(tmp_path, None, overwrite=True)
    assert [found.name for found in tmp_path.iterdir()] == ["elsewhere"]


def test_a_job_of_several_nodes_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_RUN", "4711")
    names = ("job", "job.node0", "job.node12", "job.1", "job.node0.1")
    found = {name: Run.of(Mock(job=name)).id for name in names}
    assert found["job"] == found["job.node0"] == found["job.node12"] != found["job.1"] == found["job.node0.1"]


def test_a_launch_knows_the_checkpoints_of_its_jobs_and_each_job_deletes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPS_RUN", "4711")
    assert _saved(tmp_path, 3, "4711") == ["checkpoint-000002", "checkpoint-000003"]
    check_folder(tmp_path, None, overwrite=False)  # a replaced worker 0 that makes a new arena
    assert _saved(tmp_path, 1, "4711") == ["checkpoint-000003", "checkpoint-000004"]
    assert _saved(tmp_path, 3, "4711.1") == [f"checkpoint-00000{number}" for number in (3, 4, 6, 7)]
    monkeypatch.setenv("FASTPS_RUN", "4712")
    with pytest.raises(fastps.CheckpointError, match="an earlier run"):
        check_folder(tmp_path, None, overwrite=False)


def test_all_workers_of_a_job_are_of_one_run_and_those_of_a_later_job_of_its_name_of_another() -> None:
    found = []
    for _ in range(2):
        with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), workers=2, job="of one run") as store:
            with fastps.Store.connect("of one run", store.layout, []) as other:
                assert Run.of(other) == Run.of(store)
                found.append(Run.of(store).id)
    assert found[0] != found[1]


def test_a_script_may_begin_one_job_after_the_other_in_its_folder_and_keeps_the_checkpoints_of_each(tmp_path: Path) -> None:
    for _ in range(2):
        check_folder(tmp_path, None, overwrite=False)
        with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
            fastps.save(worker, tmp_path, keep=1)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["checkpoint-000001", "checkpoint-000002"]


def test_a_checkpoint_of_another_user_that_cannot_be_read_is_passed_over_and_does_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path, 2)
    is_file, private = Path.is_file, tmp_path / "checkpoint-000002"

    def refusing(path: Path) -> bool:
        if path.parent == private:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refusing)
    assert fastps.load(tmp_path).folder.name == "checkpoint-000001"
    with pytest.raises(fastps.CheckpointError, match="Permission denied"):
        fastps.load(private)
    with pytest.raises(fastps.CheckpointError, match="of an earlier run"):
        check_folder(tmp_path, None, overwrite=False)
    assert _saved(tmp_path, 3) == [f"checkpoint-00000{number}" for number in (1, 2, 4, 5)]


def test_a_damaged_checkpoint_is_refused_in_a_launch_and_in_a_script_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path)
    (tmp_path / "checkpoint-000001" / "checkpoint.json").write_text("{")
    for launch in ("", "4711"):
        monkeypatch.setenv("FASTPS_RUN", launch)
        with pytest.raises(fastps.CheckpointError, match="found checkpoint-000001 of an earlier run"):
            check_folder(tmp_path, None, overwrite=False)


def test_overwriting_removes_a_link_and_not_what_it_leads_to_and_names_what_cannot_be_deleted(tmp_path: Path) -> None:
    _saved(tmp_path / "elsewhere")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "checkpoint-000001").symlink_to(tmp_path / "elsewhere" / "checkpoint-000001")
    check_folder(folder, None, overwrite=True)
    assert (list(folder.iterdir()), fastps.load(tmp_path / "elsewhere").version) == ([], 0)
    (folder / "checkpoint-000002").write_text("no folder")
    with pytest.raises(fastps.CheckpointError, match="expected other runs' checkpoints that can be deleted, found"):
        check_folder(folder, None, overwrite=True)


@pytest.mark.parametrize("overwrite", ["0", "1"])
def test_a_worker_that_joins_a_running_job_refuses_and_deletes_nothing_of_a_run_that_shares_the_folder(
    overwrite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _saved(tmp_path)
    monkeypatch.setenv("FASTPS_JOINS", "1")
    monkeypatch.setenv("FASTPS_OVERWRITE", overwrite)
    sgd = torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1)
    with pytest.raises(fastps.AttachError, match="no-such-job"):  # it comes as far as the job
        fastps.DistributedOptimizer(sgd, checkpoint=tmp_path, job="no-such-job", rank=0, workers=2, timeout_s=0.1)
    assert sorted(found.name for found in tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fastps.CheckpointError, match=r"checkpoints in .*file: expected a folder that can be written, found"):
        check_folder(tmp_path / "file", None, overwrite=False)


SCRIPT = """
import sys, torch, fastps
model = torch.nn.Linear(4, 1)
with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), **eval(sys.argv[1])) as optimizer:
    for _ in range(4):
        optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
"""


@pytest.mark.slow
def test_a_rerun_starts_nothing_until_it_says_what_becomes_of_the_earlier_runs_checkpoints(tmp_path: Path) -> None:
    script, saved = program(tmp_path, SCRIPT)[1], tmp_path / "saved"

    def run(*options: str, **in_script: str) -> tuple[int, str, int]:
        done = commands.fastps("run", *options, script, repr(in_script))
        return done.returncode, done.stderr, fastps.load(saved).version

    common = ("--checkpoint", str(saved), "--every", "1")
    assert run(*common)[::2] == (0, 4)
    before = sorted(saved.iterdir())
    # The folder is the launcher's, or the script's.
    for expected, (code, said, _) in ((2, run(*common)), (1, run(checkpoint=str(saved)))):
        assert code == expected and "--resume" in said and "--overwrite" in said
        assert sorted(saved.iterdir()) == before
    assert run(*common, "--resume", str(saved))[::2] == (0, 8)
    assert run(*common, "--overwrite")[::2] == (0, 4)
