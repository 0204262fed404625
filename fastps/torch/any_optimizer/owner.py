"""Who runs the optimizer of a job, as a part of its workers: worker 0, whose optimizer, state and param_groups they are."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from fastps.errors import UnsupportedError
from fastps.job import environment
from fastps.job.layout import Layout
from fastps.kernels.combining.fold_call import FoldCall
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining
from fastps.torch.any_optimizer.fold import TorchFold


def combining_of(
    optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], after_fold: Callable[[], None], worker: AttachedLane
) -> Combining:
    """The part of a worker of such a job that folds. `after_fold` is called after each fold that the worker makes."""
    if worker.rank:
        return OtherCombining(worker)
    return OwnerCombining(worker, TorchFold(worker.store, optimizer, tensors), after_fold)


class OwnerCombining(Combining):
    """Worker 0 folds what all push, by its optimizer, while it is in its own step. `after_fold` is called after each."""

    def __init__(self, worker: AttachedLane, fold: TorchFold, after_fold: Callable[[], None]) -> None:
        super().__init__(worker)
        self._fold, self._after_fold = fold, after_fold
        self._lane.fold_with(self._fold_and_tell, range(self._shards))

    def _fold_and_tell(self, call: FoldCall) -> list[int] | None:
        try:
            return self._fold.fold(call)
        finally:
            self._after_fold()

    @property
    def closes_last(self) -> bool:
        """The others' pushes need this worker."""
        return True

    def explain_failure(self) -> bool:
        """Raise the error of the optimizer's step()."""
        if (failure := self._lane.fold_failure) is not None:
            raise failure
        return False


class OtherCombining(Combining):
    """Worker 0 folds what this worker pushes."""

    is_direct = False

    def __init__(self, worker: AttachedLane) -> None:
        super().__init__(worker)
        self._lane.fold_with(_fold_nothing, ())

    def after_push(self) -> None:
        """Worker 0 may be asleep."""
        self._lane.wake_all()


def _fold_nothing(_call: FoldCall) -> NoReturn:
    raise AssertionError("only worker 0 folds")


def check(layout: Layout, placement: str) -> None:
    """Raise UnsupportedError where an optimizer that runs in Python cannot be the fold."""
    policy, name = layout.policy, layout.rule.name
    found = {
        ("a model on the CPU", f"placement {placement!r}"): placement != "host",
        ("no server", f"server={layout.server!r}"): layout.has_server,
        ("sync='bsp', or another one whose workers wait for the next version", f"{policy.spec}, whose workers do not"): (
            layout.workers > 1 and (policy.grant != "next-version" or policy.overlap)
        ),
        ("a fixed sync", "sync='auto'"): bool(policy.warm_up),
        ("shards=1", f"{policy.shards} shards"): policy.shards > 1,
        ("on_worker_loss='stop'", "'continue'"): layout.workers > 1 and layout.faults.continues,
        ("real time", "virtual time"): environment.is_virtual(),
    }
    for (expected, what), is_found in found.items():
        if is_found:
            raise UnsupportedError(
                f"{name}: the fold does not know its arithmetic, so worker 0 runs its step() in Python: expected {expected},"
                f" found {what}; or use a compiled optimizer (docs/reference/optimizers.md lists them)"
            )
