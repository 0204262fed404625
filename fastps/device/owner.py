"""The part of a worker that folds where shards are on devices: its worker folds those of its device, or a server folds all.

A worker's own work is queued. Before a push and a pull it waits for that work where its discipline goes by what has arrived;
elsewhere streams wait for events. A fold is queued, too, so an error of a device may show in any later call.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fastps.device.arena import PRESENT, DeviceArena
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError, DeviceFailedError, DeviceLostError, DeviceMemoryError
from fastps.device.memory import FirstVersion
from fastps.errors import WorkerDiedError
from fastps.membership.job_memory import Views, by_name
from fastps.membership.peers import Peers
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining
from fastps.system.deadline import Deadline

_PAUSE_NS = 2_000_000
_SLICE_NS = 50_000  # between two looks at whether a worker's own work is done; the device may be idle that long
_CAUSE_NS = 1_000_000_000  # a process whose device fails says so well before


class Home(Protocol):
    """The store of a job on devices, in this worker's process.

    Attributes:
        device: this process's device.
        devices: this process's side of the arena on devices, once its worker has made it.
        waits_for_work: whether `close` waits for queued work; not after a failure, because it may never be done.
    """

    device: CudaDevice
    devices: DeviceArena | None
    waits_for_work: bool

    def take_first(self) -> FirstVersion:
        """Return the first version, and forget it."""

    def pulled_views(self, buffers: Sequence[int]) -> Views:
        """Arrays on this process's own device."""


