"""The file format of a checkpoint: its contents, reading, and the errors for damaged files.

A checkpoint is a folder `checkpoint-NUMBER` with `tensors.safetensors` (weights, optimizer state, model buffers) and
`checkpoint.json` (everything else, and checksums of the tensors and of their header). The last line of `checkpoint.json` has a
digest of all bytes before it, so that one digest covers both files. Nothing is pickled.
"""

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from fastps.errors import CheckpointError
from fastps.job.layout import Layout, Parameter
from fastps.membership.job_memory import JobMemory

FORMAT = 2  # format 1 has no digest and no checksum of the tensors' header
TENSORS_FILE = "tensors.safetensors"
JSON_FILE = "checkpoint.json"
PREFIX = "checkpoint-"
AVERAGE = "average/"
_FIELDS: dict[str, type] = {
    "format": int, "version": int, "versions": list, "clocks": list, "drawn": int, "workers": int, "sync": str,
    "rule": dict, "parameters": list, "param_groups": list, "checksums": dict, "extra": dict,
}  # fmt: skip
_SINCE_FORMAT_2: dict[str, type] = {"header": int, "digest": str, "run": str, "earlier_runs": list}
_DIGEST = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n}')
_DIGEST_BYTES = 81
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read, and checked against its own description.

    Attributes:
        folder: the checkpoint's folder.
        description: the contents of the JSON file.
        tensors: name to array: `weights/NAME`, `state/PLANE/NAME`, `average/NAME`, `buffers/NAME`, `momentum/RANK/NAME`.
    """

    folder: Path
    description: Mapping[str, Any]
    tensors: Mapping[str, Array]

    @property
    def version(self) -> int:
        """The number of updates in the checkpoint: the lowest version of its shards."""
        return int(self.description["version"])

    @property
    def drawn(self) -> int:
        """The number of samples that were drawn from the order that all workers share."""
        return int(self.description["drawn"])

    @property
    def extra(self) -> Mapping[str, Any]:
        """The values that the caller of `save` added, such as seeds."""
        extra: Mapping[str, Any] = self.description["extra"]
        return extra

    @property
    def has_average(self) -> bool:
        """Whether the checkpoint has the moving average of the weights."""
        return any(name.startswith(AVERAGE) for name in self.tensors)

    def weights(self) -> dict[str, Array]:
        """Name to array of each parameter."""
        return self.prefixed("weights/")

    def buffers(self) -> dict[str, Array]:
        """Name to array of the model's buffers, from the worker that saved."""
        return self.prefixed("buffers/")

    def prefixed(self, prefix: str) -> dict[str, Array]:
        """The arrays whose names begin with `prefix`, by the rest of their names."""
        return {name.removeprefix(prefix): array for name, array in self.tensors.items() if name.startswith(prefix)}

    def check_layout(self, layout: Layout) -> None:
        """Raise CheckpointError that names the first difference from this model or rule."""
        saved = self.description["parameters"]
        for index in range(max(len(saved), len(layout.parameters))):
            expected = _identity_of(described(layout.parameters[index])) if index < len(layout.parameters) else None
            found = _identity_of(saved[index]) if index < len(saved) else None
            if expected != found:
                raise refused(self.folder, f"parameter {index}", f"{_shown(expected)} as in this model", _shown(found))
        groups = len(self.description["param_groups"])
        if groups != layout.groups:
            raise refused(self.folder, "field 'param_groups'", f"{layout.groups} as in this optimizer", str(groups))
        rule = self.description["rule"]
        for key, value in described_rule(layout).items():
            if rule.get(key) != value:
                raise refused(self.folder, f"rule's {key}", f"{value!r} as in this optimizer", repr(rule.get(key)))

    def beginning(self, layout: Layout) -> dict[str, Any]:
        """The versions of the shards, the clocks of the workers, and the samples drawn, from which a job resumes.

        If the number of workers or of shards differs, all begin at the slowest clock, or at the lowest version.
        """
        saved: list[int] = self.description["clocks"]
        slowest = min((clock for clock in saved if clock >= 0), default=0)
        clocks = [slowest] * layout.workers
        if len(saved) == layout.workers:
            clocks = [clock if clock >= 0 else slowest for clock in saved]
        versions = self.description["versions"]
        if len(versions) != len(layout.shards):
            versions = [self.version] * len(layout.shards)
        return {"versions": versions, "clocks": clocks, "drawn": self.drawn}

    def write_into(self, store: JobMemory) -> None:
        """Write weights and optimizer state into the first buffers of a store that no worker has joined yet."""
        layout = store.layout
        for prefix, number in planes_of(layout):
            if prefix == AVERAGE and not self.has_average:
                continue
            views = store.plane_views(0, number - 1) if number else store.weight_views(0)
            for parameter, view in zip(layout.parameters, views, strict=True):
                if has_values(view, parameter):
                    shaped(view, parameter)[...] = self.tensors[prefix + parameter.name]
        for name, parameter, view in momenta(store):
            if name in self.tensors:  # else the job had fewer workers
                shaped(view, parameter)[...] = self.tensors[name]
        for count, described in zip(store.rule_steps(0), self.description["parameters"], strict=True):
            count[0] = described["steps"]


