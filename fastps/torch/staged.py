"""A model on a GPU with the arena in page-locked host memory: gradients are copied in, weights are copied out, the CPU folds.

Backward's hooks queue copies of gradients, a pull queues copies of weights, and each step waits for the GPU once. It needs no
CuPy and works with any mix of workers on GPUs and CPUs.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import ArenaError, UsageError
from fastps.store.worker import Worker
from fastps.torch.gradients import Gradients, HalfGradients
from fastps.torch.placements import HostPlacement
from fastps.torch.weights import Weights

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable


def synchronize(tensors: list[torch.Tensor]) -> None:
    """Wait until what was queued on the tensors' GPU is done, for the CPU reads or lets go of it next."""
    if tensors[0].device.type == "cuda":
        torch.cuda.current_stream(tensors[0].device).synchronize()


class StagedGradients(HalfGradients):
    """Gradients whose copies into slots in host memory are queued while backward goes on; p.grad stays the worker's own."""

    def _put_into(self, slot: int, index: int, gradient: torch.Tensor) -> None:
        self.slots[slot][index].copy_(gradient, non_blocking=True)
        self._put[index] = gradient, gradient._version
        self.present.add(index)

    def adopt(self, slot: int) -> bytes | None:
        """Queue what was changed or set since the hook; then wait for all of it, for the push names it."""
        presence = super().adopt(slot)
        synchronize(self.tensors)
        return presence

    def expose(self, slot: int) -> None:
        """Refused: the slot is memory of the host, and p.grad is not."""
        raise UsageError("expose_gradients() is for models on the CPU: set p.grad, and step() copies it")


class StagedPlacement(HostPlacement):
    """The parameters keep memory of their own: gradients are copied in, weights are copied out.

    p.grad stays the worker's own after step(). state_dict() has its tensors on the CPU; load_state_dict takes them as they are.
    """

    name = "staged"
    shows_arena = False

    def __init__(self, tensors: list[torch.Tensor], push_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(tensors, push_dtype)
        self._taken: dict[int, tuple[int, int]] = {}  # of a shard: the buffer and version that the parameters hold
        self._locked: npt.NDArray[np.uint8] | None = None  # the arena, while it is page-locked

    def begin(self) -> None:
        """Wait for queued copies, and unlock the arena before."""
        synchronize(self._tensors)
        self._unlock()
        self._taken.clear()

    def use(self, worker: Worker) -> None:
        """Let the GPU copy from and to the arena by itself: page-lock it. Raises ArenaError."""
        if self._tensors[0].device.type != "cuda":
            return
        memory = np.frombuffer(worker.store.memory, np.uint8)
        status = _runtime().cudaHostRegister(memory.ctypes.data, memory.nbytes, _HOST_REGISTER_PORTABLE)
        if int(status):
            raise ArenaError(
                f"expected to page-lock the arena of {memory.nbytes:,} bytes, found that CUDA refuses ({status}): raise the"
                " limit of locked memory (`ulimit -l`)"
            )
        self._locked = memory

    def _unlock(self) -> None:
        if self._locked is not None:
            _runtime().cudaHostUnregister(self._locked.ctypes.data)
            self._locked = None

    def gradients_kind(self) -> type[Gradients]:
        """Copies are queued."""
        return StagedGradients

    def pull(self, weights: Weights, worker: Worker) -> None:
        """Queue copies of the newest weights; their buffers stay pinned until the next pull, which the step's wait precedes."""
        synchronize(self._tensors)
        for shard, buffer in enumerate(worker.pull()):
            taken = buffer, worker.lane.shard_version(shard)
            if self._taken.get(shard) == taken:
                continue
            self._taken[shard] = taken
            for tensor, found in zip(weights.by_shard[shard], weights.of(shard, buffer), strict=True):
                tensor.data.copy_(found, non_blocking=True)

    def end(self) -> None:
        """Wait for queued copies, and unlock the arena."""
        synchronize(self._tensors)
        self._unlock()


def _runtime() -> Any:
    """The CUDA runtime as torch gives it: what it has of page-locking."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
