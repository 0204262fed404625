"""Placement of models on the GPUs of one node: shards lie in GPU memory, and kernels fold.

p.grad points into the worker's slots on its own GPU. p.data points at the published weights where they are on that GPU, and
else at a replica, which a pull copies. close() waits for the other workers, because they read this one's memory.

Shards are folded while backward goes on: each is marked once its last gradient is there. Hooks of backward count a shard's
gradients down. A mark is taken back where more work on these gradients was queued since: by another backward, by a change that
torch counts (clipping, unscaling), or by a copy of a gradient that was set by hand. The push then marks the shard itself. A
write that torch does not count, through `.data` or another library, is not noticed.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack

from fastps.device.arena import DeviceArena
from fastps.device.cuda import CudaDevice
from fastps.device.placement import bucket_bytes, gpus_of_workers
from fastps.device.plan import placed_on
from fastps.device.store import DeviceStore
from fastps.errors import UnsupportedError
from fastps.job.layout import Layout
from fastps.job.update_rules import Hyper
from fastps.membership.job_memory import JobMemory
from fastps.store.worker import Worker
from fastps.torch import join
from fastps.torch.gradients import CountedGradients, Gradients
from fastps.torch.join import Joining
from fastps.torch.placements.host import HostPlacement
from fastps.torch.tensor_loops import why_not_compiled
from fastps.torch.weights import Weights


def _over_device(store: JobMemory, views: list[Any], types: str | list[str] = "float32", *_: Any) -> list[torch.Tensor]:
    """Tensors over arrays of a device, with the parameters' strides; by DLPack, through which 16-bit floats pass as int16."""
    types = [types] * len(views) if isinstance(types, str) else types
    made = []
    for view, parameter, each in zip(views, store.parameters, types, strict=True):
        raw = torch.utils.dlpack.from_dlpack(view if each == "float32" else view.view("int16"))
        made.append(raw.as_strided(parameter.shape, parameter.stride).view(getattr(torch, each)))
    return made


class DevicePlacement(HostPlacement):
    """Weights, optimizer state and gradients in the memory of the workers' GPUs."""

    name = "device"
    over = staticmethod(_over_device)
    keeps_own = False
    state_follows = True  # the memory on the device is allocated only when all workers have attached

    def make_device(self) -> CudaDevice:
        """This process's device: the GPU that holds the parameters."""
        return CudaDevice(self.tensors[0].device.index or 0)

    def server_devices(self) -> Callable[[], list[CudaDevice]]:
        """A function that makes a device of each of the job's GPUs in the server process, which sees them as worker 0 does."""
        count = max(1, len(set(gpus_of_workers())))
        return partial(_gpus, range(count) if count > 1 else [self.tensors[0].device.index or 0])

    def layout(self, layout: Layout) -> Layout:
        return placed_on(replace(layout, carried=()), gpus_of_workers(), bucket_bytes())

    def join(self, layout: Layout, hypers: list[Hyper], to: Joining, write_state: Callable[[JobMemory], None] | None) -> Worker:
        """Ignores `write_state`: earlier state is published after joining."""
        attach, served_by = partial(_attach, self.make_device()), self.server_devices() if layout.has_server else None
        return join.join(layout, self.tensors, hypers, to, DeviceStore, attach, server_devices=served_by)

    def use(self, worker: Worker) -> None:
        """A device's memory has no private view."""
        self.tensors.enter(worker.store)

    def pull(self, weights: Weights, worker: Worker, written: Collection[int]) -> None:
        weights.show(_arena(worker).shown_numbers(worker.pull()), written)

    def gradients_kind(self, worker: Worker) -> Callable[..., Gradients]:
        """Marks shards while backward goes on, unless the worker waits for its push, or is told not to."""
        if _arena(worker).waits or bucket_bytes() is None:
            return partial(Gradients, is_hooked=False)
        are_views = all(tensor.dtype == self._push_dtype for tensor in self.tensors) and why_not_compiled() is None
        shards = [parameter.shard for parameter in worker.store.layout.parameters]
        return partial(MarkedGradients if are_views else MarkedCountedGradients, _arena(worker), shards)


def _attach(device: CudaDevice, store: DeviceStore, rank: int) -> Worker:
    """Attach with this device. Raises UnsupportedError if it is not the one that the launcher gave the worker."""
    worker = store.use(device).attach(rank)
    if not gpus_of_workers() and store.arena_on_devices().near_shards() == []:
        worker.close(f"worker {rank} is on {device.identity}, and the shards are on another GPU")
        raise UnsupportedError(
            f"expected all workers on the GPU of worker 0, found worker {rank} on {device.identity}: start them with"
            " `fastps run --gpus`, or use FASTPS_PLACEMENT=host"
        )
    return worker


def _arena(worker: Worker) -> DeviceArena:
    assert isinstance(worker.store, DeviceStore)
    return worker.store.arena_on_devices()


def _gpus(indices: Sequence[int]) -> list[CudaDevice]:
    return [CudaDevice(index) for index in indices]


class _Shard:
    """What hooks have seen of one shard: the gradients that this backward has not reached, and the streams of the others.

    `versions`: of the tensors over the slot when the shard was marked; None: it is not marked.
    """

    versions: list[int] | None

    def __init__(self, members: list[int]) -> None:
        self.members = members
        self.begin()

    def begin(self) -> None:
        self.missing = set(self.members)
        self.streams: set[int] = set()
        self.versions = None


class MarkedGradients(Gradients):
    """Gradients that mark the shards of an arena's next push, and are views of the slot. `shards`: of each parameter."""

    def __init__(self, arena: DeviceArena, shards: Sequence[int], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arena = arena
        self._shard_of = shards
        members = ([index for index, shard in enumerate(shards) if shard == number] for number in range(max(shards) + 1))
        self._shards = list(map(_Shard, members))

    def put(self, index: int, slot: int, tensor: torch.Tensor) -> bool:
        """Put the gradient into the slot, and mark its shard if it is the last. Where more is accumulated, mark nothing."""
        is_there = super().put(index, slot, tensor)
        if self.accumulates:
            self._forget_all()
        elif is_there and not self.is_apart:
            self._mark(index, self.slots[slot])
        return is_there

    def zero(self, set_to_none: bool) -> None:
        self._forget_all()
        super().zero(set_to_none)

    def collect(self, slot: int) -> bytes:
        """Collect, and take back the marks of shards in which a gradient has changed since."""
        presence = super().collect(slot)
        views = self.slots[slot]
        for number, shard in enumerate(self._shards):
            if shard.versions is not None and shard.versions != [views[member]._version for member in shard.members]:
                self._arena.forget(number)
        return presence

    def release(self, slot: int) -> None:
        self._forget_all()
        super().release(slot)

    def _mark(self, index: int, views: Sequence[torch.Tensor]) -> None:
        """A gradient is in the slot of which `views` are tensors, or work is queued on this thread's stream that puts it."""
        number = self._shard_of[index]
        shard = self._shards[number]
        if index not in shard.missing:
            self._arena.forget(number)
            shard.begin()
        shard.missing.discard(index)
        shard.streams.add(self._arena.compute_stream())
        if not shard.missing and len(shard.streams) == 1:
            shard.versions = [views[member]._version for member in shard.members]
            self._arena.mark_computed(number)

    def _forget_all(self) -> None:
        for number, shard in enumerate(self._shards):
            self._arena.forget(number)
            shard.begin()


class MarkedCountedGradients(MarkedGradients, CountedGradients):
    """Gradients that mark their shards, in slots that p.grad cannot be a view of."""