_MOST_JSON_BYTES = 256 << 20
_MOST = 1 << 39  # of versions, steps and samples: an arena counts to 2^40, so a job that resumes has room for as many more


def refused(folder: Path, what: str, expected: str, found: str) -> CheckpointError:
    """The error for a checkpoint that cannot be used."""
    return CheckpointError(f"checkpoint {folder}: {what}: expected {expected}, found {found}")


def momenta(store: JobMemory) -> Iterator[tuple[str, Parameter, Array]]:
    """The momentum of each worker that keeps its own: the tensor's name, the parameter, and a flat view in the arena."""
    for lane in range(store.layout.workers):
        views = store.momentum_views(lane)
        for parameter, view in zip(store.layout.parameters if views else (), views, strict=True):
            yield f"momentum/{lane}/{parameter.name}", parameter, view


def planes_of(layout: Layout) -> list[tuple[str, int]]:
    """What is saved of each parameter: the prefix of its tensors' names, and 0 for the weights, n + 1 for state tensor n."""
    state = [(f"state/{name}/", 1 + number) for number, name in enumerate(layout.rule.planes)]
    return [("weights/", 0), *state, *([(AVERAGE, layout.planes)] if layout.policy.ema else [])]


def _expect(holds: object, folder: Path, what: str, expected: str, found: str = "", value: object = None) -> None:
    """Raise CheckpointError with what was found, or the value, unless it holds."""
    if not holds:
        raise refused(folder, what, expected, found or ("nothing" if value is None else repr(value)[:80]))


def shaped(view: Array, parameter: Parameter) -> Array:
    """A view with the parameter's shape and strides over flat memory; a column for state with one value a row."""
    if parameter.is_table and view.size != parameter.size:
        return view.reshape(-1, 1)
    return strided(view, parameter.shape, parameter.stride)


def has_values(view: Array, parameter: Parameter) -> bool:
    """Whether a flat view belongs to the parameter: the rule of a table's rows may lack state, and a frozen one has none."""
    return view.size > 0 or parameter.size == 0


def strided(view: Array, shape: Sequence[int], stride: Sequence[int]) -> Array:
    """A view with this shape and these strides, in values, over a flat view."""
    return np.lib.stride_tricks.as_strided(view, shape, [view.itemsize * step for step in stride])


def whole(directory: Path) -> list[Path]:
    """The complete checkpoints of a directory, the newest last."""
    return sorted((folder for folder in directory.glob(PREFIX + "*") if number_of(folder)), key=number_of)


def number_of(folder: Path) -> int:
    """The number in a checkpoint's name; 0 for any other folder."""
    text = folder.name.removeprefix(PREFIX)
    return int(text) if text.isdecimal() else 0


def read(folder: Path) -> Checkpoint:
    """Read one checkpoint's folder. Raises CheckpointError that names what is missing, damaged or foreign."""
    description = read_description(folder)
    try:
        if not (folder / TENSORS_FILE).is_file():  # opening a pipe would block
            raise refused(folder, TENSORS_FILE, "a whole safetensors file", "no file")
        tensors, header = read_tensors(folder / TENSORS_FILE), header_sum(folder / TENSORS_FILE)
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise refused(folder, TENSORS_FILE, "a whole safetensors file", f"a damaged one ({error})") from None
    _check_tensors(folder, description, tensors)
    if description["format"] > 1 and header != description["header"]:
        raise refused(folder, f"{TENSORS_FILE}: header", f"the checksum {description['header']}", f"{header}: it is damaged")
    return Checkpoint(folder, description, tensors)


