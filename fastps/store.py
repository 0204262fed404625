"""The store: a job's arena as one process sees it, and the way in for its workers.

Embedded: there is no server process. The process that creates a store writes the first weights; any process of the same user
then attaches as a worker, by inheritance (fork) or by the job's name (rendezvous.py). Refuses to run anything by itself: the
turn is run by the workers that wait (worker.py, kernels/turn.pyx).
"""

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps import arena as memory_of
from fastps import config, rendezvous
from fastps.clock import SYSTEM_CLOCK, Clock
from fastps.errors import ArenaError, AttachError, LayoutError, UnsupportedError, UsageError
from fastps.kernels import arena as words
from fastps.layout import GRADIENT_NUMBERS, GradientType, Layout, Parameter, first_difference, place
from fastps.policy import Policy
from fastps.rules import Hyper, Update, write_initial_state
from fastps.specs import parse_policy
from fastps.worker import Worker

Floats = npt.NDArray[np.float32]
Views = list[Floats]


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

    worker_class = Worker  # what `attach` makes

    def __init__(
        self,
        descriptor: int,
        memory: mmap.mmap,
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
        self._answerers: list[rendezvous.Answerer] = []

    # -- making and finding ------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        weights: Mapping[str, npt.ArrayLike],
        update: Update,
        *,
        sync: str | Policy = "bsp",
        workers: int = 1,
        gradient_type: GradientType = "float32",
        job: str | None = None,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> "Store":
        """Make a job's arena and write `weights` (name to float32 array) into it as version 0.

        With `gradient_type` "float16" workers push half as many bytes, which are summed in single precision.
        Raises PolicyError, UnsupportedError (a dtype other than float32, or a type of gradient that NumPy lacks), ArenaError
        (too little memory) or ValueError (no weights, or a number of workers out of range).
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
        layout = Layout(place(rows, policy.shards), 1, update.rule, policy, workers, gradient_type=gradient_type)

        def write(views: Views) -> None:
            for view, array in zip(views, arrays.values(), strict=True):
                view[:] = array.reshape(-1)

        return cls.create_for(layout, write, [update.hyper], job=job, timeout_s=timeout_s, clock=clock)

    @classmethod
    def create_for(
        cls,
        layout: Layout,
        write_weights: Callable[[Views], None],
        hypers: list[Hyper],
        *,
        job: str | None = None,
        timeout_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
        finish: "Callable[[Store], None] | None" = None,
    ) -> "Store":
        """Make the arena of a layout; `write_weights` is given one flat view a parameter and writes version 0 into it.

        `finish` may write more, before anybody can join.
        """
        values = layout.policy.values(layout.workers)
        header, size = plan(layout)
        floats = sum(parameter.length for parameter in layout.parameters)
        descriptor = memory_of.create(size, f"{floats:,} parameters and {layout.workers} workers")
        try:
            memory = memory_of.map_shared(descriptor)
            words.format_memory(
                memory,
                header,
                [(parameter.offset, parameter.length, parameter.group) for parameter in layout.parameters],
                shards=layout.host_shards,
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
            store.write_first(write_weights)
            if finish is not None:
                finish(store)
            store.answer_at("host")
        except BaseException:
            os.close(descriptor)
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

    def attach(self, rank: int) -> Worker:
        """Join as worker `rank`; each rank once. Raises AttachError."""
        if not 0 <= rank < self.layout.workers:
            raise AttachError(
                f"worker {rank} cannot attach: the arena was made for {self.layout.workers} workers"
                f" (0 to {self.layout.workers - 1}); start fewer, or create it for more"
            )
        if os.getpid() != self._process_id:
            # Inherited by fork: this process answers for itself from now on.
            self._process_id, self._pidfd, self._answerers = os.getpid(), os.pidfd_open(os.getpid()), []
        try:
            answerer = self.answer_at(rank)
        except OSError as error:
            raise AttachError(f"worker {rank} cannot attach: another process answers in its place ({error})") from error
        if not self.arena.claim(rank, os.getpid()):
            self.stop_answering(answerer)
            raise AttachError(f"worker {rank} is or was attached already: each rank joins once; check the ranks")
        return self.worker_class(self, rank, answerer)

    def answer_at(self, place_of: rendezvous.Place) -> rendezvous.Answerer:
        """Begin to answer at a place ("host" or a lane): joiners get the memory, peers this process's pidfd."""
        answerer = rendezvous.Answerer(
            rendezvous.place_name(self.job, place_of),
            memfd=self._descriptor,
            pidfd=self._pidfd,
            abi=words.ABI,
            layout_hash=self.layout.digest(),
            layout=self.layout.text().encode(),
            place=place_of if isinstance(place_of, int) else -1,
        )
        self._answerers.append(answerer)
        return answerer

    def stop_answering(self, answerer: rendezvous.Answerer) -> None:
        """End one place's answers."""
        answerer.close()
        self._answerers.remove(answerer)

    def foreign_layout(self) -> str | None:
        """The description that a refused joiner sent to this process, or None."""
        return next((text for answerer in self._answerers if (text := answerer.foreign_layout()) is not None), None)

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
        found = [self.arena.committed(shard) for shard in range(self.arena.shards)]
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
        for answerer in list(self._answerers):
            self.stop_answering(answerer)
        for descriptor in (self._descriptor, self._pidfd):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptor = -1

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def find(job: str, layout: Layout | None, timeout_s: float, clock: Clock) -> rendezvous.Answer:
    """Ask everyone who may answer for `job`; without a layout as an observer. Raises AttachError or LayoutError."""
    deadline_ns = clock.now_ns() + int(timeout_s * 1e9)
    places: list[rendezvous.Place] = ["host", *range(layout.workers if layout else 64)]
    text = layout.text() if layout else ""
    digest = layout.digest() if layout else bytes(32)
    while True:
        for place_of in places:
            try:
                return rendezvous.ask(
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
            raise AttachError(
                f"job {job}: expected an answer from its creator or a worker within {timeout_s:g} s, found nobody; was worker 0"
                " started, and is FASTPS_JOB the same for all?"
            )
        clock.sleep_ns(10_000_000)


def plan(layout: Layout) -> tuple[bytes, int]:
    """The header of a layout's arena, and the bytes that it takes in all. Raises UsageError for a layout without parameters."""
    if not layout.parameters:
        raise UsageError("expected at least one parameter, found none")
    return words.plan(
        lanes=layout.workers,
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
        gradient_type=GRADIENT_NUMBERS[layout.gradient_type],
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
