"""The server's side of a job whose optimizer runs in Python: the server makes the optimizer again, and folds by its step()."""

import torch

from fastps.kernels.protocol.lane import Lane
from fastps.store.server_loop import Folds
from fastps.store.store import Store
from fastps.torch.any_optimizer.fold import TorchFold
from fastps.torch.any_optimizer.rebuilt import OptimizerOrder, PushedRates
from fastps.torch.any_optimizer.service import StateService
from fastps.torch.tensors import Tensors, shaped_tensors


class OptimizerFolds(Folds):
    """Folds by the ordered optimizer, on parameters of this process. Raises UnsupportedError if it cannot be made here."""

    def __init__(self, store: Store, lane: Lane, order: OptimizerOrder) -> None:
        types = [getattr(torch, parameter.type) for parameter in store.layout.parameters]
        first = zip(shaped_tensors(store, store.weight_views(0)), types, strict=True)
        tensors = Tensors([torch.nn.Parameter(values.to(kind, copy=True)) for values, kind in first]).enter(store)
        optimizer = order.make(tensors)
        torch.manual_seed(order.seed)  # of a step() that draws numbers
        fold = TorchFold(optimizer, tensors, PushedRates(optimizer.param_groups))
        lane.fold_with(fold.fold, range(store.arena.shards))
        self._service = StateService(store.job, fold)

    def close(self) -> None:
        """Answer no more that ask for the state."""
        self._service.close()
