"""The tensors of a checkpoint in one file: equal to those of the library that defines the format, and without copies."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from fastps.checkpoint.format import read_tensors, write_tensors


def test_tensors_are_written_and_read_without_a_copy_in_memory(tmp_path: Path) -> None:
    big = np.arange(1 << 20, dtype=np.float32)
    tracemalloc.start()
    try:
        write_tensors({"big": big, "few": np.ones((2, 3), np.int64), "none": np.empty((0, 4), np.float32)}, tmp_path / "file")
        found = read_tensors(tmp_path / "file")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < big.nbytes / 8
    assert np.array_equal(found["big"], big) and found["few"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert found["none"].shape == (0, 4)


DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64"]


def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {f"{dtype} \u00e9": rng.integers(0, 2, (3, 5)).astype(dtype) for dtype in DTYPES}
    return found | {"scalar": np.array(2, np.float32)}


@pytest.mark.parametrize(("write", "read"), [(write_tensors, load_file), (save_file, read_tensors)], ids=["read", "write"])
def test_the_library_reads_what_is_written_and_writes_what_is_read(write: Any, read: Any, tmp_path: Path) -> None:
    write(_tensors(), tmp_path / "file")
    found = read(tmp_path / "file")
    assert found.keys() == _tensors().keys()
    assert all(np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in _tensors().items())


def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor 'c': expected a dtype of bool, .* found complex128"):
        write_tensors({"c": np.zeros(2, complex)}, tmp_path / "file")


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    write_tensors(_tensors(), tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for length in (0, 7, 20, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises((safetensors.SafetensorError, OSError, ValueError)):
            read_tensors(tmp_path / "cut")
