"""The state of an optimizer that runs in Python, in a checkpoint: JSON and arrays, from which nothing is unpickled or run.

Beside its state dict it has numbers and tensors among the optimizer's own attributes, such as a count of steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fastps.checkpoint.format import Array, Checkpoint, refused
from fastps.errors import CheckpointError, UsageError

PREFIX = "optimizer/"
FIELD = "optimizer"
_DEEPEST = 32
_TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
        torch.int32, torch.int64,
    )
}  # fmt: skip
_OF_TORCH = {"defaults", "state", "param_groups", "step", "_zero_grad_profile_name", "_opt_called", "_step_count"}
_OF_ITS_FORM = {"state", "param_groups"}  # what torch's state dicts have
Saved = tuple[dict[str, Any], dict[str, Array]]


def for_checkpoint(state: Saved) -> Saved:
    """The fields of the checkpoint's JSON file, and its arrays."""
    described, arrays = state
    return {FIELD: described}, {PREFIX + name: array for name, array in arrays.items()}


def saved(optimizer: torch.optim.Optimizer) -> Saved:
    """Copies of the state: what is JSON, and the arrays that it refers to.

    Raises CheckpointError for a value in the state dict of a type that a checkpoint cannot hold. Such an attribute is left out.
    """
    arrays: dict[str, Array] = {}
    attributes = {}
    for name, value in optimizer.__dict__.items():
        if name not in _OF_TORCH and not name.endswith("_hooks"):
            try:
                attributes[name] = _encoded(value, arrays, f"attribute {name!r}")
            except CheckpointError:  # an object of the script's making: the script makes it again
                continue
    state = _encoded(optimizer.state_dict(), arrays, "state_dict()")
    return {"state": state, "attributes": attributes}, arrays


def of_values(value: Any) -> Saved:
    """Any value of plain types in the form of `saved`. Raises CheckpointError for another."""
    arrays: dict[str, Array] = {}
    return {"state": _encoded(value, arrays, "param_groups")}, arrays


def values_of(state: Saved) -> Any:
    """The value of `of_values`, or the state dict in a state of `saved`."""
    return _decoded(state[0]["state"], partial(_tensor_of, state[1]))


def state_of(state: Saved) -> dict[str, Any]:
    """The state dict in a state of `saved`."""
    found: dict[str, Any] = values_of(state)
    return found


def _tensor_of(arrays: Mapping[str, Array], name: str, kind: str) -> torch.Tensor:
    return torch.from_numpy(arrays[name].copy()).view(_TYPES[kind])


def entries_of(state: Saved, groups: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    """Each parameter's entry in a state of `saved`. What is written to it changes nothing in the job. Raises UsageError."""
    found = state_of(state)
    if not found.keys() >= _OF_ITS_FORM:
        raise UsageError(f"optimizer.state: expected a state dict of torch's form, found {', '.join(found)}: use state_dict()")
    numbers = [number for group in found["param_groups"] for number in group["params"]]
    tensors = [tensor for group in groups for tensor in group["params"]]
    of_number = dict(zip(numbers, tensors, strict=True))
    return {of_number.get(number, number): entry for number, entry in found["state"].items()}


def load(optimizer: torch.optim.Optimizer, state: Saved) -> None:
    """Load a state of `saved`. Raises what the optimizer's own load_state_dict() raises, and KeyError for a missing array."""
    found, attributes = state_of(state), {}
    for name, value in state[0]["attributes"].items():
        attributes[name] = _decoded(value, partial(_tensor_of, state[1]))
    optimizer.load_state_dict(found)
    _keep_types(optimizer, found)
    for name in attributes.keys() & optimizer.__dict__.keys():
        setattr(optimizer, name, attributes[name])


def restore(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load the saved state into an optimizer that is not wrapped yet. Raises CheckpointError."""
    described = checkpoint.description.get(FIELD)
    if not isinstance(described, dict) or not isinstance(described.get("attributes"), dict):
        raise refused(checkpoint.folder, f"field {FIELD!r}", "the state of an optimizer that runs in Python", "none")
    try:
        load(optimizer, (described, checkpoint.prefixed(PREFIX)))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise refused(checkpoint.folder, f"field {FIELD!r}", f"the state of {type(optimizer).__name__}", what) from None


def _keep_types(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Undo the conversion of the state to the parameters' types that torch makes when it loads one of its own form."""
    if not state.keys() >= _OF_ITS_FORM:
        return
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for tensor, number in zip(tensors, numbers, strict=True):
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and optimizer.state[tensor][name].dtype != value.dtype:
                optimizer.state[tensor][name] = value


def _encoded(value: Any, arrays: dict[str, Array], where: str, depth: int = 0) -> Any:
    """A value as JSON: plain ones as they are, others as an object of one entry, whose name is the kind."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    kind = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
    if kind in _TYPES and value.layout is torch.strided and not isinstance(value, torch.nn.Parameter):
        plain = value.detach().cpu()
        bits = plain.contiguous().view(torch.int16) if plain.dtype == torch.bfloat16 else plain
        arrays[name := str(len(arrays))] = np.array(bits.numpy(), order="C")
        return {"tensor": [name, kind]}
    if depth < _DEEPEST and isinstance(value, list | tuple):
        parts = [_encoded(each, arrays, where, depth + 1) for each in value]
        return {"list" if isinstance(value, list) else "tuple": parts}
    if depth < _DEEPEST and isinstance(value, Mapping) and all(type(key) in (str, int, tuple) for key in value):
        named = [(key, f"{where}, {key!r}", each) for key, each in value.items()]
        return {"dict": [[_encoded(key, arrays, name), _encoded(each, arrays, name, depth + 1)] for key, name, each in named]}
    raise CheckpointError(
        f"{where}: expected numbers, tensors, text, and lists, tuples and dicts of them, found {type(value).__name__}, which a"
        " checkpoint cannot hold without running code when it is read"
    )


def _decoded(value: Any, tensor_of: Callable[[str, str], torch.Tensor]) -> Any:
    """The value that was encoded. Raises ValueError or TypeError for what `_encoded` does not make."""
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "float":
        return float(inside)
    if kind == "tensor":
        return tensor_of(*inside)
    parts = [[_decoded(each, tensor_of) for each in part] if kind == "dict" else _decoded(part, tensor_of) for part in inside]
    return {"list": list, "tuple": tuple, "dict": dict}[kind](parts)
