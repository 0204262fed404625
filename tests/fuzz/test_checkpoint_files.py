"""A checkpoint's two files may hold anything: `load` and resuming raise CheckpointError, or give the saved values."""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import fastps
from fastps.checkpoint.format import JSON_FILE, TENSORS_FILE, sealed
from tests.fuzz.amount import fuzz
from tests.fuzz.damage import damage_file, mutate

WEIGHTS = {"w": np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6), "b": np.ones(3, np.float32)}
UPDATE = fastps.SGD(lr=1.0, momentum=0.5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged checkpoint."""
    folder = tmp_path_factory.mktemp("fuzzed")
    with fastps.Store.create(WEIGHTS, UPDATE) as store, store.attach(0) as worker:
        worker.step({name: np.full(value.shape, 0.25) for name, value in WEIGHTS.items()})
        return fastps.save(worker, folder, extra={"seed": 7})


def _nest(file: Path, depth: int) -> None:
    """Write JSON that is nested too deeply for any parser's stack."""
    file.write_text("[" * depth + "]" * depth)


def _damage_json(data: st.DataObject, folder: Path) -> None:
    file = folder / JSON_FILE
    kind = data.draw(st.sampled_from(["structure", "structure", "structure", "bytes", "deep"]))
    if kind == "structure":
        description = json.loads(file.read_text())
        mutate(data, description)
        file.write_bytes(sealed(description))  # or no other check is reached
    elif kind == "deep":
        _nest(file, data.draw(st.sampled_from([10, 1000, 200_000])))
    else:
        damage_file(data, file)


def _damage_tensors(data: st.DataObject, folder: Path) -> None:
    """Damage the file's header (a length and JSON), or any of its bytes."""
    file = folder / TENSORS_FILE
    if data.draw(st.booleans()):
        damage_file(data, file)
        return
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    mutate(data, header)
    text = json.dumps(header).encode()
    said = len(text) + data.draw(st.sampled_from([0, 0, 0, 0, 1, -1, 8, 1 << 31, 1 << 62, (1 << 63) - len(text)]))
    file.write_bytes(struct.pack("<Q", said % (1 << 64)) + text + content[8 + length :])


def _sums(tensors: Any) -> dict[str, int]:
    return {name: zlib.crc32(np.ascontiguousarray(array).tobytes()) for name, array in tensors.items()}


def _resume(checkpoint: fastps.Checkpoint) -> dict[str, int]:
    """Resume a store from the checkpoint and make one step; return the sums of the weights before the step."""
    with fastps.Store.create(WEIGHTS, UPDATE, resume=checkpoint) as store:
        with store.attach(0) as worker:
            found = _sums(worker.weights)
            worker.step({name: np.zeros(value.shape) for name, value in WEIGHTS.items()})
        return found


def _check(whole: Path, target: str, damage: Callable[[st.DataObject, Path], None]) -> None:
    expected, damaged = fastps.load(whole), whole.parent / "damaged"
    weights = _resume(expected)

    def check(data: st.DataObject) -> None:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        damage(data, damaged)
        try:
            found = fastps.load(damaged)
            assert found.version == int(found.description["version"]) and found.drawn >= 0
            resumed = _resume(found)
        except fastps.CheckpointError:
            return
        sums = _sums(found.tensors)
        assert {name: sums[name] for name in expected.tensors} == _sums(expected.tensors)
        assert resumed == weights

    fuzz(target, check)


def test_no_description_is_read_as_another(whole: Path) -> None:
    _check(whole, "checkpoint.json", _damage_json)


def test_no_tensors_are_read_as_others(whole: Path) -> None:
    _check(whole, "tensors.safetensors", _damage_tensors)


def _is_refused(folder: Path) -> bool:
    try:
        fastps.load(folder)
    except fastps.CheckpointError as error:
        return str(folder) in str(error)
    return False


@pytest.mark.sampled(8)
@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_is_refused_wherever_it_is(bit: int, tmp_path: Path) -> None:
    with fastps.Store.create({"w": np.ones(1, np.float32)}, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        folder = fastps.save(worker, tmp_path)
    for file in (folder / JSON_FILE, folder / TENSORS_FILE):
        content = file.read_bytes()
        with file.open("r+b", buffering=0) as stream:  # in place: a file system may flush a file that is written anew
            for place, byte in enumerate(content):
                os.pwrite(stream.fileno(), bytes([byte ^ 1 << bit]), place)
                assert _is_refused(folder), (file.name, place)
                os.pwrite(stream.fileno(), bytes([byte]), place)
    assert fastps.load(folder).version == 0


def test_no_bytes_are_read_as_others(whole: Path) -> None:
    damaged = whole.parent / "damaged"

    def check(data: st.DataObject) -> None:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        file = damaged / data.draw(st.sampled_from([JSON_FILE, TENSORS_FILE]))
        content = bytearray(file.read_bytes())
        for place in data.draw(st.lists(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=3, unique=True)):
            content[place // 8] ^= 1 << place % 8
        file.write_bytes(content)
        assert _is_refused(damaged)

    fuzz("bits of a checkpoint", check)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole, folder)
    (folder / TENSORS_FILE).unlink()
    os.mkfifo(folder / TENSORS_FILE)
    with pytest.raises(fastps.CheckpointError, match=r"tensors\.safetensors"):
        fastps.load(folder)
