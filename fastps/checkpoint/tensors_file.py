"""The tensors of a checkpoint in one safetensors file, written and read without a copy of them in memory.

A table of embeddings may be larger than half of the memory. So each tensor is written from where it lies, and read through a
mapping of the file. The library that defines the format checks each file that is read.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

Array = npt.NDArray[Any]

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
_TYPES = {name: np.dtype(kind) for kind, name in _NAMES.items()}
_ALIGNED = 8  # the header is padded to a multiple, so that tensors of eight bytes can be mapped


def write_tensors(tensors: Mapping[str, Array], path: Path) -> None:
    """Write C-contiguous arrays into a new file. Raises OSError, ValueError for a dtype that the format has not.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "tensors"
    ...     write_tensors({"w": np.arange(3, dtype=np.float32)}, path)
    ...     read_tensors(path)["w"].tolist()
    [0.0, 1.0, 2.0]
    """
    header: dict[str, Any] = {}
    end = 0
    for name, array in sorted(tensors.items(), key=lambda pair: (-pair[1].itemsize, pair[0])):
        kind = _NAMES.get(array.dtype.name)
        if kind is None:
            raise ValueError(f"tensor {name!r}: expected a dtype of {', '.join(_NAMES)}, found {array.dtype}")
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in header:
            stream.write(memoryview(np.ascontiguousarray(tensors[name]).reshape(-1)).cast("B") if tensors[name].size else b"")


def header_sum(path: Path) -> int:
    """CRC-32 of a whole file's header and its length, which say what each byte after them belongs to."""
    with path.open("rb") as stream:
        length = stream.read(8)
        return zlib.crc32(stream.read(struct.unpack("<Q", length)[0]), zlib.crc32(length))


def read_tensors(path: Path) -> dict[str, Array]:
    """Name to array of a safetensors file. The arrays are read-only and lie in the file: a page is read when it is used.

    Raises OSError, safetensors.SafetensorError or ValueError for a file that is not whole.
    """
    with safetensors.safe_open(path, framework="np"):  # checks the whole header, and the size of the file
        pass
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, described in header.items():
        kind = _TYPES.get(described["dtype"])
        if kind is None:
            raise ValueError(f"tensor {name!r} has the dtype {described['dtype']}, which NumPy lacks")
        begin, end = described["data_offsets"]
        shape = tuple(described["shape"])
        mapped = np.memmap(path, kind, "r", 8 + length + begin, shape) if end > begin else np.empty(shape, kind)
        found[name] = np.asarray(mapped)
    return found
