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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.errors import ArenaError, AttachError, UnsupportedError, UsageError
from fastps.job import limits as config
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GradientType, Layout, place
from fastps.job.plan import plan
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Hyper, Update, write_initial_state
from fastps.kernels.shm import arena as words
from fastps.kernels.shm.format import format_memory
from fastps.membership import discovery, rendezvous
from fastps.membership.job_memory import JobMemory, Views
from fastps.store.served_worker import ServedWorker
from fastps.store.server_process import ServerProcess, chosen_server
from fastps.store.start import StartState
from fastps.store.worker import Worker
from fastps.system import numa as memory_nodes
from fastps.system import shared_memory as memory_of
from fastps.system.clock import SYSTEM_CLOCK, Clock

_DYING_S = 2.0  # how long a process that was killed may take to end


class Store(JobMemory):
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

    server: ServerProcess | None = None

    def close(self) -> None:
        """Answer nobody any more, let go of the memory, and of the server where this process started one."""
        is_open = self._process_id == os.getpid() and self._descriptor >= 0
        super().close()
        if is_open and self.server is not None:
            self.server.let_go(self.arena.lane_states())

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
        resume: StartState | None = None,
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
        resume: StartState | None = None,
        job: str | None = None,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
        finish: "Callable[[Store], None] | None" = None,
        server_device: Callable[[], Any] | None = None,
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
            name = job or secrets.token_hex(8)
            store = cls(descriptor, memory, layout, name, config.timeout_s(timeout_s), clock, list(hypers))
            store._write_beginning(write_weights, resume)
            if finish is not None:
                finish(store)
            store._answer_joiners(server_device)
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
        """Write version 0, or the state to go on from."""
        if resume is None:
            self.write_first(write_weights)
            return
        resume.write_into(self)
        if self.layout.policy.ema and not resume.has_average:
            self._begin_average()

    def write_first(self, write_weights: Callable[[Views], None]) -> None:
        """Write version 0: the weights, what the rule begins with, and the average."""
        write_weights(self.weight_views(0))
        write_initial_state(self.layout.rule, lambda plane: self.plane_views(0, plane))
        if self.layout.policy.ema:
            self._begin_average()

    def _begin_average(self) -> None:
        for average, weights in zip(self.plane_views(0, self.layout.planes - 1), self.weight_views(0), strict=True):
            average[:] = weights

    def _answer_joiners(self, server_device: Callable[[], Any] | None) -> None:
        """Start the server, if there is one, then answer: a worker that attached before would find no server."""
        if self.layout.has_server:
            rendezvous.check_free(self.job, "host")  # where a job of this name runs, its server has the name, too
            self.server = ServerProcess(self, server_device)
        self.answer_at("host")
        if self.server is not None:
            self.server.begin()

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
        answer = discovery.find(job, layout, limit_s, clock)
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


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
