"""Finding the newest checkpoint of a directory that others write into."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.checkpoint import loading
from fastps.checkpoint.format import read_description, sealed


def test_a_directory_whose_checkpoints_a_run_removes_meanwhile_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(1, 1)
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        for _ in range(5):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            folder = fastps.save(optimizer, tmp_path / "saved")
            shutil.copytree(folder, tmp_path / folder.name)
    first, *others, newest = sorted(tmp_path.glob("checkpoint-*"))
    later = newest.rename(tmp_path / "later")
    read, left = loading.read, [1]

    def rotated(folder: Path) -> Any:
        if left:  # the run writes its next checkpoint, and removes all but the one that it resumed from
            left.clear()
            later.rename(newest)
            for each in others:
                shutil.rmtree(each)
        return read(folder)

    monkeypatch.setattr(loading, "read", rotated)
    assert first.is_dir() and others
    assert fastps.load(tmp_path).version == 5
    assert not caplog.records


def test_what_a_stranger_puts_into_a_folder_is_refused_at_once_and_by_name(tmp_path: Path) -> None:
    (tmp_path / "others" / "checkpoint-x").mkdir(parents=True)
    with pytest.raises(fastps.CheckpointError, match="found neither"):
        fastps.load(tmp_path / "others")
    (tmp_path / "sparse").mkdir()
    with (tmp_path / "sparse" / "checkpoint.json").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(fastps.CheckpointError, match="expected at most 268,435,456 bytes, as save writes it, found 8,589"):
        fastps.load(tmp_path / "sparse")
    model = torch.nn.Linear(1, 1)
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        folder = fastps.save(optimizer, tmp_path / "late")
    described = read_description(folder)
    (folder / "checkpoint.json").write_bytes(sealed({**described, "version": (1 << 40) - 2}))
    with pytest.raises(fastps.CheckpointError, match=r"field 'version': expected 0 to 2\^39, found 1099511627774"):
        fastps.load(folder)
