"""A job whose shards are on devices: its store and its worker, with memory that other processes map by handles.

All decisions are made as on the CPU, by the same words in the same arena. Three things differ: floats are on devices, a fold is
queued instead of executed, and streams wait for events where the CPU relies on memory order. Every worker of such a job must
reach the devices; other jobs keep the arena in host memory (placement in docs/how-to/gpu.md).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastps.device import users_rule
from fastps.device.arena import PRESENT, DeviceArena
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError, DeviceFailedError, DeviceLostError, DeviceMemoryError
from fastps.device.memory import FirstVersion
from fastps.errors import ProtocolError, UnsupportedError, UsageError, WorkerDiedError
from fastps.job.update_rules import Hyper
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.membership.job_memory import VersionCopy, Views, by_name
from fastps.membership.peers import Peers
from fastps.membership.rendezvous import Listener
from fastps.store.server_process import AgentPlan, DevicePlan
from fastps.store.store import StartState, Store
from fastps.store.worker import Worker
from fastps.system.deadline import Deadline


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


_PAUSE_NS = 2_000_000
_SLICE_NS = 50_000  # between two looks at whether a worker's own work is done; the device may be idle that long
_CAUSE_NS = 1_000_000_000  # a process whose device fails says so well before


class DeviceWorker(Worker):
    """A worker of a DeviceStore. Its gradients and weights are the device's arrays."""

    store: "DeviceStore"

    def __init__(self, store: "DeviceStore", rank: int, listener: Listener, generation: int = 0) -> None:
        self._devices: DeviceArena | None = None  # None until setup is complete; no folds and no waits for streams before
        super().__init__(store, rank, listener, generation)
        try:
            with self._deaths_first():
                arena = DeviceArena(store, rank, store.device)
                store.devices = arena
                self._begin(arena)
        except BaseException as error:
            store.waits_for_work = False
            super().close(f"{type(error).__name__}: {error}")
            raise
        self._devices = arena

    def _begin(self, arena: DeviceArena) -> None:
        self.lane.fold_with(arena.fold, ())  # fold no shard until the memory exists
        with self.locked():
            arena.publish_handles(is_first=self.generation == 0)
        self._await_devices(arena, arena.is_shown)
        with self.locked():
            arena.open()
        if self.rank == 0 and self.generation == 0 and not self.store.layout.has_server:
            first = self.store.take_first()
            with self.locked():
                arena.fill(first)
            first.close()
        self._await_devices(arena, arena.is_filled)
        arena.show_pulled(self.buffers)
        own = arena.own_shards()
        self._needs_others = len(own) < len(self.buffers) and not self.store.layout.has_server
        self.lane.fold_with(arena.fold, own)

    def _await_devices(self, arena: DeviceArena, is_reached: Callable[[], bool]) -> None:
        """Wait until others have come as far in their setup as `is_reached` says."""
        text = (
            f"worker {self.rank} waited {self._timeout_ns / 1e9:g} s for the devices of workers"
            f" {sorted(set(arena.owner_lanes))} and the first weights: start all workers, or raise FASTPS_TIMEOUT"
        )
        self.wait_until(self.locked()(is_reached), _PAUSE_NS, lambda: text)

    def lock_shards(self) -> None:
        """Order what is queued from now on after all folds of what is published."""
        super().lock_shards()
        try:
            if self._devices is not None:
                self._devices.await_folds()
        except BaseException:
            self._release(range(self._shards), False)
            raise

    def unlock_shards(self, publish: bool) -> None:
        """Wait for writes made under the locks, and for reads where folds do not wait for those."""
        try:
            if publish and self._devices is not None:
                self._devices.synchronize_all()
            elif self._devices is not None:
                self._finish(self._devices, combines=False)
        except BaseException:
            super().unlock_shards(False)
            raise
        super().unlock_shards(publish)

    @property
    def devices(self) -> DeviceArena:
        if self._devices is None:
            raise UsageError(f"worker {self.rank} is closed, or has not begun")
        return self._devices

    def push(self, hypers: Sequence[Hyper], *, null: bool = False, **others: Any) -> None:
        """Push the gradients that work queued on the compute stream up to now will have written.

        Where folds and grants go by what has arrived, waits until that work is done, and the push has the time after the wait.
        """
        slot = None if null else self.slot
        with self._deaths_first():
            self._finish(self.devices, slot)
            self.devices.mark_pushed(slot)
            super().push(hypers, null=null, **others)
        if self._needs_others:
            self.lane.wake_all()  # the lanes that fold the other shards may be asleep

    def advance(self) -> None:
        """Raises the device's error, or who died, if a fold that it makes meanwhile could not be queued."""
        with self._deaths_first():
            super().advance()

    def leave(self) -> None:
        """No push follows, whose record would say that the weights were read."""
        if self._devices is not None and not self._left:
            self._devices.mark_left()
        super().leave()

    def pull(self) -> list[int]:
        """Work queued from now on reads the new weights; work queued before does not."""
        if self._devices is None:
            return super().pull()
        with self._deaths_first():
            self._finish(self._devices)
            if self._left:
                self._devices.mark_left()
            buffers = super().pull()
            self._devices.show_pulled(buffers)
        return buffers

    def _finish(self, arena: DeviceArena, slot: int | None = None, *, combines: bool = True) -> None:
        """Wait until this worker's own work is done, where its discipline needs that, and fold what others push meanwhile."""

        arena.begin_finish(slot)
        self.wait_until(
            arena.is_finished,
            _SLICE_NS,
            lambda: f"worker {self.rank} waited {self._timeout_ns / 1e9:g} s for its own device; raise FASTPS_TIMEOUT",
            combines=self._needs_others and combines,  # they need this worker, too: no other lane folds its device's shards
        )

    def try_combine(self) -> None:
        """Raises the device's error if a fold could not be queued."""
        with self._deaths_first():
            super().try_combine()

    @contextlib.contextmanager
    def _deaths_first(self) -> Iterator[None]:
        """Raise WorkerDiedError instead of a DeviceError that a process's end explains, and why a fold failed."""
        try:
            yield
        except DeviceError as error:
            raise self._explained(error) from error
        except ProtocolError:
            failure = self.lane.fold_failure
            if failure is None:
                raise
            raise (self._explained(failure) if isinstance(failure, DeviceError) else failure) from None

    def _explained(self, error: DeviceError) -> DeviceError:
        """The error with this worker's name. Raises WorkerDiedError if a process's end explains it.

        What another process has failed to do may be known before its end is.
        """
        deadline = Deadline(self._clock.now_ns(), _CAUSE_NS if isinstance(error, DeviceLostError) else 0)
        while not isinstance(error, DeviceFailedError | DeviceMemoryError):
            self.check_peers()
            if deadline.is_over(self._clock.now_ns()):
                break
            self._clock.sleep_ns(_PAUSE_NS)
        return type(error)(f"worker {self.rank}: {error}")

    @property
    def weights(self) -> Mapping[str, Any]:
        """The pulled weights by name, as arrays of the device's type. They must not be written to."""
        return by_name(self.store.layout.parameters, self.store.pulled_views(self.devices.shown_numbers(self.buffers)))

    def close(self, failure: str | None = None, *, stays: bool = False) -> None:
        """Wait until the others have left, because they read this worker's memory; not after a failure."""
        arena = self._devices
        if failure is not None or arena is None or self.closed or self.forked:
            self._devices = None
            if failure is not None and not self.closed:
                self.store.waits_for_work = False
            super().close(failure, stays=stays)
            return
        try:
            self.wait_for_others()
            arena.synchronize_all()
        except Exception as error:
            self.store.waits_for_work = False
            super().close(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._devices = None
        arena.unmap()
        super().close()
        if not arena.own:
            return
        # Wait until no other lane maps this lane's memory, or one of them has died.
        with contextlib.closing(Peers(self.store.arena, self.store.descriptor, self.store.job, self.rank)) as peers:
            while any(state in PRESENT for state in self.store.arena.lane_states()) and peers.dead() is None:
                self._clock.sleep_ns(_PAUSE_NS)

    def _make_lane(self) -> WorkerLane:
        lane = super()._make_lane()
        if self.store.layout.has_server and not lane.served:
            raise self._without_server()
        return lane

    def take_over(self) -> None:
        """Raise WorkerDiedError: the memory is gone with the server, which owned it."""
        self.check_peers()  # raises a more specific error if the server has died
        raise self._without_server()

    def _without_server(self) -> WorkerDiedError:
        return WorkerDiedError(
            f"worker {self.rank}: expected the job's server, which owns the memory on devices, found that it has ended: restart"
            " the job (with FASTPS_PLACEMENT=host it can resume from its last checkpoint)",
            self.store.arena.server_lane,
        )


class DeviceStore(Store):
    """A store with its shards on devices. Call `use` with this process's device before `attach`."""

    worker_class = DeviceWorker
    device: CudaDevice
    devices: DeviceArena | None = None
    waits_for_work = True  # when it closes, but after a failure: it may wait for a process that waits for this one
    _first: FirstVersion | None = None
    _snapshots: Snapshots | None = None
    _served: Sequence[CudaDevice] = ()
    _arenas: Sequence[DeviceArena] = ()

    def use(self, device: CudaDevice) -> Self:
        """Set this process's device; returns the store. A forked child sets its own device."""
        self.device = device
        return self

    def own_memory(self, lane: Lane, devices: Sequence[CudaDevice], first: FirstVersion) -> None:
        """Allocate all memory in this process, the server on `lane`, write the first version, and fold all shards here.

        `devices`: one for each of the job's GPUs, in the layout's order. Call it before the server serves, because it writes
        the handle tables without the shard locks.
        """
        self._served = list(devices)
        for device in devices:
            users_rule.prepare(device, self.layout, self.hypers)
        arenas = {lane.index + number: DeviceArena(self, lane.index + number, device) for number, device in enumerate(devices)}
        for arena in arenas.values():
            arena.set_siblings(arenas)
            arena.publish_handles()
        for arena in arenas.values():
            arena.fill(first)
        self._arenas = list(arenas.values())
        by_shard = {shard: arena for arena in arenas.values() for shard in arena.own_shards()}
        lane.fold_with(lambda call: by_shard[call.shard].fold(call), by_shard)

    def check_devices(self) -> None:
        """Folds run behind the host, which would else find a failure only with the next fold."""
        for arena in self._arenas:
            arena.check()

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

    def _write_beginning(self, write_weights: Callable[[Views], None], resume: StartState | None) -> None:
        """Write the first version into host memory, until the memory on devices exists."""
        self._first = FirstVersion(self.layout, is_resumed=resume is not None)
        super()._write_beginning(write_weights, resume)

    def _device_plan(self, make: Callable[[], list[Any]]) -> DevicePlan:
        assert self._first is not None
        return DevicePlan(make, self._first.descriptor, self._first.is_resumed)

    def _answer_joiners(self, server_devices: Callable[[], list[Any]] | None, agent: AgentPlan | None) -> None:
        """A server has the first version by then."""
        super()._answer_joiners(server_devices, agent)
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
        served, self._served, self._arenas = self._served, (), ()
        for device in served:
            device.shut(waits=self.waits_for_work)
        if self.devices is not None:
            self.devices = self._snapshots = None
            self.device.shut(waits=self.waits_for_work)
