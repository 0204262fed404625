"""A job whose shards are on devices: its store, with memory that other processes map by handles.

All decisions are made as on the CPU, by the same words in the same arena. Three things differ: floats are on devices, a fold is
queued instead of executed, and streams wait for events where the CPU relies on memory order. Every worker of such a job must
reach the devices; other jobs keep the arena in host memory (placement in docs/how-to/gpu.md).
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastps.device import users_rule
from fastps.device.arena import DeviceArena
from fastps.device.cuda import CudaDevice
from fastps.device.memory import FirstVersion
from fastps.device.owner import DeviceOwner
from fastps.errors import UnsupportedError, UsageError
from fastps.membership.job_memory import VersionCopy, Views
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining
from fastps.store.server_process import DevicePlan, ServerPlan
from fastps.store.store import StartState, Store
from fastps.store.worker import Worker


class Snapshots(VersionCopy):
    """One lane's copies of pinned versions, with a stream and page-locked memory of their own, while folds and steps go on.

    One at a time: the arena lets one worker at a time pin a version. The copies are queued behind the folds that make it, and
    the process waits for them, maybe in another thread than the worker's, before it unpins.
    """

    def __init__(self, arena: DeviceArena, device: CudaDevice) -> None:
        self._arena = arena
        self.device = device
        self.stream: Any = device.make_stream()
        self.copied: Any = device.make_event()  # behind the copies
        floats = arena.layout.buffer_floats * (1 + arena.layout.planes)
        self._is_done = True
        self._floats = device.host_memory(4 * max(1, floats)).view(np.float32)

    def begin(self, weights: Sequence[int], state: Sequence[int]) -> VersionCopy:
        """Queue the copies of these buffers, one of each a shard. Raises UnsupportedError without peer access to all homes."""
        arena, layout = self._arena, self._arena.layout
        pieces = []
        for index, parameter in enumerate(layout.parameters):
            shard = parameter.shard
            sources = [arena.weights_address(weights[shard], index)]
            sources += [arena.plane_address(state[shard], plane, index) for plane in range(layout.planes)]
            pieces += [(number, index, source) for number, source in enumerate(sources) if parameter.length]
        arena.await_folds(self.stream)
        for number, index, source in pieces:
            target = self._view(number, index)
            self.device.copy(target.ctypes.data, source, target.nbytes, self.stream)
        self.device.record(self.copied, self.stream)
        self._is_done = False
        return self

    def views(self, number: int) -> Views:
        """Wait for the copies. Raises DeviceError if one has failed."""
        self.end()
        return [self._view(number, index) for index in range(len(self._arena.layout.parameters))]

    def end(self) -> None:
        if not self._is_done:
            self._is_done = True
            self.device.synchronize_event(self.copied)

    def _view(self, number: int, index: int) -> npt.NDArray[np.float32]:
        layout, parameter = self._arena.layout, self._arena.layout.parameters[index]
        return self._floats[layout.buffer_floats * number + parameter.offset :][: parameter.length]


class DeviceStore(Store):
    """A store with its shards on devices. Call `use` with this process's device before `attach`."""

    device: CudaDevice
    devices: DeviceArena | None = None
    waits_for_work = True  # when it closes, but after a failure: it may wait for a process that waits for this one
    _first: FirstVersion | None = None
    _snapshots: Snapshots | None = None
    _served: Sequence[CudaDevice] = ()

    def use(self, device: CudaDevice) -> Self:
        """Set this process's device; returns the store. A forked child sets its own device."""
        self.device = device
        return self

    def own_memory(self, devices: Sequence[CudaDevice], first: FirstVersion) -> list[DeviceArena]:
        """Allocate all memory in this process, the server, and write the first version. Returns the arenas of the devices.

        `devices`: one for each of the job's GPUs, in the layout's order. Call it before the server serves, because it writes
        the handle tables without the shard locks.
        """
        self._served, lane = list(devices), self.arena.server_lane
        for device in devices:
            users_rule.prepare(device, self.layout, self.hypers)
        arenas = {lane + number: DeviceArena(self, lane + number, device) for number, device in enumerate(devices)}
        for arena in arenas.values():
            arena.set_siblings(arenas)
            arena.publish_handles()
        for arena in arenas.values():
            arena.fill(first)
        return list(arenas.values())

    def attach(self, rank: int | None = None) -> Worker:
        """Wait until all workers whose devices hold shards have attached. Raises UnsupportedError."""
        policy, faults = self.layout.policy, self.layout.faults
        if faults.continues and not self.layout.has_server:
            raise UnsupportedError(
                "a job whose shards lie on devices goes on without a lost worker only if a server owns the memory: expected"
                " server='process', on_worker_loss='stop', or FASTPS_PLACEMENT=host"
            )
        if faults.max_workers > self.layout.workers:
            raise UnsupportedError(
                "workers that join late are not handled where shards lie on devices: expected no max_workers, or"
                " FASTPS_PLACEMENT=host"
            )
        if policy.overlap or policy.warm_up:
            what = "fetches weights in the background" if policy.overlap else "moves to another arena"
            raise UnsupportedError(
                f"{policy.spec} {what}, which shards on devices do not: use another discipline, or FASTPS_PLACEMENT=host"
            )
        users_rule.prepare(self.device, self.layout, self.hypers)
        return super().attach(rank)

    def _combining(self, worker: AttachedLane) -> Combining:
        return DeviceOwner(worker, self)

    def _write_beginning(self, write_weights: Callable[[Views], None], resume: StartState | None) -> None:
        """Write the first version into host memory, until the memory on devices exists."""
        self._first = FirstVersion(self.layout, is_resumed=resume is not None)
        super()._write_beginning(write_weights, resume)

    def _device_plan(self, make: Callable[[], list[Any]]) -> DevicePlan:
        assert self._first is not None
        return DevicePlan(make, self._first.descriptor, self._first.is_resumed)

    def _answer_joiners(self, server_devices: Callable[[], list[Any]] | None, server_plan: ServerPlan | None) -> None:
        """A server has the first version by then."""
        super()._answer_joiners(server_devices, server_plan)
        if self.layout.has_server:
            self.take_first().close()

    def take_first(self) -> FirstVersion:
        """Return the first version, and forget it. Raises UsageError in a process that did not create the store."""
        if self._first is None:
            raise UsageError(f"expected worker 0 in the process that created job {self.job}, found it in {os.getpid()}")
        first, self._first = self._first, None
        return first

    def arena_on_devices(self) -> DeviceArena:
        """This process's side of the arena on devices. Raises UsageError before a worker has attached."""
        if self.devices is None:
            raise UsageError("attach a worker first: the memory is on devices")
        return self.devices

    def weight_views(self, buffers: int | Sequence[int]) -> Views:
        """Arrays of the device's type; before the memory on devices exists, of the first version in host memory."""
        if self._first is not None and self.devices is None:
            return self._first.weights
        arena = self.arena_on_devices()
        return [arena.view(arena.weights_address(buffer, index), index) for index, buffer in self._buffers_of(buffers)]

    def pulled_views(self, buffers: int | Sequence[int]) -> Views:
        """Arrays on this process's own device: of the home's weights, or of the replica that a pull has copied.

        A parameter in half precision is shown in that, as bits (uint16); only its home has the master weights. `buffers` are
        numbers of `DeviceArena.shown_numbers`.
        """
        arena = self.arena_on_devices()
        return [
            arena.view(arena.shown_address(buffer, index), index, "uint16" if arena.shows_half(index) else "float32")
            for index, buffer in self._buffers_of(buffers)
        ]

    def half_views(self, buffers: int | Sequence[int]) -> list[Any]:
        """Arrays of the device's type, as in `pulled_views`; of float32 parameters their floats."""
        return self.pulled_views(buffers)

    def write_halves(self, buffers: int | Sequence[int]) -> None:
        """Does nothing before a worker has attached: the first weights bring their halves."""
        if self.devices is not None:
            self.devices.write_halves([buffers] * len(self.layout.shards) if isinstance(buffers, int) else buffers)

    def gradient_views(self, lane: int, slot: int) -> list[Any]:
        """Arrays of the device's type, uint16 for either 16-bit type."""
        arena, dtype = self.arena_on_devices(), "float32" if self.layout.gradient_type == "float32" else "uint16"
        count = len(self.layout.parameters)
        return [arena.view(arena.gradient_address(lane, slot, index), index, dtype) for index in range(count)]

    def plane_views(self, buffers: int | Sequence[int], plane: int) -> Views:
        """Arrays as of `weight_views`. Read them while this process's worker holds the shard locks."""
        if self._first is not None and self.devices is None:
            return self._first.planes[plane]
        arena = self.arena_on_devices()
        return [arena.view(arena.plane_address(buffer, plane, index), index) for index, buffer in self._buffers_of(buffers)]

    def copy_version(self, weights: Sequence[int], state: Sequence[int]) -> VersionCopy:
        """Queue copies to page-locked host memory on a stream of their own."""
        if self._snapshots is None:
            self._snapshots = Snapshots(self.arena_on_devices(), self.device)
        return self._snapshots.begin(weights, state)

    def _buffers_of(self, buffers: int | Sequence[int]) -> list[tuple[int, int]]:
        parameters = enumerate(self.layout.parameters)
        return [(index, buffers if isinstance(buffers, int) else buffers[each.shard]) for index, each in parameters]

    def close(self) -> None:
        super().close()
        if self._first is not None:
            self._first.close()
        served, self._served = self._served, ()
        for device in served:
            device.shut(waits=self.waits_for_work)
        if self.devices is not None:
            self.devices = self._snapshots = None
            self.device.shut(waits=self.waits_for_work)
