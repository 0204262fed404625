"""A model's state dict as the weights of a job: entries by name, put into the order of the job's parameters.

A job has the parameters that its optimizer trains. A state dict also has buffers (BatchNorm) and parameters that the optimizer
does not train; each worker has these for itself.
"""

from collections.abc import Mapping, Sequence

import torch

from fastps.errors import UsageError

Pair = tuple[torch.Tensor, torch.Tensor]


def in_order(
    model: torch.nn.Module | None, tensors: Sequence[torch.Tensor], values: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[Pair]]:
    """The values of the job's parameters `tensors`, in their order; and each other tensor of the model with its value.

    Raises UsageError without a model, which gives the names; ValueError if an entry is missing, unknown, no tensor, or of
    another shape.

    >>> model = torch.nn.Linear(2, 1)
    >>> in_order(model, [model.bias], {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})[0]
    [tensor([0.])]
    """
    if model is None:
        raise UsageError(
            "expected the model of these names, found that the optimizer was wrapped without it: pass model= to"
            " DistributedOptimizer, or a list of tensors in the order of the param_groups"
        )
    own = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(own.items())}  # of tied ones the first name
    wanted = [names.get(id(tensor)) for tensor in tensors]
    missing = [name or "a parameter outside the model" for name in wanted if name not in values]
    unknown = [name for name in values if name not in own]
    if missing or unknown:
        raise ValueError(
            f"expected an entry for each of the job's {len(wanted)} parameters and only names of the model, found"
            f" {'none for ' + ', '.join(missing) if missing else 'all'}"
            f"{' and the unknown ' + ', '.join(unknown) if unknown else ''}; use model.state_dict() of the same model"
        )
    for name, value in values.items():
        tensor = own[name]
        if not isinstance(value, torch.Tensor) or not isinstance(tensor, torch.Tensor) or value.shape != tensor.shape:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else "that is loaded into the model itself"
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"entry {name!r}: expected a tensor of shape {shape}, found {found}")
    trained = {id(tensor) for tensor in tensors}
    others = [(own[name], value) for name, value in values.items() if id(own[name]) not in trained]
    return [values[name] for name in wanted if name is not None], others
