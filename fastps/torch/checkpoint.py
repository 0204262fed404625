"""Checkpoints in torch's terms: param_groups as JSON and back, model buffers, and the plain optimizer's state dict.

This module reads and writes no files; fastps.checkpoint does.
"""

from typing import Any

import torch

from fastps.checkpoint.format import Checkpoint, refused
from fastps.job.update_rules import Rule
from fastps.torch.update_rules import entry_of


def described_group(group: dict[str, Any]) -> dict[str, Any]:
    """A param_group's options as JSON values, without the parameters and the options that JSON cannot represent.

    >>> described_group({"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99)})
    {'lr': 0.5, 'betas': [0.9, 0.99]}
    """
    described: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if plain is None or isinstance(plain, bool | int | float | str):
            described[name] = plain
        elif isinstance(plain, tuple | list) and all(isinstance(each, int | float) for each in plain):
            described[name] = list(plain)
    return described


def restore_group(group: dict[str, Any], described: dict[str, Any]) -> None:
    """Set a param_group's options to the saved ones. Saved options that the group lacks are added, as in torch."""
    for name, value in described.items():
        old = group.get(name)
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value


def restore_buffers(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the saved buffers (BatchNorm) into a model. Raises CheckpointError if one is missing or has another shape."""
    saved = checkpoint.buffers()
    for name, buffer in model.named_buffers():
        if name not in saved or tuple(saved[name].shape) != tuple(buffer.shape):
            expected = f"shape {tuple(buffer.shape)} as in this model"
            raise refused(checkpoint.folder, f"buffer {name!r}", expected, "another, or none")
        buffer.copy_(torch.from_numpy(saved[name].copy()))


def optimizer_state_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state dict of a checkpoint, in the form that the plain torch optimizer's load_state_dict takes."""
    described = checkpoint.description
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
