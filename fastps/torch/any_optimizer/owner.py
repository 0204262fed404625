"""Which process runs the optimizer of a job, and what the workers' part that folds does.

Worker 0 does where a version needs the pushes of all workers: with its optimizer, its state and its param_groups. Elsewhere its
pace would be everybody's, so a server process does, with an optimizer that it has made of worker 0's. Where some pushes make a
version, worker 0 may even wait in another job of the script while the others wait for it in this one.
"""

import logging
import platform
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from fastps.errors import UnsupportedError, WorkerDiedError
from fastps.job import environment
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout
from fastps.job.limits import fold_threads
from fastps.job.options import value_of
from fastps.job.policy import Policy
from fastps.job.update_rules import Rule
from fastps.kernels.combining.fold_call import FoldCall
from fastps.kernels.shm.arena import LANE_JOINING, LANE_LEAVING, LANE_LIVE
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining
from fastps.store.server_process import ServerPlan
from fastps.store.virtual_time import Virtual
from fastps.torch.any_optimizer import saved, service
from fastps.torch.any_optimizer.fold import TorchFold
from fastps.torch.any_optimizer.rebuilt import OptimizerOrder
from fastps.torch.any_optimizer.saved import Saved
from fastps.torch.any_optimizer.service import Inbox, StateService
from fastps.torch.tensors import Tensors

logger = logging.getLogger("fastps.torch")

SERVER = "fastps.processes.server"
_PRESENT = (LANE_JOINING, LANE_LIVE, LANE_LEAVING)


def server_of(rule: Rule, policy: Policy, faults: FaultPolicy, workers: int, server: str | None) -> str:
    """The job's kind of server. `server`: the argument of that name, or None for FASTPS_SERVER."""
    given: str = value_of("FASTPS_SERVER", server)
    needs_all = policy.is_level and policy.grant == "next-version" and not faults.continues
    is_alone = faults.lanes(workers) == 1 and not policy.overlap  # whose thread would fold while the script computes
    is_needed = rule.runs_in_python and not needs_all and not is_alone
    return "process" if is_needed else given


def check(layout: Layout, placement: str) -> None:
    """Raise UnsupportedError where an optimizer that runs in Python cannot be the fold."""
    policy, name = layout.policy, layout.rule.name
    is_lbfgs = name == "torch.optim.lbfgs.LBFGS"
    found = {
        ("a model on the CPU of one node", f"placement {placement!r}"): placement != "host",
        ("a fixed sync", "sync='auto'"): bool(policy.warm_up),
        ("shards=1", f"{policy.shards} shards"): policy.shards > 1,
        (
            "one worker, without clip= and of one type, because each step evaluates the loss several times",
            f"up to {layout.lanes} under {policy.spec}",
        ): is_lbfgs and not layout.steps_alone,
    }
    for (expected, what), is_found in found.items():
        if is_found:
            raise UnsupportedError(
                f"{name}: the compiled core does not know its arithmetic, so one process runs its step() in Python: expected"
                f" {expected}, found {what}; or use a compiled optimizer (docs/reference/optimizers.md lists them)"
            )


def plan_of(layout: Layout, optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]) -> ServerPlan | None:
    """Worker 0's plan of the server that runs the optimizer, or None where that worker does. Raises UnsupportedError."""
    is_muon = type(optimizer) is getattr(torch.optim, "Muon", None)  # since torch 2.9
    if is_muon and platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported():
        logger.warning(
            "torch.optim.Muon multiplies in bfloat16, for which this processor has no instructions: a step may take many times"
            " as long as in float32; examples/muon.py has a Muon that multiplies in float32"
        )
    return ServerPlan(SERVER, OptimizerOrder.of(optimizer, tensors)) if layout.has_server else None


def combining_of(
    optimizer: torch.optim.Optimizer, tensors: Tensors, after_fold: Callable[[], None], worker: AttachedLane
) -> Combining:
    """The part of a worker of such a job that folds. `after_fold` is called after each fold that the worker makes."""
    if environment.is_virtual():
        worker.lane.fold_with(_fold_nothing, ())
        return Virtual(worker)
    if worker.rank or worker.store.layout.has_server:
        return OtherCombining(worker)
    return OwnerCombining(worker, TorchFold(optimizer, tensors.enter(worker.store)), after_fold)


