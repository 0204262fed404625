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

WEIGHTS = {"w": np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6), "b": np.ones(3, np.float32)}
UPDATE = fastps.SGD(lr=1.0, momentum=0.5)
_NUMBERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, 1, -1, 2, 1 << 31, 1 << 40, (1 << 40) - 1, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 4000]),
    st.floats(allow_nan=True, allow_infinity=True),
)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    _NUMBERS,
    st.text(max_size=8),
    st.sampled_from(["F32", "U8", "I64", "F64", "BF16", "w", "__metadata__"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged checkpoint."""
    folder = tmp_path_factory.mktemp("fuzzed")
    with fastps.Store.create(WEIGHTS, UPDATE) as store, store.attach(0) as worker:
        worker.step({name: np.full(value.shape, 0.25) for name, value in WEIGHTS.items()})
        return fastps.save(worker, folder, extra={"seed": 7})


def _containers(value: Any) -> list[Any]:
    """Every non-empty object and list in a JSON value, outermost first."""
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    own = [value] if inner else []
    return own + [found for each in inner for found in _containers(each)]


def _mutate(data: st.DataObject, value: Any) -> None:
    """Change a JSON value in a few places: replace, add, remove, duplicate or deeply nest a value."""
    for _ in range(data.draw(st.integers(1, 3))):
        containers = _containers(value)
        if not containers:
            return
        container = data.draw(st.sampled_from(range(len(containers))))
        found = containers[container]
        key = data.draw(st.sampled_from(sorted(found) if isinstance(found, dict) else range(len(found))))
        kind = data.draw(st.sampled_from(["value", "near", "remove", "add", "swap", "nest"]))
        if kind == "value":
            found[key] = data.draw(_VALUES)
        elif kind == "near" and isinstance(found[key], int):
            found[key] += data.draw(st.sampled_from([-1, 1, 4, -4, 1 << 32, -(1 << 32)]))
        elif kind == "remove":
            del found[key]
        elif kind == "add" and isinstance(found, dict):
            found[data.draw(st.text(max_size=4))] = found[key]
        elif kind == "add":
            found.append(data.draw(_VALUES))
        elif kind == "nest":
            for _ in range(data.draw(st.sampled_from([1, 3, 200]))):
                found[key] = [found[key]]
        else:
            other = data.draw(st.sampled_from(sorted(found) if isinstance(found, dict) else range(len(found))))
            found[key], found[other] = found[other], found[key]


def _damage(data: st.DataObject, file: Path) -> None:
    """Overwrite, remove or insert bytes; truncate, empty or delete the file, or replace it by another kind of entry."""
    content = bytearray(file.read_bytes())
    kind = data.draw(
        st.sampled_from(["bytes", "bytes", "bytes", "cut", "prolong", "away", "folder", "loop", "elsewhere", "itself"])
    )
    begin = data.draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "bytes":
        content[begin : begin + data.draw(st.integers(0, 16))] = data.draw(st.binary(max_size=16))
    elif kind == "cut":
        del content[begin:]
    elif kind == "prolong":
        content += data.draw(st.binary(max_size=64)) * data.draw(st.sampled_from([1, 100]))
    if kind in ("bytes", "cut", "prolong"):
        file.write_bytes(content)
        return
    moved = file.rename(file.with_name("moved"))
    if kind == "folder":
        file.mkdir()
    elif kind != "away":
        file.symlink_to({"loop": file.name, "elsewhere": "/dev/null", "itself": moved}[kind])


def _nest(file: Path, depth: int) -> None:
    """Write JSON that is nested too deeply for any parser's stack."""
    file.write_text("[" * depth + "]" * depth)


def _damage_json(data: st.DataObject, folder: Path) -> None:
    file = folder / JSON_FILE
    kind = data.draw(st.sampled_from(["structure", "structure", "structure", "bytes", "deep"]))
    if kind == "structure":
        description = json.loads(file.read_text())
        _mutate(data, description)
        file.write_bytes(sealed(description))  # or no other check is reached
    elif kind == "deep":
        _nest(file, data.draw(st.sampled_from([10, 1000, 200_000])))
    else:
        _damage(data, file)


def _damage_tensors(data: st.DataObject, folder: Path) -> None:
    """Damage the file's header (a length and JSON), or any of its bytes."""
    file = folder / TENSORS_FILE
    if data.draw(st.booleans()):
        _damage(data, file)
        return
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    _mutate(data, header)
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


def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path: Path) -> None:
    with fastps.Store.create({"w": np.ones(1, np.float32)}, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        folder = fastps.save(worker, tmp_path)
    for file in (folder / JSON_FILE, folder / TENSORS_FILE):
        content = file.read_bytes()
        with file.open("r+b", buffering=0) as stream:  # in place: a file system may flush a file that is written anew
            for place, byte in enumerate(content):
                for bit in range(8):
                    os.pwrite(stream.fileno(), bytes([byte ^ 1 << bit]), place)
                    assert _is_refused(folder), (file.name, place, bit)
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
