"""A model's tensors in a job: the parameters that the job holds, and tensors of their form over its memory."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from fastps.kernels.memory.mapping import SharedMapping
from fastps.membership.job_memory import WeightsMemory

HALVES = ("float16", "bfloat16")


def shaped_tensors(
    store: WeightsMemory,
    views: Sequence[npt.NDArray[Any]],
    dtypes: str | Sequence[str] | None = None,
    view: SharedMapping | None = None,
    private: Collection[int] = (),
) -> list[torch.Tensor]:
    """Tensors over flat views of the store's memory, each with a storage of its exact size and the parameter's strides.

    Those of the parameters `private` lie in `view` instead, another mapping of the same.
    `dtypes` names the tensors' types, or the type of all, because NumPy has no bfloat16; default: those of the views. The
    memory stays mapped as long as one of them lives. A view may be empty (a table's gradient, a frozen parameter's state), or
    have one value for each row (state of row-wise rules), and is then a column.
    """
    begin = np.frombuffer(store.memory, np.uint8).ctypes.data
    names = [each.dtype.name for each in views] if dtypes is None else dtypes
    names = [names] * len(views) if isinstance(names, str) else names
    made = []
    for index, (flat, parameter, dtype) in enumerate(zip(views, store.parameters, names, strict=True)):
        shape, stride = parameter.shape, parameter.stride
        if flat.size != parameter.size:
            shape, stride = (flat.size, 1), (1, 1)
        memory = view if view is not None and index in private else store.memory
        place = flat.ctypes.data - begin if flat.size else 0
        made.append(torch.utils.dlpack.from_dlpack(memory.tensor(place, shape, stride, dtype)))
    return made


class Tensors(list[Any]):
    """The parameters that a job holds, in its layout's order. After `enter` also tensors of their form over its memory.

    `over` makes these of flat views. Their arguments `buffers` are one buffer, or one of each shard.

    Attributes:
        types: the name of each one's type in the model.
        store: the job's memory.
        view: a private mapping of it, in which the model shows weights; None: it shows memory that others may write.
        private: the numbers of the parameters that lie in the view.
    """

    store: Any
    view: SharedMapping | None = None
    private: Collection[int] = ()

    def __init__(self, parameters: Sequence[torch.Tensor], over: Callable[..., list[torch.Tensor]] = shaped_tensors) -> None:
        super().__init__(parameters)
        self.types = [str(each.dtype).removeprefix("torch.") for each in parameters]
        self._over = over

    def enter(self, store: WeightsMemory, view: SharedMapping | None = None, shared: Collection[int] = ()) -> Self:
        """Belong to this job from now on. `shared`: the parameters that do not lie in the view."""
        self.store, self.view = store, view
        self.private = () if view is None else set(range(len(self))).difference(shared)
        return self

    def name(self, index: int) -> str:
        """The name that the job has for a parameter."""
        return str(self.store.parameters[index].name)

    def weights(self, buffers: int | Sequence[int]) -> list[torch.Tensor]:
        """Tensors over the weights; of halves over their masters."""
        return self._over(self.store, self.store.weight_views(buffers))

    def planes(self, buffers: int | Sequence[int], plane: int) -> list[torch.Tensor]:
        """Tensors over an optimizer-state tensor. The caller holds the shard locks."""
        return self._over(self.store, self.store.plane_views(buffers, plane))

    def slot(self, lane: int, slot: int) -> list[torch.Tensor]:
        """Tensors over the gradients in a slot, of the type in which they are pushed."""
        return self._over(self.store, self.store.gradient_views(lane, slot), self.store.layout.gradient_type)

    @torch.inference_mode(mode=False)
    def values(self, buffers: int | Sequence[int]) -> list[torch.Tensor]:
        """Tensors over the weights in the model's types, in the memory that all workers share."""
        return self._over(self.store, self._pulled(buffers), self.types)

    def shown(self, buffers: int | Sequence[int]) -> list[torch.Tensor]:
        """Tensors that a model shows of buffers that its worker has pulled."""
        return self._over(self.store, self._pulled(buffers), self.types, self.view, self.private)

    def _pulled(self, buffers: int | Sequence[int]) -> list[Any]:
        views, parameters = list(self.store.pulled_views(buffers)), self.store.parameters
        halves = [index for index, each in enumerate(self.types) if each in HALVES and not parameters[index].is_carried]
        if halves:
            found = self.store.half_views(buffers)
            for index in halves:
                views[index] = found[index]
        return views
