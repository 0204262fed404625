"""The store: a job's arena as one process sees it, and the way in for its workers.

Embedded: there is no server process, unless one is asked for (server_process.py). The process that creates a store writes
the first weights; any process of the same user then attaches as a worker, by inheritance (fork) or by the job's name
(rendezvous.py). Refuses to run anything by itself: the turn is run by the workers that wait (turn_taker.py,
kernels/protocol/lane.pyx), or by the server.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.checkpoint.format import Checkpoint
from fastps.device.interface import Device
from fastps.errors import ArenaError, AttachError, LayoutError, ProtocolError, UnsupportedError, UsageError
from fastps.job import limits as config
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GRADIENT_NUMBERS, GradientType, Layout, Parameter, first_difference, place
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Hyper, Update, write_initial_state
from fastps.kernels.shm import arena as words
from fastps.kernels.shm import plan as arena_plan
from fastps.kernels.shm.format import format_memory
from fastps.kernels.shm.mapping import SharedMapping
from fastps.membership import discovery, rendezvous
from fastps.store.served_worker import ServedWorker
from fastps.store.server_process import ServerProcess, chosen_server
from fastps.store.worker import Worker
from fastps.system import numa as memory_nodes
from fastps.system import shared_memory as memory_of
from fastps.system.clock import SYSTEM_CLOCK, Clock

Floats = npt.NDArray[np.float32]
Views = list[Floats]
_DYING_S = 2.0  # how long a process that was killed may take to end


class Store:
    """One job's shared weights, rule state and lanes.

    Make one with `Store.create` or `Store.connect`; then `attach(rank)` gives the worker.

    >>> import numpy as np
    >>> from fastps import SGD
    >>> with Store.create({"w": np.ones(3, np.float32)}, SGD(lr=0.5), workers=1) as store, store.attach(0) as worker:
    ...     worker.gradients["w"][:] = 1.0
    ...     worker.step()
    ...     worker.weights["w"].tolist()
    [0.5, 0.5, 0.5]
    """

    worker_class: type[Worker] = Worker  # what `attach` makes
    served_class: type[ServedWorker] = ServedWorker  # and where a server takes the turns

    def __init__(
        self,
        descriptor: int,
        memory: SharedMapping,
        layout: Layout,
        job: str,
        timeout_s: float,
        clock: Clock,
        hypers: list[Hyper],
    ) -> None:
        self.layout = layout
        self.job = job
        self.timeout_s = timeout_s
        self.clock = clock
        self.hypers = hypers
        self.memory = memory
        self.arena = words.Arena(memory)
        self._descriptor = self.descriptor = descriptor
        self._pidfd = os.pidfd_open(os.getpid())
        self._process_id = os.getpid()
        self._listeners: list[rendezvous.Listener] = []
        self.server: ServerProcess | None = None

    # -- making and finding ------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        weights: Mapping[str, npt.ArrayLike],
        update: Update,
        *,
        sync: str | Policy = "bsp",
        workers: int = 1,
        on_worker_loss: str | None = None,
        nonfinite: str | None = None,
        max_workers: int | None = None,
        server: str | None = None,
        resume: Checkpoint | None = None,
        gradient_type: GradientType = "float32",
        job: str | None = None,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> "Store":
        """Make a job's arena and write `weights` (name to float32 array) into it as version 0, or what `resume` has.

        `on_worker_loss`, `nonfinite` and `max_workers` as of FaultPolicy. `server`: who takes the turns, the "workers" that
        wait (the default, or the environment's FASTPS_SERVER) or a "process" of its own, which is started here.

        With `gradient_type` "float16" workers push half as many bytes, which are summed in single precision.
        Raises PolicyError, UnsupportedError (a dtype other than float32, or a type of gradient that NumPy lacks), ArenaError
        (too little memory) or ValueError (no weights, or a number of workers out of range), CheckpointError, UsageError for an
        option that is not one of those named, AttachError when the server process does not begin.
        """
        arrays = {name: np.asarray(value) for name, value in weights.items()}
        for name, array in arrays.items():
            if array.dtype != np.float32:
                raise UnsupportedError(f"parameter {name!r}: expected float32, found {array.dtype}; convert it first")
        if gradient_type not in ("float32", "float16"):
            raise UnsupportedError(
                f"gradient_type: expected 'float32' or 'float16' (NumPy has no other half), found {gradient_type!r}"
            )
        policy = parse_policy(sync)
        if policy.warm_up:
            raise UsageError(
                f"sync {policy.spec!r} is for fastps.DistributedOptimizer, which can move a model: choose a discipline"
            )
        rows = [(name, array.shape, _contiguous(array.shape), 0) for name, array in arrays.items()]
        faults = FaultPolicy.of(on_worker_loss, nonfinite, max_workers)
        placed = place(rows, policy.shards)
        layout = Layout(
            placed, 1, update.rule, policy, workers, faults=faults, gradient_type=gradient_type, server=chosen_server(server)
        )

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
        resume: Checkpoint | None = None,
        job: str | None = None,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
        finish: "Callable[[Store], None] | None" = None,
        server_device: Callable[[], Device] | None = None,
    ) -> "Store":
        """Make the arena of a layout; `write_weights` is given one flat view a parameter and writes version 0 into it.

        With `resume` the weights, the rule's state, the version and the clocks are the checkpoint's. `finish` may write more,
        before anybody can join. `server_device` makes the device of a server that owns the memory on it; it must be picklable.
        """
        values = layout.policy.values(layout.workers)
        if resume is not None:
            resume.check_layout(layout)
        header, size = plan(layout)
        floats = sum(parameter.length for parameter in layout.parameters)
        store: Store | None = None
        descriptor = memory_of.create(size, f"{floats:,} parameters and {layout.lanes} workers")
        try:
            memory = memory_of.map_shared(descriptor)
            format_memory(
                memory,
                header,
                [(parameter.offset, parameter.length, parameter.group) for parameter in layout.parameters],
                shards=layout.host_shards,
                started=layout.workers,
                **(resume.beginning(layout) if resume is not None else {}),
                **values,
            )
            store = cls(
                descriptor,
                memory,
                layout,
                job or secrets.token_hex(8),
                config.timeout_s(timeout_s),
                clock,
                list(hypers),
            )
            if resume is not None:
                resume.write_into(store)
                if layout.policy.ema and not resume.has_average:
                    for average, weights in zip(store.plane_views(0, layout.planes - 1), store.weight_views(0), strict=True):
                        average[:] = weights
            else:
                store.write_first(write_weights)
            if finish is not None:
                finish(store)
            if layout.has_server:
                # Where a job of this name runs, its server has the name, too. Nobody is answered yet: a worker that attached
                # now would find no server.
                rendezvous.check_free(store.job, "host")
                store.server = ServerProcess(store, server_device)
            store.answer_at("host")
            if store.server is not None:
                store.server.begin()
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

    def write_first(self, write_weights: Callable[[Views], None]) -> None:
        """Write version 0: the weights, what the rule begins with, and the average."""
        write_weights(self.weight_views(0))
        write_initial_state(self.layout.rule, lambda plane: self.plane_views(0, plane))
        if self.layout.policy.ema:
            for average, weights in zip(self.plane_views(0, self.layout.planes - 1), self.weight_views(0), strict=True):
                average[:] = weights

    @classmethod
    def connect(
        cls,
        job: str,
        layout: Layout,
        hypers: list[Hyper],
        *,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> "Store":
        """Find the arena of `job` by asking its creator and its workers, until one answers or the timeout has passed.

        Raises LayoutError naming the first difference when this process describes another model, AttachError when nobody
        answers.
        """
        limit_s = config.timeout_s(timeout_s)
        answer = find(job, layout, limit_s, clock)
        os.close(answer.pidfd)
        try:
            memory = memory_of.map_shared(answer.memfd)
            return cls(answer.memfd, memory, layout, job, limit_s, clock, list(hypers))
        except ValueError as error:
            os.close(answer.memfd)
            raise ArenaError(f"job {job}: {error}") from error

    def with_timeout(self, timeout_s: float | None) -> "Store":
        """This store with another longest wait; None: the environment's."""
        self.timeout_s = config.timeout_s(timeout_s)
        return self

    def attach(self, rank: int | None = None) -> Worker:
        """Join as worker `rank`, or in any lane that nobody has.

        Each rank joins once; under on_worker_loss="continue" also in the place of one that died or left. Who joins late begins
        at the slowest worker's clock with the current version. Raises AttachError, TimeoutExceededError.
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
            # Inherited by fork: this process answers for itself from now on.
            self._process_id, self._pidfd, self._listeners = os.getpid(), os.pidfd_open(os.getpid()), []
        listener = self._answer_as(rank)
        rejoins = self.layout.faults.continues
        if rejoins and self.arena.lane_state(rank) not in (words.LANE_FREE, words.LANE_LEFT):
            # Nobody but this process answers at the lane's name: whoever had it has ended.
            self.arena.mark_dead(rank, self.arena.generation(rank))
        generation = self.arena.claim(rank, os.getpid(), rejoins)
        if generation < 0:
            self.stop_answering(listener)
            raise AttachError(f"worker {rank} is or was attached already: each rank joins once; check the ranks")
        memory_nodes.bring_slots(self.memory, *self.arena.slots_range(rank))
        try:
            kind = self.served_class if self.layout.has_server else self.worker_class
            return kind(self, rank, listener, generation)
        except BaseException:
            self.arena.finish(rank, "it could not join")
            self.stop_answering(listener)
            raise

    def _answer_as(self, rank: int) -> rendezvous.Listener:
        """Answer at the lane's name; where its last owner has ended, or is about to, wait until it is free."""
        began_ns = self.clock.now_ns()
        while True:
            try:
                return self.answer_at(rank)
            except OSError as error:
                gone = self.arena.lane_state(rank) in (words.LANE_LEFT, words.LANE_DEAD, words.LANE_FAILED)
                patience_s = self.timeout_s if gone else min(self.timeout_s, _DYING_S)
                if not self.layout.faults.continues or self.clock.now_ns() - began_ns >= patience_s * 1e9:
                    raise AttachError(
                        f"worker {rank} cannot attach: another process answers in its place ({error}); choose another rank"
                    ) from error
            self.clock.sleep_ns(1_000_000)

    def _attach_anywhere(self) -> Worker:
        """In a lane that has none yet and is not one of the start's; else where one died or left."""
        late = [lane for lane in range(self.layout.workers, self.layout.lanes)]
        empty = [lane for lane in late if self.arena.lane_state(lane) == words.LANE_FREE]
        if self.layout.faults.continues:
            gone = (words.LANE_DEAD, words.LANE_LEFT, words.LANE_FAILED)
            empty += [lane for lane, state in enumerate(self.arena.lane_states()) if state in gone]
        for lane in empty:
            with contextlib.suppress(AttachError):  # another was faster
                return self.attach(lane)
        raise AttachError(
            f"no worker can join: expected a free lane of {self.layout.lanes}, found none; create the job with a larger"
            " max_workers"
        )

    def answer_at(self, place_of: rendezvous.Place) -> rendezvous.Listener:
        """Begin to answer at a place ("host" or a lane): joiners get the memory, peers this process's pidfd."""
        listener = rendezvous.Listener(
            rendezvous.place_name(self.job, place_of),
            memfd=self._descriptor,
            pidfd=self._pidfd,
            abi=words.ABI,
            layout_hash=self.layout.digest(),
            layout=self.layout.text().encode(),
            place=place_of if isinstance(place_of, int) else -1,
        )
        self._listeners.append(listener)
        return listener

    def stop_answering(self, listener: rendezvous.Listener) -> None:
        """End one place's answers."""
        listener.close()
        self._listeners.remove(listener)

    def foreign_layout(self) -> str | None:
        """The description that a refused joiner sent to this process, or None."""
        return next((text for listener in self._listeners if (text := listener.foreign_layout()) is not None), None)

    # -- views -------------------------------------------------------------------------------------

    def floats_at(self, byte_offset: int, parameter: Parameter) -> Floats:
        """A flat view of one parameter's floats in the buffer, slot or plane that begins at `byte_offset`."""
        return np.frombuffer(self.memory, np.float32, parameter.length, byte_offset + 4 * parameter.offset)

    def weight_views(self, buffers: int | Sequence[int]) -> Views:
        """A flat view of each parameter in a weights buffer, or in each shard's own."""
        return [
            self.floats_at(self.arena.weights_offset(_buffer_of(buffers, parameter)), parameter)
            for parameter in self.layout.parameters
        ]

    def gradient_views(self, lane: int, slot: int) -> list[npt.NDArray[Any]]:
        """A flat view of each parameter's gradient in a slot of a lane, of the layout's type; bfloat16 as its bits, uint16."""
        dtype = np.dtype({"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[self.layout.gradient_type])
        offset = self.arena.gradient_offset(lane, slot)
        return [
            np.frombuffer(self.memory, dtype, parameter.length, offset + dtype.itemsize * parameter.offset)
            for parameter in self.layout.parameters
        ]

    def plane_views(self, buffers: int | Sequence[int], plane: int) -> Views:
        """A flat view of each parameter in a plane of a state buffer, or of each shard's own. Only for who holds the turns."""
        return [
            self.floats_at(self.arena.plane_offset(_buffer_of(buffers, parameter), plane), parameter)
            for parameter in self.layout.parameters
        ]

    def rule_steps(self, buffers: int | Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """How often the rule was applied to each parameter: int64[1] each. Only for who holds the turns."""
        return [
            np.frombuffer(self.memory, np.int64, 1, self.arena.steps_offset(_buffer_of(buffers, parameter)) + 8 * index)
            for index, parameter in enumerate(self.layout.parameters)
        ]

    def committed(self) -> tuple[list[int], list[int]]:
        """Each shard's published (weights buffers, state buffers). Only for who holds the turns."""
        try:
            found = [self.arena.committed(shard) for shard in range(self.arena.shards)]
        except ValueError as error:
            raise ProtocolError(f"job {self.job}: {error}; restart the job") from error
        return [weights for _, weights, _ in found], [state for _, _, state in found]

    def extra_view(self, lane: int) -> npt.NDArray[np.uint8]:
        """A lane's room for model buffers. Only who holds the turn may use it."""
        return np.frombuffer(self.memory, np.uint8, self.layout.extra_bytes, self.arena.extra_offset(lane))

    @property
    def version(self) -> int:
        """Updates so far."""
        return self.arena.version

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Answer nobody any more and let go of the memory; views that still live keep it mapped. May be called twice."""
        if self._process_id != os.getpid() or self._descriptor < 0:
            return
        for listener in list(self._listeners):
            self.stop_answering(listener)
        if self.server is not None:
            self.server.let_go(self.arena.lane_states())
        for descriptor in (self._descriptor, self._pidfd):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptor = -1

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def find(job: str, layout: Layout | None, timeout_s: float, clock: Clock) -> rendezvous.Offer:
    """Ask everyone who may answer for `job`; without a layout as an observer. Raises AttachError or LayoutError."""
    deadline_ns = clock.now_ns() + int(timeout_s * 1e9)
    places: list[rendezvous.Place] = ["host", *range(layout.lanes if layout else words.MAX_LANES)]
    text = layout.text() if layout else ""
    digest = layout.digest() if layout else bytes(32)
    while True:
        for place_of in places:
            try:
                return rendezvous.connect(
                    job,
                    place_of,
                    abi=words.ABI,
                    layout_hash=digest,
                    layout=text.encode(),
                    observer=layout is None,
                    timeout_s=1.0,
                )
            except (rendezvous.Absent, rendezvous.Silent):
                continue
            except rendezvous.LayoutDiffers as difference:
                raise LayoutError(
                    f"this worker's model differs from the job's: {first_difference(text, difference.theirs)}; all workers"
                    " must build the same model, optimizer and discipline"
                ) from None
            except (rendezvous.AbiDiffers, rendezvous.OtherUser) as error:
                raise AttachError(f"job {job}: {error}") from error
        if clock.now_ns() >= deadline_ns:
            others = ", ".join(sorted(discovery.listening())) or "none"
            raise AttachError(
                f"job {job}: expected an answer from its creator or a worker within {timeout_s:g} s, found nobody (jobs that"
                f" run here: {others}); was worker 0 started, and do all workers give the same job= or FASTPS_JOB?"
            )
        clock.sleep_ns(10_000_000)


def plan(layout: Layout) -> tuple[bytes, int]:
    """The header of a layout's arena, and the bytes that it takes in all. Raises UsageError for a layout without parameters."""
    if not layout.parameters:
        raise UsageError("expected at least one parameter, found none")
    return arena_plan.plan(
        lanes=layout.lanes,
        slots=layout.slots,
        ring_size=config.RING_SIZE,
        groups=layout.groups,
        parameters=len(layout.parameters),
        buffer_floats=layout.host_floats,
        rule=layout.rule.number,
        state_planes=layout.planes,
        extra_bytes=layout.extra_bytes,
        buffers=layout.buffers,
        shards=len(layout.shards),
        ema_decay=layout.policy.ema,
        checks_finite=layout.faults.nonfinite != "allow",
        gradient_type=GRADIENT_NUMBERS[layout.gradient_type],
        servers=int(layout.has_server),
    )


def _buffer_of(buffers: int | Sequence[int], parameter: Parameter) -> int:
    return buffers if isinstance(buffers, int) else buffers[parameter.shard]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
