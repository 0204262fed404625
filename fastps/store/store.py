"""The store: a job's arena in one process, and the entry point for its workers.

The store is embedded: there is no server process unless the job asks for one. The process that creates a store writes the first
weights. Any process of the same user then attaches as a worker, by inheritance (fork) or by the job's name. A store does
not fold by itself: waiting workers combine, or the server does.
"""

import contextlib
import errno
import math
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from fastps.errors import ArenaError, AttachError, UnsupportedError, UsageError
from fastps.job import environment, limits
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GradientType, Layout, place
from fastps.job.options import value_of
from fastps.job.plan import plan, remedy
from fastps.job.policy import Policy
from fastps.job.precision import check_double
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Hyper, Update, folded, write_initial_state
from fastps.kernels.shm import arena
from fastps.kernels.shm.format import format_memory
from fastps.membership import discovery, rendezvous
from fastps.membership.job_memory import JobMemory, Views
from fastps.membership.peers import WORKER_LOST
from fastps.store import virtual_time
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import AgentCombining, Combining
from fastps.store.row_slots import check_tables
from fastps.store.server_process import DevicePlan, ServerPlan, ServerProcess
from fastps.store.worker import Worker
from fastps.system import numa, shared_memory
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.descriptors import reserve


class StartState(Protocol):
    """A state from which a new store can resume. `fastps.Checkpoint` implements it."""

    @property
    def has_average(self) -> bool:
        """Whether the state has the moving average of the weights."""

    def check_layout(self, layout: Layout) -> None:
        """Raise CheckpointError if the state belongs to another model or rule."""

    def beginning(self, layout: Layout) -> dict[str, Any]:
        """The versions of the shards, the clocks of the workers, and the samples drawn, as keyword arguments."""

    def write_into(self, store: JobMemory) -> None:
        """Write weights and optimizer state into the first buffers of a store that no worker has joined yet."""


class StartAt:
    """A store's beginning with another version than 0. `write` fills its first buffers."""

    has_average = False

    def __init__(self, version: int, write: Callable[[Any], None]) -> None:
        self._version, self._write = version, write

    def check_layout(self, layout: Layout) -> None:
        """Accept any."""

    def beginning(self, layout: Layout) -> dict[str, Any]:
        """The version of each shard."""
        return {"versions": [self._version] * len(layout.shards)}

    def write_into(self, store: JobMemory) -> None:
        """Write the first version."""
        self._write(store)


_DESCRIPTORS = 24  # of a worker, beside a pidfd of each other one
_GONE = (arena.LANE_LEFT, *WORKER_LOST)
_DYING_S = 2.0  # the longest time that a killed process takes to exit