class DeviceOwner(Combining):
    """The devices' owners fold. The worker's gradients and weights are arrays of its own device."""

    is_direct = False

    def __init__(self, worker: AttachedLane, home: Home) -> None:
        super().__init__(worker)
        self._home, self._store = home, worker.store
        self._arena: DeviceArena | None = None  # None until setup is complete; no folds and no waits for streams before
        self._needs_others = False
        self._is_mapped = False  # whether other lanes map this lane's memory
        if self._store.layout.has_server and not worker.lane.served:
            raise self._without_server()

    def begin(self) -> None:
        """Allocate this worker's part of the memory, and map the others'."""
        with self._deaths_first():
            arena = DeviceArena(self._store, self._worker.rank, self._home.device)
            self._home.devices = arena
            self._set_up(arena)
        self._arena = arena

    def _set_up(self, arena: DeviceArena) -> None:
        worker, lane, layout = self._worker, self._lane, self._store.layout
        is_first = worker.generation == 0
        lane.fold_with(arena.fold, ())  # fold no shard until the memory exists
        with worker.locked():
            arena.publish_handles(is_first=is_first)
        self._await_devices(arena, arena.is_shown)
        with worker.locked():
            arena.open()
        if worker.rank == 0 and is_first and not layout.has_server:
            first = self._home.take_first()
            with worker.locked():
                arena.fill(first)
            first.close()
        self._await_devices(arena, arena.is_filled)
        arena.show_pulled(worker.buffers)
        own = arena.own_shards()
        self._needs_others = len(own) < self._shards and not layout.has_server
        lane.fold_with(arena.fold, own)

    def _await_devices(self, arena: DeviceArena, is_reached: Callable[[], bool]) -> None:
        """Wait until others have come as far in their setup as `is_reached` says."""
        worker = self._worker
        text = (
            f"worker {worker.rank} waited {self._store.timeout_s:g} s for the devices of workers"
            f" {sorted(set(arena.owner_lanes))} and the first weights: start all workers, or raise FASTPS_TIMEOUT"
        )
        worker.wait_until(worker.locked()(is_reached), _PAUSE_NS, lambda: text)

    def after_lock(self) -> None:
        """Order what is queued from now on after all folds of what is published."""
        if self._arena is not None:
            self._arena.await_folds()

    def before_release(self, publish: bool) -> None:
        """Wait for writes made under the locks, and for reads where folds do not wait for those."""
        if self._arena is not None and publish:
            self._arena.synchronize_all()
        elif self._arena is not None:
            self._finish(self._arena, combines=False)

    def before_push(self, slot: int | None) -> None:
        """The push has the gradients that work queued up to now will have written; it counts from when that is done."""
        assert self._arena is not None
        with self._deaths_first():
            self._finish(self._arena, slot)
            self._arena.mark_pushed(slot)

    def after_push(self) -> None:
        """Wake the lanes that fold shards of other devices."""
        if self._needs_others:
            self._lane.wake_all()

    def pull(self, buffers: list[int]) -> None:
        """Work queued from now on reads the new weights; work queued before does not."""
        arena = self._arena
        if arena is None:
            return super().pull(buffers)
        with self._deaths_first():
            self._finish(arena)
            if self._worker.has_left:
                arena.mark_left()
            super().pull(buffers)
            arena.show_pulled(buffers)

    def _finish(self, arena: DeviceArena, slot: int | None = None, *, combines: bool = True) -> None:
        """Wait until this worker's own work is done, where its discipline needs that, and fold what others push meanwhile."""
        arena.begin_finish(slot)
        text = f"worker {self._worker.rank} waited {self._store.timeout_s:g} s for its own device; raise FASTPS_TIMEOUT"
        # They need this worker, too: no other lane folds its device's shards.
        self._worker.wait_until(arena.is_finished, _SLICE_NS, lambda: text, combines=self._needs_others and combines)

    def weights(self) -> Mapping[str, Any]:
        """Arrays of the device's type. They must not be written to."""
        assert self._arena is not None
        numbers = self._arena.shown_numbers(self._worker.buffers)
        return by_name(self._store.layout.parameters, self._home.pulled_views(numbers))

    def leave(self) -> None:
        """No push follows, whose record would say that the weights were read."""
        if self._arena is not None:
            self._arena.mark_left()
        super().leave()

    @property
    def closes_last(self) -> bool:
        """The others read this worker's memory."""
        return self._arena is not None

    def before_close(self, failure: str | None) -> None:
        """Unmap the others' memory, once all queued work is done; not after a failure."""
        arena, self._arena = self._arena, None
        if failure is None and arena is not None:
            arena.synchronize_all()
            self._is_mapped = bool(arena.own)
            arena.unmap()

    def after_close(self, failure: str | None) -> None:
        """Wait until no other lane maps this lane's memory, or one of them has died."""
        self._arena = None
        if failure is not None:
            self._home.waits_for_work = False
        if failure is not None or not self._is_mapped:
            return
        store = self._store
        with contextlib.closing(Peers(store.arena, store.descriptor, store.job, self._worker.rank)) as peers:
            while any(state in PRESENT for state in store.arena.lane_states()) and peers.dead() is None:
                self._clock.sleep_ns(_PAUSE_NS)

    def on_server_end(self) -> None:
        """Raise WorkerDiedError: the memory is gone with the server, which owned it."""
        self._worker.check_peers()  # raises a more specific error if the server has died
        raise self._without_server()

    def _without_server(self) -> WorkerDiedError:
        return WorkerDiedError(
            f"worker {self._worker.rank}: expected the job's server, which owns the memory on devices, found that it has ended:"
            " restart the job (with FASTPS_PLACEMENT=host it can resume from its last checkpoint)",
            self._store.arena.server_lane,
        )

    def explain_failure(self) -> bool:
        """Raise the error of a fold that could not be queued, or of a process that died."""
        failure = self._lane.fold_failure
        if failure is not None:
            raise self._explained(failure) if isinstance(failure, DeviceError) else failure
        return False

    @contextlib.contextmanager
    def _deaths_first(self) -> Iterator[None]:
        """Raise WorkerDiedError instead of a DeviceError that a process's end explains."""
        try:
            yield
        except DeviceError as error:
            raise self._explained(error) from error

    def _explained(self, error: DeviceError) -> DeviceError:
        """The error with this worker's name. Raises WorkerDiedError if a process's end explains it.

        What another process has failed to do may be known before its end is.
        """
        deadline = Deadline(self._clock.now_ns(), _CAUSE_NS if isinstance(error, DeviceLostError) else 0)
        while not isinstance(error, DeviceFailedError | DeviceMemoryError):
            self._worker.check_peers()
            if deadline.is_over(self._clock.now_ns()):
                break
            self._clock.sleep_ns(_PAUSE_NS)
        return type(error)(f"worker {self._worker.rank}: {error}")
