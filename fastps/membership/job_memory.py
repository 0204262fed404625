"""A job's arena, mapped into one process: typed views of weights, gradients and optimizer state, and listeners for joiners."""

import contextlib
import itertools
import os
from collections.abc import Collection, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastps.errors import ProtocolError
from fastps.job.layout import Layout, Parameter
from fastps.job.update_rules import Hyper
from fastps.kernels.memory.mapping import SharedMapping
from fastps.kernels.rows import rows
from fastps.kernels.shm import arena
from fastps.kernels.shm.arena import STATE_BUFFERS
from fastps.kernels.update import fold
from fastps.membership import rendezvous
from fastps.system.clock import Clock
from fastps.system.shared_memory import allocate

Floats = npt.NDArray[Any]
"""An array of float32, or of float64 in a job of that precision."""
Views = list[Floats]


def by_name(parameters: Sequence[Parameter], views: Sequence[Any]) -> MappingProxyType[str, Any]:
    """Name to array of each parameter over flat views of them, also on a device."""
    return MappingProxyType({each.name: _shaped(view, each) for each, view in zip(parameters, views, strict=True)})


def _shaped(view: Any, parameter: Parameter) -> Any:
    """A flat view in its parameter's shape, whose dimensions may lie in memory in another order, without gaps."""
    order = sorted(range(len(parameter.shape)), key=lambda each: -parameter.stride[each])
    return view.reshape([parameter.shape[each] for each in order]).transpose([order.index(each) for each in range(len(order))])


