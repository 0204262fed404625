"""Damage to JSON values and to files, as a disk or a stranger does it."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

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


def _containers(value: Any) -> list[Any]:
    """Every non-empty object and list in a JSON value, outermost first."""
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    own = [value] if inner else []
    return own + [found for each in inner for found in _containers(each)]


def mutate(data: st.DataObject, value: Any) -> None:
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


def damage_file(data: st.DataObject, file: Path) -> None:
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
