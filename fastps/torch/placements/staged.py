"""Placement of a model on a GPU with the arena in page-locked host memory: copies connect the two, and the CPU folds.

Backward's hooks queue copies of gradients, a pull queues copies of weights, and each step waits for the GPU once. It needs no
CuPy and works with any mix of workers on GPUs and CPUs.
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import ArenaError
from fastps.store.worker import Worker
from fastps.torch.gradients import CountedGradients, Gradients
from fastps.torch.placements.host import HostPlacement
from fastps.torch.weights import Weights

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable


def synchronize(tensors: list[torch.Tensor]) -> None:
    """Wait for all work queued on the tensors' GPU, before the CPU reads or frees the memory that the work uses."""
    if tensors[0].device.type == "cuda":
        torch.cuda.current_stream(tensors[0].device).synchronize()


class StagedGradients(CountedGradients):
    """Gradients whose copies into slots in host memory are queued during backward; p.grad keeps memory of its own."""

    def collect(self, slot: int) -> bytes:
        """Wait for all copies, before the push."""
        presence = super().collect(slot)
        synchronize(self.tensors)
        return presence


class StagedPlacement(HostPlacement):
    """Placement of a model whose parameters keep memory of their own; gradients and weights are copied.

    p.grad stays set after step(). state_dict() returns tensors on the CPU, which load_state_dict accepts.
    """

    name = "staged"
    shows_arena = keeps_own = False

    def __init__(self, tensors: list[torch.Tensor], push_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(tensors, push_dtype)
        self._taken: dict[int, tuple[int, int]] = {}  # by shard: the buffer and version that the parameters hold
        self._locked: npt.NDArray[np.uint8] | None = None  # the arena while it is page-locked

    def begin(self) -> None:
        self.end()
        self._taken.clear()

    def use(self, worker: Worker) -> None:
        """Page-lock the arena, so the GPU copies to and from it asynchronously. Raises ArenaError."""
        self.tensors.enter(worker.store)
        if self.tensors[0].device.type != "cuda":
            return
        # Without the readers' buffers: locking would allocate those that no reader has asked for.
        memory = np.frombuffer(worker.store.memory, np.uint8, worker.store.arena.reader_weights_range(0)[0])
        status = _runtime().cudaHostRegister(memory.ctypes.data, memory.nbytes, _HOST_REGISTER_PORTABLE)
        if int(status):
            raise ArenaError(
                f"expected to page-lock the arena of {memory.nbytes:,} bytes, found that CUDA refuses ({status}): raise the"
                " limit of locked memory (`ulimit -l`)"
            )
        self._locked = memory

    def gradients_kind(self, worker: Worker) -> Callable[..., Gradients]:
        return StagedGradients

    def pull(self, weights: Weights, worker: Worker, written: Collection[int]) -> None:
        """Queue copies of the newest weights. Their buffers stay pinned until the next pull, before which the step waits."""
        synchronize(self.tensors)
        for shard, buffer in enumerate(worker.pull()):
            taken = buffer, worker.lane.shard_version(shard)
            if self._taken.get(shard) == taken:
                continue
            self._taken[shard] = taken
            for tensor, found in zip(weights.by_shard[shard], weights.of(shard, buffer), strict=True):
                tensor.data.copy_(found, non_blocking=True)
        weights.count_writes(written)

    def end(self) -> None:
        """Wait for queued copies, and unlock the arena."""
        synchronize(self.tensors)
        if self._locked is not None:
            _runtime().cudaHostUnregister(self._locked.ctypes.data)
            self._locked = None


def _runtime() -> Any:
    """torch's binding of the CUDA runtime, which has the calls for page-locking."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
