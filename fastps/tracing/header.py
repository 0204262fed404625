"""The header of a trace, as its readers rely on it: which keys there are, and of which types.

A trace may come from anybody, so `check_header` looks at everything that a reader uses.
"""

import math
import signal
from collections.abc import Mapping
from typing import Any

_COUNTS = [int]
_NOTE = {  # about a worker
    "began_ns?": int,
    "process_id?": int,
    "transfer_ns?": int,
    "loss?": float,
    "failure?": str,
    "stops?": [[int]],
    "end?": {"exit_code?": int, "at_ns?": int},
    "load?": {"now_ns": float, "machine_ns": float, "thread_ns": float},
}
_NODE = {"node": int, "host": str}
_SIZES = {"workers?": int, "lanes?": int}  # workers at the beginning
_SCRIPT = {"name": str, "digest": str, "arguments": [str]}
_SHAPE = {
    "workers": int,
    "shards": int,
    "sync": str,
    "job?": str,
    "version?": str,
    "spins": int,
    "parameters?": int,
    "model_bytes?": int,
    "slots?": int,
    "machine": {"cores": float},
    "policy": {"fold": str, "spec?": str, "grant?": str, "bound?": str, "low?": float, "high?": float},
    "recorded": _COUNTS,
    "unfinished": _COUNTS,
    "versions?": _COUNTS,
    "committed?": {"folded": _COUNTS, "dropped": _COUNTS, "rows?": _COUNTS},
    "of_worker": {"*": _NOTE},
    "owners?": [_COUNTS],
    "node?": _NODE,
    "of_nodes?": [_NODE],
    "weights?": _COUNTS,
    "replay?": {"against": str, "model?": str, "nonfinite?": str, "threads?": str, "script?": _SCRIPT, **_SIZES},
}


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError for a header that no trace has."""
    _check(header, _SHAPE, "header")
    workers, shards = header["workers"], header["shards"]
    if not (1 <= workers <= 1 << 15 and 1 <= shards <= 1 << 15):
        raise ValueError(f"{workers} workers and {shards} shards")
    if len(header.get("versions") or range(shards)) != shards:
        raise ValueError(f"versions of {len(header['versions'])} shards of {shards}")
    for note in header["of_worker"].values():
        code = ((note or {}).get("end") or {}).get("exit_code") or 0
        if -code >= signal.NSIG:
            raise ValueError(f"a worker ended by signal {-code}")
        if any(len(stop) != 2 for stop in (note or {}).get("stops") or ()):
            raise ValueError("a stop without a begin and an end")


def _check(value: Any, shape: Any, name: str) -> None:
    """Check a JSON value. A key that ends with "?" may be absent, null or empty; "*" is any key, of such a value."""
    if isinstance(shape, list):
        _expect(isinstance(value, list), name, "a list", value)
        for each in value:
            _check(each, shape[0], name)
    elif isinstance(shape, dict):
        _expect(isinstance(value, dict), name, "an object", value)
        for key, inner in ((key, shape["*"]) for key in value) if "*" in shape else ((key, shape[key]) for key in shape):
            found = value.get(key.removesuffix("?"))
            if found not in (None, {}) or not (key.endswith("?") or "*" in shape):
                _check(found, inner, f"{name}.{key.removesuffix('?')}")
    elif shape is str:
        _expect(isinstance(value, str), name, "a text", value)
    else:
        kinds = int if shape is int else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < 1 << 63 and not math.isnan(value)
        _expect(is_number, name, "a number", value)


def _expect(is_right: bool, name: str, what: str, found: Any) -> None:
    if not is_right:
        raise ValueError(f"expected {what} as {name}, found {found!r:.80}")
