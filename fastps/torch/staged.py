"""The optimizer of a model on a GPU: the same two lines, the same step, other places for weights and gradients.

Staged, the arena lies in page-locked memory of the host: backward's hooks queue copies of gradients into it, a pull queues
copies of the weights out of it, and the CPU folds. It needs no CuPy, works with any mix of workers on GPUs and CPUs, and waits
for the GPU once a step. On the device, where all workers share a GPU, the arena's floats are the GPU's: p.data and p.grad point
into them and kernels fold. fastps/device/placement.py chooses. Refuses to be imported for a model on the CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.dlpack

from fastps.device.interface import Device
from fastps.device.memory import board_bytes
from fastps.device.placement import placement
from fastps.device.store import DeviceStore
from fastps.errors import ArenaError, ParameterChangedError, UnsupportedError, UsageError
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GradientType, Layout
from fastps.job.policy import Policy
from fastps.store.worker import Worker
from fastps.system import exit_handlers as exits
from fastps.torch.gradients import Gradients, HalfGradients
from fastps.torch.join import Joining, writer_of
from fastps.torch.optimizer import DistributedOptimizer

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable


def optimizer_class(optimizer: torch.optim.Optimizer) -> type[DistributedOptimizer]:
    """The class for an optimizer with parameters on GPUs. Raises UnsupportedError where they are on several devices."""
    devices = {tensor.device for group in optimizer.param_groups for tensor in group["params"]}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise UnsupportedError(f"expected all parameters of a worker on one device, found {names}: use a GPU a worker")
    return DeviceOptimizer if placement() == "device" else StagedOptimizer


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


class StagedOptimizer(DistributedOptimizer):
    """A DistributedOptimizer whose parameters keep memory of their own: gradients are copied in, weights are copied out.

    p.grad stays the worker's own after step(). state_dict() has its tensors on the CPU; load_state_dict takes them as they are.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._taken: dict[int, tuple[int, int]] = {}  # of a shard: the buffer and version that the parameters hold
        self._locked: npt.NDArray[np.uint8] | None = None  # the arena, while it is page-locked
        super().__init__(*arguments, **options)
        self._weights.remember()

    def _use(self, worker: Worker) -> None:
        synchronize(self._tensors)
        self._unlock()
        self._taken.clear()
        super()._use(worker)
        self._lock(worker)

    def _lock(self, worker: Worker) -> None:
        """Let the GPU copy from and to the arena by itself: page-lock it."""
        if self._tensors[0].device.type != "cuda":
            return
        memory = np.frombuffer(worker.store.memory, np.uint8)
        status = _runtime().cudaHostRegister(memory.ctypes.data, memory.nbytes, _HOST_REGISTER_PORTABLE)
        if int(status):
            exits.forget(worker)
            worker.close(f"the arena of {memory.nbytes:,} bytes could not be page-locked")
            worker.store.close()
            raise ArenaError(
                f"expected to page-lock the arena of {memory.nbytes:,} bytes, found that CUDA refuses ({status}): raise the"
                " limit of locked memory (`ulimit -l`)"
            )
        self._locked = memory

    def _unlock(self) -> None:
        if self._locked is not None:
            _runtime().cudaHostUnregister(self._locked.ctypes.data)
            self._locked = None

    def _gradients_kind(self) -> type[Gradients]:
        return StagedGradients

    # -- weights -----------------------------------------------------------------------------------

    def _take_weights(self) -> None:
        """Queue copies of the newest weights; their buffers stay pinned until the next pull, which the step's wait precedes."""
        synchronize(self._tensors)
        for shard, buffer in enumerate(self._worker.pull()):
            taken = buffer, self._worker.lane.shard_version(shard)
            if self._taken.get(shard) == taken:
                continue
            self._taken[shard] = taken
            for tensor, weights in zip(self._weights.by_shard[shard], self._weights.of(shard, buffer), strict=True):
                tensor.data.copy_(weights, non_blocking=True)

    def _refuse_write(self, changed: int) -> None:
        raise ParameterChangedError(
            f"parameter {self._name(changed)!r} was written to outside of step() (in place, or by load_state_dict), which"
            " the next pull would undo: load weights before wrapping, and avoid layers that renormalize weights (max_norm)"
        )

    def close(self, failure: str | None = None) -> None:
        """See DistributedOptimizer."""
        if self._worker.closed or self._worker.forked:
            return
        synchronize(self._tensors)
        self._unlock()
        super().close(failure)


class DeviceOptimizer(DistributedOptimizer):
    """A DistributedOptimizer whose weights, rule state and gradients lie on the GPU that all its workers share.

    close() waits for the other workers, for they read the memory of worker 0.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if any(self._entries()):  # what the wrapped optimizer had; the arena's part on the device is made when all are there
            self._publish_state()

    def make_device(self) -> Device:
        """The device of this process: the GPU that the parameters are on."""
        from fastps.device.cuda import CudaDevice

        return CudaDevice(self._tensors[0].device.index or 0)

    def server_device(self) -> Callable[[], Device]:
        """What makes the same GPU's device in the server process, which sees the GPUs of worker 0."""
        from fastps.device.cuda import CudaDevice

        return partial(CudaDevice, self._tensors[0].device.index or 0)

    def _layout(self, model: torch.nn.Module | None, policy: Policy, faults: FaultPolicy, pushed: GradientType) -> Layout:
        layout = super()._layout(model, policy, faults, pushed)
        shards = len(layout.shards)
        home = layout.lanes if layout.has_server else 0
        return replace(layout, homes=(home,) * shards, extra_bytes=layout.extra_bytes + board_bytes(shards))

    def _join(self, layout: Layout, to: Joining) -> Worker:
        if to.resumed is not None:
            raise UnsupportedError("a job whose shards are on a GPU cannot be resumed yet: use FASTPS_PLACEMENT=host")
        to = to.at_its_place()
        hypers, job, rank = self._hypers(), to.identity.name, to.identity.rank
        device = self.make_device()
        if rank == 0:
            served_by = self.server_device() if layout.has_server else None
            first = writer_of(self._tensors)
            store = DeviceStore.create_for(
                layout, first, hypers, job=job, server_device=served_by, timeout_s=to.timeout_s, clock=to.clock
            )
        else:
            store = DeviceStore.connect(job, layout, hypers, timeout_s=to.timeout_s, clock=to.clock)
        assert isinstance(store, DeviceStore)
        try:
            worker = store.use(device).attach(rank)
            if store.arena_on_devices().near_shards() == []:
                worker.close(f"worker {rank} is on {device.identity}, and the shards are on another GPU")
                raise UnsupportedError(
                    f"expected all workers on the GPU of worker 0, found worker {rank} on {device.identity}: use"
                    " FASTPS_PLACEMENT=host"
                )
            return worker
        except BaseException:
            store.close()
            raise

    def _tensor_views(self, views: list[Any]) -> list[torch.Tensor]:
        """Tensors over the device's memory, with the parameter's strides; DLPack makes them without a copy."""
        return [
            torch.utils.dlpack.from_dlpack(view).as_strided(parameter.shape, parameter.stride)
            for view, parameter in zip(views, self._store.layout.parameters, strict=True)
        ]

    def _slot_views(self, views: list[Any]) -> list[torch.Tensor]:
        if self._push_dtype == torch.float32:
            return self._tensor_views(views)
        return [tensor.view(self._push_dtype) for tensor in self._tensor_views([view.view("int16") for view in views])]


def _runtime() -> Any:
    """The CUDA runtime as torch gives it: what it has of page-locking."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
