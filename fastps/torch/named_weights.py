"""A model's state dict as the weights of a job: entries by name, put into the order of the job's parameters.

A job has the parameters that its optimizer trains. A state dict also has buffers (BatchNorm) and parameters that the optimizer
does not train; each worker has these for itself.
"""

from collections.abc import Mapping, Sequence

import torch

from fastps.errors import UsageError


class NamedWeights:
    """The entries of `values`, by the names that `model` gives its parameters and buffers.

    >>> model = torch.nn.Linear(2, 1)
    >>> saved = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    >>> NamedWeights(model, [model.bias], saved).in_order()
    [tensor([0.])]

    Args:
        model: the model that was given at wrapping.
        tensors: the job's parameters.
        values: the state dict.

    Raises:
        UsageError: There is no model, so the parameters have no names.
        ValueError: An entry is missing, unknown, no tensor, or of another shape.
    """

    def __init__(
        self, model: torch.nn.Module | None, tensors: Sequence[torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> None:
        if model is None:
            raise UsageError(
                "expected the model of these names, found that the optimizer was wrapped without it: pass model= to"
                " DistributedOptimizer, or a list of tensors in the order of the param_groups"
            )
        own = model.state_dict(keep_vars=True)
        self._values = values
        self._names = {id(tensor): name for name, tensor in reversed(own.items())}  # of tied ones the first name
        self._tensors = tensors
        trained = {id(tensor) for tensor in tensors}
        self._others = {name: tensor for name, tensor in own.items() if id(tensor) not in trained and name in values}
        self._check(own)

    def _check(self, own: Mapping[str, object]) -> None:
        wanted = [self._names.get(id(tensor)) for tensor in self._tensors]
        missing = [name or "a parameter outside the model" for name in wanted if name not in self._values]
        unknown = [name for name in self._values if name not in own]
        if missing or unknown:
            raise ValueError(
                f"expected an entry for each of the job's {len(wanted)} parameters and only names of the model, found"
                f" {'none for ' + ', '.join(missing) if missing else 'all'}"
                f"{' and the unknown ' + ', '.join(unknown) if unknown else ''}; use model.state_dict() of the same model"
            )
        for name, value in self._values.items():
            tensor = own[name]
            if not isinstance(value, torch.Tensor) or not isinstance(tensor, torch.Tensor) or value.shape != tensor.shape:
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else "that is loaded into the model itself"
                found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"entry {name!r}: expected a tensor of shape {shape}, found {found}")

    def in_order(self) -> list[torch.Tensor]:
        """The job's weights, in the order of its parameters."""
        return [self._values[self._names[id(tensor)]] for tensor in self._tensors]

    @torch.no_grad()
    def load_others(self) -> None:
        """Copy the entries that the job does not have, such as buffers, into this worker's model."""
        for name, tensor in self._others.items():
            tensor.copy_(self._values[name])