class Store(JobMemory):
    """The shared weights, optimizer state and lanes of one job.

    Create one with `Store.create` or `Store.connect`; `attach(rank)` then returns the worker.

    >>> import numpy as np
    >>> from fastps import SGD
    >>> with Store.create({"w": np.ones(3, np.float32)}, SGD(lr=0.5), workers=1) as store, store.attach(0) as worker:
    ...     worker.gradients["w"][:] = 1.0
    ...     worker.step()
    ...     worker.weights["w"].tolist()
    [0.5, 0.5, 0.5]
    """

    server: ServerProcess | None = None
    combining: Callable[[AttachedLane], Combining] | None = None  # the part of a worker that folds; None: by the layout

    def close(self) -> None:
        """Close the listeners, release the memory, and let the server end if this process started one."""
        is_open = self._process_id == os.getpid() and self._descriptor >= 0
        super().close()
        if is_open and self.server is not None:
            self.server.let_go(self.arena.lane_states())

    @classmethod
    def create(
        cls,
        weights: Mapping[str, npt.ArrayLike],
        update: Update,
        *,
        sync: str | Policy = "bsp",
        workers: int = 1,
        tables: Collection[str] = (),
        on_worker_loss: str | None = None,
        nonfinite: str | None = None,
        max_workers: int | None = None,
        max_readers: int | None = None,
        server: str | None = None,
        resume: StartState | None = None,
        gradient_type: GradientType | None = None,
        job: str | None = None,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Self:
        """Create a job's arena and write version 0 into it: `weights` (name to array), or the state of `resume`.

        The arrays are float32, or all float64; then gradients and the optimizer's state are float64, too.

        For `on_worker_loss`, `nonfinite` and `max_workers` see FaultPolicy. `server` selects the processes that combine: the
        waiting "workers" (the default, unless FASTPS_SERVER is set), or a server "process", which this call starts.
        `max_readers`: the most processes at a time that `fastps.reader` lets read; default: FASTPS_MAX_READERS, else 8.
        `tables` names matrices of which a push carries rows (`Worker.put_rows`): they lie in memory once and change in place.

        With `gradient_type` "float16" workers push half as many bytes; gradients are summed in single precision.
        Raises PolicyError; UnsupportedError for another dtype, or a gradient type that NumPy lacks or float64 excludes;
        ArenaError if there is too little memory; LayoutError for a number of workers out of range; CheckpointError; UsageError
        for no weights or an unknown option; AttachError if the job's name is taken or the server process does not start.
        """
        arrays = {name: np.asarray(value) for name, value in weights.items()}
        types = [_type_of(name, array) for name, array in arrays.items()]
        gradient_type = gradient_type or ("float64" if "float64" in types else "float32")
        if gradient_type not in ("float32", "float16") and "float64" not in types:
            raise UnsupportedError(
                f"gradient_type: expected 'float32' or 'float16' (NumPy has no other half), found {gradient_type!r}"
            )
        policy = parse_policy(sync)
        if policy.warm_up:
            raise UsageError(
                f"sync {policy.spec!r} is for fastps.DistributedOptimizer, which can move a model: choose a discipline"
            )
        rows = [(name, array.shape, _contiguous(array.shape), 0) for name, array in arrays.items()]
        numbers = check_tables(arrays, tables, update.rule, policy, update.hyper)
        faults = FaultPolicy.of(on_worker_loss, nonfinite, max_workers)
        placed = place(rows, policy.shards, numbers, types)
        server = value_of("FASTPS_SERVER", server)
        rule = folded(update.rule, policy)
        layout = Layout(placed, 1, rule, policy, workers, faults=faults, gradient_type=gradient_type, server=server)
        layout = replace(layout, max_readers=value_of("FASTPS_MAX_READERS", max_readers))
        check_double(layout)

        def write(views: Views) -> None:
            for view, array in zip(views, arrays.values(), strict=True):
                view[:] = array.reshape(-1)

        return cls.create_for(layout, write, [update.hyper], resume=resume, job=job, timeout_s=timeout_s, clock=clock)

    @classmethod
    def create_for(
        cls,
        layout: Layout,
        write_weights: Callable[[Views], None],
        hypers: list[Hyper],
        *,
        resume: StartState | None = None,
        job: str | None = None,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
        finish: "Callable[[Store], None] | None" = None,
        server_devices: Callable[[], list[Any]] | None = None,
        server_plan: ServerPlan | None = None,
    ) -> Self:
        """Create the arena of a layout. `write_weights` receives one flat view per parameter and writes version 0 into it.

        With `resume` the weights, the optimizer state, the version and the clocks come from the checkpoint. `finish` may write
        more before any process can join. `server_devices` makes the devices of a server that owns device memory; it must
        pickle. `server_plan`: what the server is told besides.
        """
        values = layout.policy.values(layout.workers)
        if resume is not None:
            resume.check_layout(layout)
        header, size, ranges = plan(layout)
        reserve(layout.lanes + _DESCRIPTORS, f"a worker of {layout.lanes}")
        floats = sum(parameter.size for parameter in layout.parameters)
        store: Self | None = None
        what = f"{floats:,} parameters and {layout.lanes} {layout.lanes_are}"
        descriptor = shared_memory.create(size, what, ranges, lambda free: remedy(layout, free))
        try:
            memory = shared_memory.map_shared(descriptor)
            format_memory(
                memory,
                header,
                layout.segments,
                shards=layout.host_shards,
                started=layout.workers,
                **(resume.beginning(layout) if resume is not None else {}),
                **values,
            )
            name = job or secrets.token_hex(8)
            store = cls(descriptor, memory, layout, name, limits.timeout_s(timeout_s), clock, list(hypers))
            store._write_beginning(write_weights, resume)
            if finish is not None:
                finish(store)
            store._answer_joiners(server_devices, server_plan)
        except BaseException as error:
            if store is not None:
                store.close()
            else:
                os.close(descriptor)
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise AttachError(
                    f"job {job}: expected a new name, found that a job of this name is running; choose another"
                ) from None
            raise
        return store

    def _write_beginning(self, write_weights: Callable[[Views], None], resume: StartState | None) -> None:
        if resume is None:
            self.write_first(write_weights)
        else:
            resume.write_into(self)
            if self.layout.policy.ema and not resume.has_average:
                self._begin_average()
        self.write_halves(0)

    def write_first(self, write_weights: Callable[[Views], None]) -> None:
        """Write version 0: the weights, the initial optimizer state, and the average."""
        write_weights(self.weight_views(0))
        write_initial_state(self.layout.rule, lambda plane: self.plane_views(0, plane))
        if self.layout.policy.ema:
            self._begin_average()

    def _begin_average(self) -> None:
        for average, weights in zip(self.plane_views(0, self.layout.planes - 1), self.weight_views(0), strict=True):
            average[:] = weights[: len(average)]

    def _device_plan(self, make: Callable[[], list[Any]]) -> DevicePlan:
        """The plan of the devices of a server that owns device memory. Raises UsageError: a store in host memory has none."""
        raise UsageError("expected shards on devices for a server that has devices, found them in host memory")

    def _answer_joiners(self, server_devices: Callable[[], list[Any]] | None, server_plan: ServerPlan | None) -> None:
        """Start the server, if the job has one, and then the listener: a worker must not attach before the server serves."""
        if environment.is_virtual():
            virtual_time.offer(self, on_devices=server_devices is not None, more=server_plan and server_plan.order)
        elif self.layout.has_server:
            rendezvous.check_free(self.job, "host")  # a running job of this name also has the server's name, so fail first
            devices = self._device_plan(server_devices) if server_devices is not None else None
            self.server = ServerProcess(self, devices, server_plan)
        self.answer_at("host")
        if self.server is not None:
            self.server.begin()

    @classmethod
    def connect(
        cls, job: str, layout: Layout, hypers: list[Hyper], *, timeout_s: float | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> Self:
        """Find the arena of `job`: connect to its creator and its workers until one answers or the timeout has passed.

        Raises LayoutError that names the first difference if this process describes another model, AttachError if no process
        answers, and ArenaError if the arena cannot be mapped.
        """
        limit_s = limits.timeout_s(timeout_s)
        reserve(layout.lanes + _DESCRIPTORS, f"a worker of {layout.lanes}")
        answer = discovery.find(job, layout, limit_s, clock)
        os.close(answer.pidfd)
        try:
            memory = shared_memory.map_shared(answer.memfd)
            return cls(answer.memfd, memory, layout, job, limit_s, clock, list(hypers))
        except ValueError as error:
            os.close(answer.memfd)
            raise ArenaError(f"job {job}: {error}") from error

    def with_timeout(self, timeout_s: float | None) -> Self:
        """Set the timeout of all waits and return this store; None: FASTPS_TIMEOUT or the default."""
        self.timeout_s = limits.timeout_s(timeout_s)
        return self

    def attach(self, rank: int | None = None) -> Worker:
        """Join as worker `rank`, or in any free lane.

        Each rank joins once. Under on_worker_loss="continue" a worker may also replace one that died or left. A late joiner
        begins at the slowest worker's clock with the current version. Raises AttachError, TimeoutExceededError.
        """
        if rank is None:
            return self._attach_anywhere()
        lanes = self.layout.lanes
        if not 0 <= rank < lanes:
            raise AttachError(
                f"worker {rank} cannot attach: the arena was made for {lanes} workers (0 to {lanes - 1}); start fewer, or"
                " create it for more (max_workers)"
            )
        if os.getpid() != self._process_id:
            # The store was inherited by fork: this process needs its own pidfd and listeners.
            self._process_id, self._pidfd, self._listeners = os.getpid(), os.pidfd_open(os.getpid()), []
        listener = self._answer_as(rank)
        rejoins = self.layout.faults.continues
        if rejoins and self.arena.lane_state(rank) not in (arena.LANE_FREE, arena.LANE_LEFT):
            # This process has the lane's name now, so the lane's earlier owner has ended.
            self.arena.mark_dead(rank, self.arena.generation(rank))
        generation = self.arena.claim(rank, os.getpid(), rejoins)
        if generation < 0:
            self.stop_answering(listener)
            raise AttachError(f"worker {rank} is or was attached already: each rank joins once; check the ranks")
        numa.bring_slots(self.memory, *self.arena.slots_range(rank))
        try:
            return Worker(self, rank, listener, generation, self._combining)
        except BaseException:
            if self.arena.lane_state(rank) != arena.LANE_FAILED:  # else the worker has said why
                self.arena.finish(rank, "it could not join")
            self.stop_answering(listener)
            raise

    def _combining(self, worker: AttachedLane) -> Combining:
        """The part of a worker that folds what it pushes."""
        if self.combining is not None:
            return self.combining(worker)
        if environment.is_virtual():
            return virtual_time.Virtual(worker)
        return AgentCombining(worker) if self.layout.has_agent else Combining(worker)

    def _answer_as(self, rank: int) -> rendezvous.Listener:
        """Start a listener at the lane's name. If the last owner has ended or is about to, wait until the name is free."""
        began_ns = self.clock.now_ns()
        while True:
            try:
                return self.answer_at(rank)
            except OSError as error:
                limit_s = self.timeout_s if self.arena.lane_state(rank) in _GONE else min(self.timeout_s, _DYING_S)
                if not self.layout.faults.continues or self.clock.now_ns() - began_ns >= limit_s * 1e9:
                    raise AttachError(
                        f"worker {rank} cannot attach: another process answers in its place ({error}); choose another rank"
                    ) from error
            self.clock.sleep_ns(1_000_000)

    def _attach_anywhere(self) -> Worker:
        """Join in a lane beyond the initial workers' that had no worker yet, else in one whose worker died, failed or left."""
        late = range(self.layout.workers, self.layout.lanes)
        empty = [lane for lane in late if self.arena.lane_state(lane) == arena.LANE_FREE]
        if self.layout.faults.continues:
            empty += [lane for lane, state in enumerate(self.arena.lane_states()) if state in _GONE]
        for lane in empty:
            with contextlib.suppress(AttachError):  # another process was faster
                return self.attach(lane)
        raise AttachError(
            f"no worker can join: expected a free lane of {self.layout.lanes}, found none; create the job with a larger"
            " max_workers"
        )


def _type_of(name: str, array: npt.NDArray[Any]) -> GradientType:
    if array.dtype not in (np.float32, np.float64):
        raise UnsupportedError(f"parameter {name!r}: expected float32 or float64, found {array.dtype}; convert it first")
    return "float64" if array.dtype == np.float64 else "float32"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of this shape."""
    return tuple(math.prod(max(1, size) for size in shape[after:]) for after in range(1, len(shape) + 1))
