"""Tensors that a version carries for readers, besides the weights: a model's buffers, or all that a publisher publishes.

A worker copies its model's buffers into the slot of a push while anybody reads. The fold's commit carries those of the lowest
live worker on from version to version, or of the lowest whose push it has where pushes may be dropped.
"""

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import UnsupportedError
from fastps.job.layout import ELEMENT_BYTES, Parameter, place_carried
from fastps.kernels.shm.arena import LANE_JOINING, LANE_LIVE
from fastps.membership.job_memory import JobMemory, WeightsMemory
from fastps.store.worker import Worker
from fastps.torch.names import without_wrappers

_live: "weakref.WeakSet[CarriedBuffers]" = weakref.WeakSet()
Row = tuple[str, tuple[int, ...], tuple[int, ...], str]


class Sources:
    """The tensors of a model, or of a mapping, by name. A model's are taken from its modules anew each time.

    A tensor of a type or layout that no version carries is left out, or UnsupportedError is raised (`is_strict`).
    """

    def __init__(self, named: Mapping[str, tuple[dict[str, Any], str]], *, is_strict: bool) -> None:
        self.rows: list[Row] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self.nbytes = 0
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        for name, place in named.items():
            tensor = place[0][place[1]]
            kind = str(tensor.dtype).removeprefix("torch.")
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or kind not in ELEMENT_BYTES:
                if is_strict:
                    raise UnsupportedError(
                        f"tensor {name!r}: expected dense values of one of {', '.join(sorted(ELEMENT_BYTES))}, found {kind} of"
                        f" {tensor.layout} on {tensor.device}; leave it out: publish a mapping of the others"
                    )
                continue
            stride = torch.empty_like(tensor, device="meta").stride()  # of the same order, without gaps
            self.rows.append((name, tuple(tensor.shape), tuple(stride), kind))
            self._places.append(place)
            self.nbytes += tensor.numel() * ELEMENT_BYTES[kind]
            self._forms.append((tensor.shape, tensor.dtype))

    def tensors(self) -> list[Any]:
        """The tensors as they are now, in the order of the rows; None for one that the model has no more."""
        return [held[name] if name in held else None for held, name in self._places]  # noqa: SIM401 - a script's has no `get`

    def misfit(self, tensors: Sequence[Any]) -> int:
        """The number of the first of these tensors that is None, or has not the shape and type of its row; -1 for none."""
        for index, (each, (shape, dtype)) in enumerate(zip(tensors, self._forms, strict=True)):
            if each is None or each.shape != shape or each.dtype != dtype:
                return index
        return -1


def places_of(model: torch.nn.Module, *, parameters: bool) -> dict[str, tuple[dict[str, Any], str]]:
    """Where a model holds its buffers (and parameters), by their names without wrappers; each tensor once."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers) if parameters else (module._buffers,):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{name}" if prefix else name] = (held, name)
    plain = without_wrappers(found)
    return {plain[name]: place for name, place in found.items()}


def views_at(memory: WeightsMemory, carried: Iterable[Parameter], byte_offset: int) -> list[torch.Tensor]:
    """Tensors over carried values that begin at `byte_offset`, in the memory that all processes share."""
    return [
        torch.utils.dlpack.from_dlpack(memory.memory.tensor(byte_offset + 4 * each.offset, each.shape, each.stride, each.type))
        for each in carried
    ]


def mark_at(memory: WeightsMemory, byte_offset: int) -> npt.NDArray[np.uint64]:
    """The word that says whether the carried values that begin at `byte_offset` are there: 1, or in a slot the step + 1."""
    return np.frombuffer(memory.memory, np.uint64, 1, byte_offset)


def write_present(memory: os.stat_result, buffer: int) -> bool:
    """Let a worker of this thread, whose job has this memory, write its model's buffers into a published weights buffer.

    For a reader of the same thread alone: the mark stays, so no other process looks at them. Returns whether that was done.
    """
    own = [each for each in _live if each.is_of(memory) and each.thread == threading.get_ident()]
    return any(each.write_present(buffer) for each in own)


class CarriedBuffers:
    """A model's buffers as its worker's pushes bring them. Quantized and sparse ones stay each worker's own."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._sources = Sources(places_of(model, parameters=False) if model is not None else {}, is_strict=False)
        self._views: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def layout(self, shard: int) -> tuple[Parameter, ...]:
        """The places of the buffers in what a version carries, which shard `shard` versions."""
        return place_carried(self._sources.rows, shard)

    @torch.no_grad()
    def write_first(self, store: JobMemory) -> None:
        """Write the buffers of the first version, before others join; not where a checkpoint has brought other shapes."""
        tensors = self._sources.tensors()
        if store.layout.carried and self._sources.misfit(tensors) < 0:
            offset = store.arena.carried_offset(0)
            torch._foreach_copy_(views_at(store, store.layout.carried, offset), tensors)
            mark_at(store, offset)[0] = 1

    def use(self, worker: Worker) -> None:
        """Bring buffers with this worker's pushes from now on."""
        self._worker, self._memory, self._carried = worker, worker.store, worker.store.layout.carried
        self._drops = worker.store.layout.policy.fold == "quorum"
        self.thread = threading.get_ident()  # the only one that may use the worker
        _live.add(self)
        self._views.clear()
        if worker.generation:  # the lane's earlier owner may have brought some with a step of the same number
            for slot in range(self._memory.arena.slots if self._carried else 0):
                self._mark(slot)[0] = 0

    def is_of(self, memory: os.stat_result) -> bool:
        """Whether the worker's job has this memory."""
        return not self._worker.closed and os.path.samestat(os.fstat(self._memory.descriptor), memory)

    @torch.no_grad()
    def write_present(self, buffer: int) -> bool:
        """Write the buffers, if this is the lowest live worker, and if this weights buffer is published and carries nothing."""
        store, tensors = self._memory, self._sources.tensors()
        if not self._carried or not self._is_lowest() or self._sources.misfit(tensors) >= 0:
            return False
        with self._worker.locked():
            if store.committed()[0][-1] != buffer or store.carries(buffer):
                return False
            torch._foreach_copy_(views_at(store, self._carried, store.arena.carried_offset(buffer)), tensors)
        return True

    def _is_lowest(self) -> bool:
        states = self._memory.arena.lane_states()[: self._worker.rank]
        return not any(state in (LANE_LIVE, LANE_JOINING) for state in states)

    def bring(self, slot: int) -> None:
        """Copy the buffers into a slot, for the next push: while anybody reads, and from the lowest live worker.

        From every worker where a push may be dropped, as each of a slow worker is: a version then has those of its lowest.
        Buffers of another shape or type than when the model was wrapped are not brought.
        """
        arena = self._memory.arena
        if len(arena.buffers_with_pages()) > arena.buffers and (self._drops or self._is_lowest()):
            self._bring(slot)

    @torch.no_grad()
    def _bring(self, slot: int) -> None:
        tensors = self._sources.tensors()
        if self._sources.misfit(tensors) >= 0:
            return
        mark, views = self._views.get(slot) or self._make(slot)
        torch._foreach_copy_(views, tensors)
        mark[0] = self._worker.lane.steps + 1

    def _make(self, slot: int) -> tuple[Any, list[torch.Tensor]]:
        offset = self._memory.arena.brought_offset(self._worker.rank, slot)
        self._views[slot] = self._mark(slot), views_at(self._memory, self._carried, offset)
        return self._views[slot]

    def _mark(self, slot: int) -> Any:
        return mark_at(self._memory, self._memory.arena.brought_offset(self._worker.rank, slot))