def fold_of(combining: Combining) -> TorchFold | None:
    """The fold of this part, if it runs the optimizer."""
    return combining.fold if isinstance(combining, OwnerCombining) else None


def state_of(worker: AttachedLane, combining: Combining) -> Saved:
    """The optimizer's state at the published version, if this worker holds the shard locks. Raises WorkerDiedError."""
    if isinstance(combining, OwnerCombining):  # no fold comes between: this thread makes them
        return saved.saved(combining.fold.optimizer)
    try:
        return service.read(worker.store.job, worker.store.timeout_s)
    except WorkerDiedError:
        last = combining.last_state() if isinstance(combining, OtherCombining) else None
        if last is None:
            raise
        return last


class OwnerCombining(Combining):
    """Worker 0 folds what all push, by its optimizer, while it is in its own step."""

    def __init__(self, worker: AttachedLane, fold: TorchFold, after_fold: Callable[[], None]) -> None:
        super().__init__(worker)
        self.fold, self._after_fold = fold, after_fold
        self._service: StateService | None = None
        self._lane.fold_with(self._fold_and_tell, range(self._shards))

    def begin(self) -> None:
        """Answer other workers that ask for the state."""
        if self._worker.store.layout.lanes > 1:
            self._service = StateService(self._worker.store.job, self.fold)

    def _fold_and_tell(self, call: FoldCall) -> list[int] | None:
        threads = torch.get_num_threads()
        most = fold_threads(self._worker.store.layout, threads)
        if most != threads:
            torch.set_num_threads(most)
        try:
            return self.fold.fold(call)
        finally:
            if most != threads:
                torch.set_num_threads(threads)
            self._after_fold()

    @property
    def closes_last(self) -> bool:
        """The others' pushes need this worker."""
        return True

    def before_close(self, failure: str | None) -> None:
        """Leave the last state with the workers that have not closed yet, which may ask for it."""
        if failure is None and self._service is not None:
            arena, rank = self._worker.store.arena, self._worker.rank
            states = arena.lane_states()[: arena.lanes]
            self._service.leave([lane for lane, state in enumerate(states) if state in _PRESENT and lane != rank])

    def after_close(self, failure: str | None) -> None:
        """Answer no more."""
        if self._service is not None:
            self._service.close()
            self._service = None

    def explain_failure(self) -> bool:
        """Raise the error of the optimizer's step()."""
        if (failure := self._lane.fold_failure) is not None:
            raise failure
        return False


class OtherCombining(Combining):
    """Worker 0, or the server, folds what this worker pushes."""

    is_direct = False

    def __init__(self, worker: AttachedLane) -> None:
        super().__init__(worker)
        self._lane.fold_with(_fold_nothing, ())
        self._inbox: Inbox | None = None

    def begin(self) -> None:
        """Let worker 0 leave the last state here. A server outlives the workers."""
        if not self._worker.store.layout.has_server:
            self._inbox = Inbox(self._worker.store.job, self._worker.rank)

    def last_state(self) -> Saved | None:
        """The state that worker 0 left here when it closed, or None."""
        return self._inbox.state() if self._inbox is not None else None

    def after_close(self, failure: str | None) -> None:
        """Take no more."""
        if self._inbox is not None:
            self._inbox.close()

    def after_push(self) -> None:
        """Worker 0 may be asleep."""
        if not self._lane.served:
            self._lane.wake_all()

    def on_server_end(self) -> None:
        """Raise WorkerDiedError: the optimizer and its state are gone with the server."""
        arena = self._worker.store.arena
        reason = arena.failure(arena.server_lane) or f"process {arena.process_id(arena.server_lane)} was killed"
        raise WorkerDiedError(
            f"worker {self._worker.rank}: the job's server, which runs the optimizer and has its state, has ended ({reason}):"
            " restart the job, with resume= from its last checkpoint",
            arena.server_lane,
        )


def _fold_nothing(_call: FoldCall) -> NoReturn:
    raise AssertionError("another process folds")
