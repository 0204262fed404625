"""The shares that several nodes have written are one checkpoint, if all have written the same version of the same run."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastps
from fastps.checkpoint import loading
from fastps.checkpoint.format import Array, described_rule, read_description, sealed
from fastps.checkpoint.loading import share_folder
from fastps.checkpoint.runs import Run
from fastps.checkpoint.snapshot import write
from fastps.job.layout import Layout, place
from fastps.job.nodes import Nodes
from fastps.job.options import NodePolicy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.network.home_checkpoint import Share
from fastps.network.parts import Part, shares_of

SHAPES = [("a", (3, 5), (1, 3)), ("b", (40,), (1,)), ("c", (2, 3, 4), (12, 4, 1)), ("d", (), ())]  # a is stored by columns


def _layout() -> Layout:
    return Layout(place([(*row, 0) for row in SHAPES], 1), 1, SGD(lr=0.1, momentum=0.9).rule, parse_policy("bsp"), 2)


@dataclass
class Held:
    """One node's share of a memory of floats, as it is written."""

    layout: Layout
    part: Part
    number: int
    count: int
    memory: Any
    version: int = 1
    run: str = "r"

    @property
    def share(self) -> str:
        return share_folder(self.number, self.count)

    @property
    def description(self) -> dict[str, Any]:
        parameters = [
            {"name": each.name, "shape": list(each.shape), "group": 0, "steps": self.version}
            for each in self.part.layout.parameters
        ]
        return {
            "format": 2, "version": self.version, "versions": [self.version], "clocks": [self.version] * 2, "drawn": 0,
            "workers": 2, "sync": "bsp", "rule": described_rule(self.layout), "parameters": parameters, "param_groups": [{}],
            "extra": {}, "share": Share(self.layout, self.number, self.count, self.run).described(),
        }  # fmt: skip

    def arrays(self) -> Iterator[tuple[str, Array]]:
        for shift, prefix in enumerate(["weights/", *(f"state/{plane}/" for plane in self.layout.rule.planes)]):
            for each in self.part.layout.parameters:
                begin = self.part.first + each.offset
                yield prefix + each.name, self.memory[begin : begin + each.length] + np.float32(shift)

    def close(self) -> None:
        pass


def _write(folder: Path, count: int, memory: Any = 0, **others: Any) -> list[Path]:
    """Write the shares of `count` nodes, which have this memory, or one of the same number everywhere."""
    layout = _layout()
    memory = np.broadcast_to(np.asarray(memory, np.float32), layout.buffer_floats)
    shares = shares_of(layout, Nodes(count, 0, 0, 1, "a", 1, NodePolicy(homes="spread")))
    held = [Held(layout, part, number, len(shares), memory, **others) for number, part in enumerate(shares)]
    return [write(each, {"mean": np.ones(2)}, folder, Run("the run")) for each in held]


@settings(max_examples=20, deadline=None)
@given(count=st.integers(2, 6), seed=st.integers(0, 1000))
def test_shares_join_into_the_model_they_were_cut_from(tmp_path_factory: pytest.TempPathFactory, count: int, seed: int) -> None:
    folder, layout = tmp_path_factory.mktemp("shares"), _layout()
    memory = np.random.default_rng(seed).normal(size=layout.buffer_floats).astype(np.float32)
    _write(folder, count, memory)
    found = fastps.load(folder)
    found.check_layout(layout)
    for parameter in layout.parameters:
        flat = memory[parameter.offset : parameter.offset + parameter.length]
        expected = np.lib.stride_tricks.as_strided(flat, parameter.shape, [4 * step for step in parameter.stride])
        assert np.array_equal(found.weights()[parameter.name], expected)
        assert np.array_equal(found.tensors[f"state/momentum_buffer/{parameter.name}"], expected + np.float32(1))
    assert found.buffers()["mean"].tolist() == [1.0, 1.0]
    assert "share" not in found.description


def test_newest_version_that_all_nodes_have_counts(tmp_path: Path) -> None:
    _write(tmp_path, 2, version=5)
    newest = _write(tmp_path, 2, 1, version=10)
    assert (fastps.load(tmp_path).version, fastps.load(tmp_path).weights()["b"][0]) == (10, 1.0)
    (newest[1] / "checkpoint.json").unlink()
    newest[1].rename(tmp_path / "elsewhere")
    assert fastps.load(tmp_path).version == 5