class WeightsMemory:
    """The weights of a job's arena, mapped into this process."""

    def __init__(self, memory: SharedMapping, parameters: tuple[Parameter, ...]) -> None:
        self.parameters = parameters  # the place of each in a weights buffer
        self.memory = memory
        self.arena = arena.Arena(memory)  # typed access to the header and the lanes
        self.tables = [index for index, parameter in enumerate(parameters) if parameter.is_table]
        self._frozen = {index for index, each in enumerate(parameters) if each.length and not self.arena.length_of(index)}
        self._marks: dict[int, npt.NDArray[np.uint64]] = {}  # of each weights buffer: whether it has what it carries

    @property
    def frozen(self) -> set[int]:
        """The numbers of parameters that no worker has trained. They lie in memory once, and have no state."""
        if self._frozen:
            self._frozen = {index for index in self._frozen if not self.arena.length_of(index)}
        return self._frozen

    def _buffer_of_each(self, buffers: int | Sequence[int]) -> list[int]:
        """The buffer that has each parameter's weights."""
        frozen, spare = self.frozen, self.arena.buffers + self.arena.readers
        return [spare if i in frozen else _buffer_of(buffers, each) for i, each in enumerate(self.parameters)]

    def floats_at(self, byte_offset: int, parameter: Parameter) -> Floats:
        """A flat view of one parameter's values in the buffer, slot or optimizer-state tensor that begins at `byte_offset`."""
        count = 0 if parameter.is_table else parameter.size
        return np.frombuffer(self.memory, parameter.stored, count, byte_offset + 4 * parameter.offset)

    def carried_at(self, byte_offset: int, parameter: Parameter) -> npt.NDArray[Any]:
        """A flat view of a carried tensor in what begins at `byte_offset`; of a type that NumPy lacks, as bits."""
        kind = "uint16" if parameter.type == "bfloat16" else parameter.type
        return np.frombuffer(self.memory, kind, parameter.size, byte_offset + 4 * parameter.offset)

    def carries(self, buffer: int) -> bool:
        """Whether the version in a weights buffer has what it carries: nothing is copied where no reader is."""
        if (mark := self._marks.get(buffer)) is None:
            mark = self._marks[buffer] = np.frombuffer(self.memory, np.uint64, 1, self.arena.carried_offset(buffer))
        return bool(mark[0])

    def halves_at(self, byte_offset: int, parameter: Parameter, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A flat view of one parameter's values of two bytes in the buffer or slot that begins at `byte_offset`."""
        return np.frombuffer(self.memory, dtype, parameter.length, byte_offset + 2 * parameter.offset)

    def weight_views(self, buffers: int | Sequence[int]) -> Views:
        """A flat view of each parameter in one weights buffer, or in one buffer per shard.

        A table, and a frozen parameter, is the same in each.
        """
        return [
            self.floats_at(self.arena.weights_offset(buffer), parameter)
            if not parameter.is_table and not parameter.is_carried
            else self.carried_at(self.arena.carried_offset(buffer), parameter)
            if parameter.is_carried
            else np.frombuffer(self.memory, np.float32, parameter.size, self.arena.table_offset(self.tables.index(index)))
            for index, (parameter, buffer) in enumerate(zip(self.parameters, self._buffer_of_each(buffers), strict=True))
        ]

    def pulled_views(self, buffers: int | Sequence[int]) -> Views:
        """The views that a model shows of buffers that its worker has pulled; `buffers` as in weight_views."""
        return self.weight_views(buffers)

    def half_views(self, buffers: int | Sequence[int]) -> list[npt.NDArray[np.uint16]]:
        """A flat view of each parameter in the half precision of the job's parameters, as bits; `buffers` as in weight_views.

        A table has none. Raises ValueError for a job without parameters in half precision.
        """
        offsets = [self.arena.halves_offset(buffer) for buffer in self._buffer_of_each(buffers)]
        return [self.halves_at(*each, np.dtype(np.uint16)) for each in zip(offsets, self.parameters, strict=True)]

    def write_halves(self, buffers: int | Sequence[int]) -> None:
        """Write the weights of these buffers once more in half precision, after something else than a fold has written them.

        Does nothing for a job without parameters in half precision.
        """
        if not self.arena.shown_type:
            return
        for weights, halves in zip(self.weight_views(buffers), self.half_views(buffers), strict=True):
            fold.narrow(weights[: len(halves)], halves, self.arena.shown_type)


class VersionCopy:
    """A pinned version as this process reads it. In host memory it is read where it is."""

    def __init__(self, memory: "JobMemory", weights: Sequence[int], state: Sequence[int]) -> None:
        self._memory, self._weights, self._state = memory, weights, state

    def views(self, number: int) -> Views:
        """Views of the weights (0), or of optimizer-state tensor `number` - 1, one for each parameter."""
        weights = self._memory.weight_views(self._weights)
        if not number:
            return weights
        planes, rule = self._memory.plane_views(self._state, number - 1), self._memory.layout.rule
        for index in self._memory.frozen:
            values = weights[index]  # with which the average of the weights begins
            planes[index] = np.full_like(values, rule.initial_value(number - 1)) if number <= len(rule.planes) else values
        return planes

    def end(self) -> None:
        """Wait until nothing reads the version's own buffers any more; call it before they are unpinned."""


class JobMemory(WeightsMemory):
    """The arena of one job, mapped into this process."""

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
        self.timeout_s = timeout_s  # of all waits
        self.clock = clock
        self.hypers = hypers  # of each parameter group
        super().__init__(memory, layout.parameters)
        self._descriptor = self.descriptor = descriptor
        self._pidfd = os.pidfd_open(os.getpid())
        self._process_id = os.getpid()
        self._listeners: list[rendezvous.Listener] = []

    def answer_at(self, place_of: rendezvous.Place) -> rendezvous.Listener:
        """Start a listener at a place ("host" or a lane). Joiners get the memory from it, and peers this process's pidfd."""
        name = rendezvous.place_name(self.job, place_of)
        place = place_of if isinstance(place_of, int) else rendezvous.HOST_PLACE
        listener = rendezvous.Listener(name, self._descriptor, self._pidfd, self.layout.text().encode(), place)
        self._listeners.append(listener)
        return listener

    def stop_answering(self, listener: rendezvous.Listener) -> None:
        """Close a listener, unless that is done: a worker that cannot begin closes its own."""
        if listener in self._listeners:
            listener.close()
            self._listeners.remove(listener)

    def foreign_layout(self) -> str | None:
        """The layout text of a joiner that a listener of this process refused, or None."""
        return next((text for listener in self._listeners if (text := listener.foreign_layout()) is not None), None)

    def gradient_views(self, lane: int, slot: int) -> list[npt.NDArray[Any]]:
        """A flat view of each parameter's gradient in a slot of a lane, in the layout's dtype; bfloat16 is viewed as uint16.

        A table's is empty: a push has rows of it.
        """
        kind = self.layout.gradient_type
        offset = self.arena.gradient_offset(lane, slot)
        if kind in ("float32", "float64"):
            return [self.floats_at(offset, parameter) for parameter in self.layout.parameters]
        dtype = np.dtype(np.float16 if kind == "float16" else np.uint16)
        return [self.halves_at(offset, parameter, dtype) for parameter in self.layout.parameters]

    def pushed_rows(self, lane: int, slot: int, parameter: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """The numbers of a table's rows in a slot of a lane, and their values, of shape (rows, width)."""
        table, width = self.tables.index(parameter), self.layout.parameters[parameter].shape[1]
        (begin, header), (values, _) = self.arena.table_slot_ranges(lane, slot, table, 0)
        count = int(np.frombuffer(self.memory, np.int64, 1, begin)[0])
        numbers = np.frombuffer(self.memory, np.uint32, count, begin + header)
        return numbers, np.frombuffer(self.memory, np.float32, count * width, values).reshape(count, width)

    def plane_views(self, buffers: int | Sequence[int], plane: int) -> Views:
        """A flat view of each parameter in a state tensor, of one buffer or one a shard. The caller holds the shard locks.

        That of a frozen parameter is empty.
        """
        frozen, empty = self.frozen, np.empty(0, np.float32)
        return [
            empty
            if index in frozen
            else self.floats_at(self.arena.plane_offset(_buffer_of(buffers, parameter), plane), parameter)
            if not parameter.is_table
            else self._table_plane(index, plane)
            for index, parameter in enumerate(self.layout.parameters)
        ]

    def others(self, rank: int) -> list[int]:
        """The lanes of the workers but this one that push, or will once they have attached."""
        pushing, initial = (arena.LANE_LIVE, arena.LANE_JOINING), self.layout.workers
        states = enumerate(self.arena.lane_states()[: self.arena.lanes])
        found = [lane for lane, state in states if state in pushing or (state == arena.LANE_FREE and lane < initial)]
        return [lane for lane in found if lane != rank]

    def reserve_weights(self, buffer: int) -> None:
        """Give a weights buffer its pages before it is written, if the job began without them. Raises ArenaError."""
        length = self.arena.reader_weights_range(1)[1]
        allocate(
            self.descriptor,
            self.arena.weights_offset(buffer),
            length,
            "one more version of the weights, while others are in use,",
        )

    def thaw(self, parameters: Collection[int]) -> None:
        """Give these parameters, if they are frozen, memory in each buffer and slot. The caller holds all shard locks.

        Raises ArenaError if there is too little memory. They stay frozen then.
        """
        weights, state = self.committed()
        buffers, states = {*self.arena.buffers_with_pages(), *weights}, {*range(STATE_BUFFERS), *state}
        rule, planes = self.layout.rule, self.layout.planes
        for index in self.frozen.intersection(parameters):
            parameter, values = self.parameters[index], self.weight_views(0)[index]
            for place in self.arena.places_of(parameter.offset, parameter.length):
                allocate(self.descriptor, *place, f"parameter {parameter.name!r}, which is trained from now on,")
            for buffer in buffers:
                self.floats_at(self.arena.weights_offset(buffer), parameter)[:] = values
                if self.arena.shown_type:
                    half = self.halves_at(self.arena.halves_offset(buffer), parameter, np.dtype(np.uint16))
                    fold.narrow(values, half, self.arena.shown_type)
            for buffer, plane in itertools.product(states, range(planes)):
                initial = rule.initial_value(plane) if plane < len(rule.planes) else values
                self.floats_at(self.arena.plane_offset(buffer, plane), parameter)[:] = initial
            self.arena.thaw(index, parameter.length)

    def _table_plane(self, index: int, plane: int) -> Floats:
        """A flat view of a table's optimizer-state tensor; empty if the rule of its rows has none of this number."""
        parameter, (planes, words) = self.layout.parameters[index], rows.PLANES[self.layout.row_rule]
        if plane >= planes:
            return np.empty(0, np.float32)
        floats = parameter.shape[0] * (words or parameter.shape[1])
        return np.frombuffer(self.memory, np.float32, floats, self.arena.table_plane_offset(self.tables.index(index), plane))

    def rule_steps(self, buffers: int | Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """How often the rule was applied to each parameter: int64[1] each. The caller must hold the shard locks."""
        return [
            np.frombuffer(self.memory, np.int64, 1, self.arena.steps_offset(_buffer_of(buffers, parameter)) + 8 * index)
            for index, parameter in enumerate(self.layout.parameters)
        ]

    def slot_words(self, lane: int, slot: int) -> tuple[list[Hyper], npt.NDArray[np.bool_]]:
        """The hyper-parameters (struct fps_hyper of fold.h) of each group and the presence bit of each parameter in a slot."""
        begin, groups, count = self.arena.slot_offset(lane, slot), self.layout.groups, len(self.layout.parameters)
        words = np.frombuffer(self.memory, np.float64, 16 * groups, begin).reshape(groups, 16)
        flags = words[:, 15].copy().view(np.uint64)
        hypers = [Hyper._make([*row[:8], int(flag)]) for row, flag in zip(words.tolist(), flags.tolist(), strict=True)]
        present = np.frombuffer(self.memory, np.uint8, 8 * -(-count // 64), self.arena.presence_offset(lane, slot))
        return hypers, np.unpackbits(present, count=count, bitorder="little").view(np.bool_)

    def nonfinite_words(self, lane: int, slot: int) -> npt.NDArray[np.uint8]:
        """The bitmap of parameters that a device found non-finite in a slot, as bytes of eight bits, the lowest first."""
        size = 8 * -(-len(self.layout.parameters) // 64)
        return np.frombuffer(self.memory, np.uint8, size, self.arena.nonfinite_offset(lane, slot))

    def all_steps(self, buffer: int) -> npt.NDArray[np.int64]:
        """How often the rule was applied to each parameter, in one state buffer."""
        return np.frombuffer(self.memory, np.int64, len(self.layout.parameters), self.arena.steps_offset(buffer))

    def committed(self) -> tuple[list[int], list[int]]:
        """The published weights buffer of each shard, and the published state buffer of each.

        The caller must hold the shard locks. Raises ProtocolError if the arena is damaged.
        """
        try:
            found = [self.arena.committed(shard) for shard in range(self.arena.shards)]
        except ValueError as error:
            raise ProtocolError(f"job {self.job}: {error}; restart the job") from error
        return [weights for _, weights, _ in found], [state for _, _, state in found]

    def extra_view(self, lane: int) -> npt.NDArray[np.uint8]:
        """A lane's room for model buffers. The caller must hold the shard lock."""
        return np.frombuffer(self.memory, np.uint8, self.layout.extra_bytes, self.arena.extra_offset(lane))

    def momentum(self, lane: int) -> npt.NDArray[np.float32]:
        """The momentum of a lane's worker under momentum=worker, as the weights lie in a buffer."""
        return np.frombuffer(self.memory, np.float32, self.layout.buffer_floats, self._momentum_offset(lane))

    def momentum_views(self, lane: int) -> Views:
        """A flat view of each parameter's momentum of a lane's worker; none unless the workers keep it."""
        parameters = self.layout.parameters if self.layout.rule.in_workers else ()
        return [self.floats_at(self._momentum_offset(lane), parameter) for parameter in parameters]

    def _momentum_offset(self, lane: int) -> int:
        return int(self.arena.extra_offset(lane)) + self.layout.momentum_begin

    def copy_version(self, weights: Sequence[int], state: Sequence[int]) -> VersionCopy:
        """Begin to copy pinned buffers of weights and state, one for each shard, to where this process reads them."""
        return VersionCopy(self, weights, state)

    @property
    def version(self) -> int:
        """The number of updates so far."""
        return self.arena.version

    def close(self) -> None:
        """Close the listeners and release the memory. Views that still exist keep it mapped. May be called twice."""
        if self._process_id != os.getpid() or self._descriptor < 0:
            return
        for listener in list(self._listeners):
            self.stop_answering(listener)
        for descriptor in (self._descriptor, self._pidfd):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _buffer_of(buffers: int | Sequence[int], parameter: Parameter) -> int:
    return buffers if isinstance(buffers, int) else buffers[parameter.shard]
