"""Checkpoints in torch's terms: param_groups as JSON and back, model buffers, and the plain optimizer's state dict."""

from typing import Any

import numpy as np
import torch

from fastps.checkpoint.format import Array, Checkpoint, refused
from fastps.job.update_rules import Rule
from fastps.torch.any_optimizer import saved
from fastps.torch.names import of_model, without_wrappers
from fastps.torch.update_rules import entry_of


def described_group(group: dict[str, Any]) -> dict[str, Any]:
    """A param_group's options as JSON values, without the parameters and the options that JSON cannot represent.

    >>> described_group({"params": [], "lr": torch.tensor(0.5), "betas": (0.9, torch.tensor(0.5)), "eps": np.float32(0.25)})
    {'lr': 0.5, 'betas': [0.9, 0.5], 'eps': 0.25}
    """
    described: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        plain = [_plain(each) for each in value] if isinstance(value, tuple | list) else _plain(value)
        parts = plain if isinstance(plain, list) else [plain]
        if plain is None or isinstance(plain, str) or all(isinstance(each, int | float) for each in parts):
            described[name] = plain
    return described


def _plain(value: Any) -> Any:
    """A number of torch or NumPy as one of Python; other values as they are."""
    is_number = isinstance(value, torch.Tensor | np.ndarray | np.generic) and len(value.reshape(-1)) == 1
    return value.item() if is_number else value


def restore_group(group: dict[str, Any], described: dict[str, Any]) -> None:
    """Set a param_group's options to the saved ones. Saved options that the group lacks are added, as in torch."""
    for name, value in described.items():
        old = group.get(name)
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value


def _persistent(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict has, without quantized and sparse ones, which a checkpoint cannot hold."""
    own = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    return {
        name: each
        for name, each in model.named_buffers()
        if name in own and each.layout is torch.strided and not each.is_quantized
    }


def saved_buffers(model: torch.nn.Module | None) -> dict[str, Array]:
    """Name to array of a module's persistent buffers; empty without a module.

    A type that NumPy lacks (bfloat16, float8) becomes float32, and a complex number two floats.
    """
    found = {}
    for name, buffer in of_model(_persistent(model)).items() if model is not None else ():
        value = buffer.detach().cpu()
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        elif value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
            value = value.float()
        found[name] = value.numpy()
    return found


def restore_buffers(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Load the saved buffers (BatchNorm) into a model, as its load_state_dict does: an observer may take another length.

    Raises CheckpointError if one is missing or does not fit.
    """
    found, saved, buffers = checkpoint.buffers(), {}, _persistent(model)
    for name, plain in without_wrappers(buffers).items():
        if plain not in found:
            shape = tuple(buffers[name].shape)
            raise refused(checkpoint.folder, f"buffer {plain!r}", f"shape {shape} as in this model", "none")
        saved[name] = torch.from_numpy(found[plain].copy())
        if buffers[name].is_complex() and not saved[name].is_complex():
            saved[name] = torch.view_as_complex(saved[name])
    try:
        model.load_state_dict(saved, strict=False)
    except RuntimeError as error:
        raise refused(checkpoint.folder, "a buffer", "the model's shapes", str(error)) from error


def optimizer_state_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state dict of a checkpoint, in the form that the plain torch optimizer's load_state_dict takes."""
    described = checkpoint.description
    if saved.FIELD in described:  # of an optimizer that runs in Python
        return saved.state_of((described[saved.FIELD], checkpoint.prefixed(saved.PREFIX)))
    rule = Rule(described["rule"]["name"], 0, tuple(described["rule"]["planes"]))
    groups: list[dict[str, Any]] = [
        {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
        for group in described["param_groups"]
    ]
    state = {}
    for group in groups:
        group["params"] = []
    for index, parameter in enumerate(described["parameters"]):
        group = groups[parameter["group"]]
        group["params"].append(index)

        def plane(name: str, of: str = parameter["name"]) -> torch.Tensor:
            return torch.from_numpy(checkpoint.tensors[f"state/{name}/{of}"].copy())

        entry = entry_of(group, rule, parameter["steps"], plane)
        if entry is not None:
            state[index] = entry
    return {"state": state, "param_groups": groups}