def test_a_copy_of_shares_that_keeps_no_times_has_the_same_newest_version(tmp_path: Path) -> None:
    older = _write(tmp_path, 2, version=5)
    _write(tmp_path, 2, 1, version=10)
    for folder in older:
        os.utime(folder, (2**32, 2**32))
    assert fastps.load(tmp_path).version == 10


def test_the_newest_of_whole_checkpoints_and_of_shares_is_the_one_of_the_higher_version(tmp_path: Path) -> None:
    with fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        for _ in range(7):
            worker.step({"w": np.ones(3)})
        whole = fastps.save(worker, tmp_path)
    _write(tmp_path, 2, version=5)
    assert (fastps.load(tmp_path).version, list(fastps.load(tmp_path).weights())) == (7, ["w"])
    _write(tmp_path, 3, version=6)
    two, _ = _write(tmp_path, 2, 1, version=10)
    assert (fastps.load(tmp_path).version, fastps.load(tmp_path).weights()["b"][0]) == (10, 1.0)
    (two / "tensors.safetensors").unlink()
    assert fastps.load(tmp_path).version == 7
    (whole / "checkpoint.json").write_text("{")
    assert fastps.load(tmp_path).version == 6


def test_shares_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    first, _ = _write(tmp_path, 2, run="one")
    _, second = _write(tmp_path, 2, run="two")
    for folder in (first, second):
        folder.rename(tmp_path / f"elsewhere-{folder.parent.name}")
    with pytest.raises(fastps.CheckpointError, match=r"found none \(share-0-of-2 has 1; share-1-of-2 has 1\)"):
        fastps.load(tmp_path)


def test_share_without_a_description_is_named(tmp_path: Path) -> None:
    _, second = _write(tmp_path, 2)
    described = {key: value for key, value in read_description(second).items() if key != "share"}
    (second / "checkpoint.json").write_bytes(sealed(described))
    with pytest.raises(fastps.CheckpointError, match=r"share-1-of-2 has none; .* expected the description of a share"):
        fastps.load(tmp_path)


def test_damaged_share_of_the_newest_version_is_named_and_the_version_before_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, 2, version=5)
    newest = _write(tmp_path, 2, 1, version=10)
    file = newest[1] / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert fastps.load(tmp_path).version == 5
    assert "share-1-of-2/checkpoint-000002: tensor" in caplog.text


@pytest.mark.parametrize(("change", "refusal"), [
    (lambda share: share.pop("whole"), "a share's parameter: expected its name, group, shape and stride, found None"),
    (lambda share: share.update(whole=[7]), "a share's parameter: .* found 7"),
    (lambda share: share["whole"][0].update(stride=[1 << 40, 1]), r"tensor 'weights/a': expected \[3, 5\] in all shares"),
    (lambda share: share["whole"][0].update(stride=[1]), "a share's parameter: .* found {'name': 'a'"),
    (lambda share: share["whole"][0].update(shape=[-3, -5]), "a share's parameter: .* found {'name': 'a'"),
    (lambda share: share["whole"].append(share["whole"][3] | {"name": "e", "shape": [0]}), "a share's parameter"),
])  # fmt: skip
def test_what_a_share_says_of_the_model_is_bounded(tmp_path: Path, change: Any, refusal: str) -> None:
    first, _ = _write(tmp_path, 2)
    described = read_description(first)
    change(described["share"])
    (first / "checkpoint.json").write_bytes(sealed(described))
    with pytest.raises(fastps.CheckpointError, match=refusal):
        fastps.load(tmp_path)


def test_one_share_can_be_read_by_itself(tmp_path: Path) -> None:
    first, _ = _write(tmp_path, 2, np.arange(_layout().buffer_floats))
    assert fastps.load(first).weights()["a"].shape == (15,)


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
    (tmp_path / "shares" / "share-0-of-100000000" / "checkpoint-000001").mkdir(parents=True)
    with pytest.raises(fastps.CheckpointError, match="found neither"):
        fastps.load(tmp_path / "shares")
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
