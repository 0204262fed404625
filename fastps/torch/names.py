"""The names by which workers, checkpoints and readers know a model's parameters and buffers.

A wrapper around the model changes none: what `torch.compile`, DataParallel and activation checkpointing put into names is taken
out. Without `model=`, the names are those in the smallest module that holds all parameters of the optimizer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fastps.system import garbage

_INSERTED = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_OUTER = "module."
UNNAMED = "param_groups["
"""How the names begin of parameters that have none: they are known by their place in the optimizer."""


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Each of a module's names with the same name as the module has it that is wrapped; as it is, if two would be equal.

    >>> without_wrappers(["_orig_mod.module.0.weight", "_orig_mod.module.0.bias"])
    {'_orig_mod.module.0.weight': '0.weight', '_orig_mod.module.0.bias': '0.bias'}
    """
    given = list(names)
    found = [_INSERTED.sub("", name) for name in given]
    while found and all(name.startswith(_OUTER) for name in found):
        found = [name.removeprefix(_OUTER) for name in found]
    return dict(zip(given, found if len(set(found)) == len(found) else given, strict=True))


def of_model(named: Mapping[str, Any]) -> dict[str, Any]:
    """A module's parameters or buffers by their names without wrappers.

    >>> list(of_model({"module.0.weight": torch.ones(1)}))
    ['0.weight']
    """
    return {plain: named[name] for name, plain in without_wrappers(named).items()}


def around(tensors: Iterable[torch.Tensor], model: torch.nn.Module | None) -> list[torch.nn.Module]:
    """The modules among which those are that hold these parameters: the model's, if it holds all, else all of this process.

    To find all of a process passes over every object of it.
    """
    own = list(model.modules()) if model is not None else []
    if own and {id(tensor) for tensor in tensors} <= {id(each) for module in own for each in module._parameters.values()}:
        return own
    return [each for each in garbage.objects() if issubclass(type(each), torch.nn.Module) and "_modules" in each.__dict__]


def of_groups(
    groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None, modules: Sequence[torch.nn.Module] = ()
) -> tuple[dict[int, str], dict[int, str]]:
    """The names of parameters, by id: those of the model, and those that the optimizer was given (torch's "param_names").

    Without both: those in the smallest of these modules that holds all parameters of the groups.

    >>> layer = torch.nn.Linear(2, 1)
    >>> names, _ = of_groups([{"params": [layer.bias, layer.weight]}], None, [layer])
    >>> names[id(layer.bias)], names[id(layer.weight)]
    ('bias', 'weight')
    """
    pairs = [pair for group in groups for pair in zip(group["params"], group.get("param_names") or (), strict=False)]
    plain = without_wrappers(name for _, name in pairs)
    given = {id(tensor): plain[name] for tensor, name in pairs}
    tensors = {id(tensor) for group in groups for tensor in group["params"]}
    holder = _holder(tensors, modules) if model is None and len(given) < len(tensors) else model
    named = of_model(dict(holder.named_parameters())) if holder is not None else {}
    return {id(tensor): name for name, tensor in named.items()}, given


def _holder(wanted: set[int], modules: Sequence[torch.nn.Module]) -> torch.nn.Module | None:
    """The smallest module that has all these parameters, by id; None if there is none."""
    held: dict[int, set[int]] = {}

    def held_by(module: torch.nn.Module) -> set[int]:
        if (found := held.get(id(module))) is None:
            found = held[id(module)] = {id(each) for each in module._parameters.values()} & wanted
            for child in module._modules.values():
                found |= held_by(child) if child is not None else set()
        return found

    holders = [module for module in modules if held_by(module) == wanted]
    sizes = {id(module): sum(1 for _ in module.modules()) for module in holders}
    return min(holders, key=lambda module: (sizes[id(module)], list(dict(module.named_parameters()))), default=None)