def sealed(description: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file: the description, and a digest of all that comes before it."""
    covered = {key: value for key, value in description.items() if key != "digest"}
    text = json.dumps(covered, indent=1).encode().removesuffix(b"\n}")
    return text + b',\n "digest": "%s"\n}' % hashlib.sha256(text).hexdigest().encode()


def read_description(folder: Path) -> dict[str, Any]:
    """Read and check the JSON file of a checkpoint's folder. Raises CheckpointError, as `read` does."""
    try:
        if not (folder / JSON_FILE).is_file():
            raise refused(folder, JSON_FILE, "JSON as save wrote it", "no file")
        if (size := (folder / JSON_FILE).stat().st_size) > _MOST_JSON_BYTES:
            raise refused(folder, JSON_FILE, f"at most {_MOST_JSON_BYTES:,} bytes, as save writes it", f"{size:,}")
        text = (folder / JSON_FILE).read_bytes()
        description: dict[str, Any] = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise refused(folder, JSON_FILE, "JSON as save wrote it", f"something else ({error})") from None
    _expect(isinstance(description, dict), folder, JSON_FILE, "an object", type(description).__name__)
    fields = _FIELDS if description.get("format") == 1 else _FIELDS | _SINCE_FORMAT_2
    for field, kind in fields.items():
        value = description.get(field)
        is_right = isinstance(value, kind) and not isinstance(value, bool)
        _expect(is_right, folder, f"field {field!r}", kind.__name__, value=value)
    number = description["format"]
    _expect(number in (1, FORMAT), folder, "field 'format'", f"1 or {FORMAT}, which this fastps reads", value=number)
    if description["format"] > 1 or "digest" in description:
        end = _DIGEST.fullmatch(text, max(0, len(text) - _DIGEST_BYTES))
        if end is None:
            raise refused(folder, JSON_FILE, "a digest at its end", "none: it is damaged")
        expected, found = end[1].decode(), hashlib.sha256(text[: end.start()]).hexdigest()
        _expect(found == expected, folder, JSON_FILE, f"the digest {expected}", f"{found}: it is damaged")
    for field in ("version", "drawn"):
        _expect(0 <= description[field] < _MOST, folder, f"field {field!r}", "0 to 2^39", value=description[field])
    for field, least in (("versions", 0), ("clocks", -1)):
        values = description[field]
        are_whole = values and all(type(value) is int and least <= value < _MOST for value in values)
        _expect(are_whole, folder, f"field {field!r}", f"whole numbers of at least {least}", value=values)
    groups = description["param_groups"]
    _expect(all(isinstance(group, dict) for group in groups), folder, "field 'param_groups'", "an object each", value=groups)
    return description


def _check_tensors(folder: Path, description: dict[str, Any], tensors: Mapping[str, Array]) -> None:
    """Check that each parameter has its weights and state tensors in its shape, and that every tensor has its checksum."""
    planes = description["rule"].get("planes")
    are_names = isinstance(planes, list) and all(isinstance(plane, str) for plane in planes)
    _expect(are_names, folder, "field 'rule'", "the names of its planes", value=planes)
    for index, parameter in enumerate(description["parameters"]):
        fields = {"name": str, "shape": list, "group": int, "steps": int}
        what, groups = f"parameter {index}", len(description["param_groups"])
        is_whole = isinstance(parameter, dict) and all(isinstance(parameter.get(key), kind) for key, kind in fields.items())
        _expect(is_whole, folder, what, "name, shape, group and steps", value=parameter)
        is_there = 0 <= parameter["group"] < groups and 0 <= parameter["steps"] < _MOST
        _expect(is_there, folder, what, "a group that is there and 0 to 2^39 steps", value=parameter)
        kind = parameter.get("type", "float32")
        _expect(kind in ("float32", "float64"), folder, what, "the type float32 or float64", value=kind)
        for name in [f"{prefix}{parameter['name']}" for prefix in ("weights/", *(f"state/{plane}/" for plane in planes))]:
            found = tensors.get(name)
            expected = f"{kind} of shape {parameter['shape']}"
            shapes = [parameter["shape"]]
            if parameter.get("table") and name.startswith("state/"):
                if found is None:
                    continue  # the rule of rows has less state
                shapes.append([*parameter["shape"][:1], 1])
            what = f"parameter {parameter['name']!r}: tensor {name!r}"
            if found is None:
                raise refused(folder, what, expected, "no such tensor")
            is_right = found.dtype == kind and list(found.shape) in shapes
            _expect(is_right, folder, what, expected, f"{found.dtype} of shape {list(found.shape)}")
    checksums = description["checksums"]
    for name in [*tensors, *checksums]:
        _expect(name in checksums and name in tensors, folder, f"tensor {name!r}", "it in both files", "it in one")
        expected, own = checksums[name], checksum_of(tensors[name])
        _expect(own == expected, folder, f"tensor {name!r}", f"the checksum {expected}", f"{own}: it is damaged")


def checksum_of(array: Array) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def described(parameter: Parameter) -> dict[str, Any]:
    """A parameter's description in the JSON file, without its steps."""
    kind: dict[str, Any] = {"table": True} if parameter.is_table else {}
    if parameter.stored != "float32":
        kind["type"] = parameter.stored
    return {"name": parameter.name, "shape": list(parameter.shape), "group": parameter.group, **kind}


def _identity_of(parameter: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal of a parameter's description."""
    kinds = {"table": bool(parameter.get("table")), "type": parameter.get("type", "float32")}
    return {key: parameter.get(key) for key in ("name", "shape", "group")} | kinds


def described_rule(layout: Layout) -> dict[str, Any]:
    """The update rule's description in the JSON file."""
    rule = layout.rule
    return {"name": rule.name, "planes": list(rule.planes), "code": rule.digest}


def _shown(parameter: dict[str, Any] | None) -> str:
    if parameter is None:
        return "no such parameter"
    kind = ", a table" if parameter["table"] else ""
    return f"{parameter['name']!r} of {parameter['type']}, of shape {parameter['shape']} in group {parameter['group']}{kind}"


_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
_TYPES = {name: np.dtype(kind) for kind, name in _NAMES.items()}
_ALIGNED = 8  # the header is padded to a multiple, so that tensors of eight bytes can be mapped


def write_tensors(tensors: Mapping[str, Array], path: Path) -> None:
    """Write C-contiguous arrays into a new file. Raises OSError, ValueError for a dtype that the format has not.

    A table of embeddings may be larger than half of the memory, so each array is written from where it lies.

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
