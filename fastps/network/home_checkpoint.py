"""Checkpoints of a job of several nodes: a home's own workers copy its arenas, and new homes begin with what was copied.

The files are those of a job of one node. A model that is cut into parts is put together when it is saved, and cut again when
the job resumes, into as many parts as it then has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fastps.checkpoint.format import Array, Checkpoint, described, planes_of, shaped
from fastps.checkpoint.snapshot import PinnedVersion, VersionInUseError
from fastps.errors import TimeoutExceededError
from fastps.job.layout import Layout
from fastps.membership.job_memory import Floats, JobMemory
from fastps.network.home import store_name
from fastps.network.parts import Part, parts_of, whole
from fastps.store.store import Store
from fastps.store.worker import Worker

_POLL_NS = 1_000_000
_LEVEL_NS = 1_000_000_000  # parts pass through a version one after the other; they are level between two steps of this node


class HomeView:
    """The home's arenas as the workers of node 0 see them. It connects when it is first used.

    Raises AttachError if the agent does not answer.
    """

    def __init__(self, layout: Layout, worker: Worker) -> None:
        self._layout, self._worker = layout, worker
        self._parts = parts_of(layout)
        self._stores: list[Store] = []

    def _arenas(self) -> list[Store]:
        if not self._stores:
            store = self._worker.store
            for number, part in enumerate(self._parts):
                name = store_name(store.job, number)
                self._stores.append(Store.connect(name, part.layout, [], timeout_s=store.timeout_s, clock=store.clock))
        return self._stores

    @property
    def version(self) -> int:
        return self._arenas()[0].version

    def pin(self, param_groups: list[dict[str, Any]], extra: Mapping[str, Any], *, waits: bool) -> "PinnedParts":
        """Pin one version of all parts. Raises VersionInUseError if `waits` is False and another worker copies one.

        Raises TimeoutExceededError if the parts are never at one version, which takes other workers of this node that push all
        the time.
        """
        clock = self._worker.store.clock
        began_ns = clock.now_ns()
        while True:
            pinned = PinnedParts(self._layout, self._parts)
            try:
                for arena in self._arenas():
                    home = arena, 0  # this node's lane there, which the agent owns
                    pinned.versions.append(PinnedVersion(self._worker, param_groups, extra, waits=waits, home=home))
                if pinned.is_level:
                    return pinned
            except BaseException:
                pinned.close()
                raise
            pinned.close()
            if clock.now_ns() - began_ns >= _LEVEL_NS:
                if not waits:
                    raise VersionInUseError
                raise TimeoutExceededError(
                    "the model's parts were not at one version within 1 s, because other workers of this node push meanwhile:"
                    " call it where they wait, or use --within bsp"
                )
            clock.sleep_ns(_POLL_NS)

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self._stores = []


@dataclass(frozen=True)
class PinnedParts:
    """One version of all parts, pinned while it is copied, with the description and the tensors of all that the home holds."""

    _layout: Layout
    _parts: list[Part]
    versions: list[PinnedVersion] = field(default_factory=list)  # of each part

    holds_locks: ClassVar[bool] = False

    @property
    def is_level(self) -> bool:
        return len({each.description["version"] for each in self.versions}) == 1

    @property
    def description(self) -> dict[str, Any]:
        first = dict(self.versions[0].description)
        if len(self._parts) == 1:
            return first
        steps: dict[int, int] = {}
        for part, pinned in zip(self._parts, self.versions, strict=True):
            for index, found in zip(part.parameters, pinned.description["parameters"], strict=True):
                steps[index] = found["steps"]
        parameters = [{**described(each), "steps": steps[index]} for index, each in enumerate(self._layout.parameters)]
        return {**first, "parameters": parameters}

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """The name and the array of each tensor. Those of a parameter that is cut are copies."""
        if len(self._parts) == 1:
            yield from self.versions[0].arrays()
            return
        pieces: dict[str, list[Array]] = {}
        for pinned in self.versions:
            for name, array in pinned.arrays():
                pieces.setdefault(name, []).append(np.asarray(array).reshape(-1))
        for prefix, _ in planes_of(self._layout):
            for parameter in self._layout.parameters:  # flat, and in memory order
                yield prefix + parameter.name, shaped(np.concatenate(pieces[prefix + parameter.name]), parameter)

    def close(self) -> None:
        """Unpin the buffers. May be called twice."""
        for each in self.versions:
            each.close()


class PartStart:
    """What a checkpoint has of one part, as the state from which the part's arena resumes."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout, part: Part) -> None:
        self._checkpoint, self._layout, self._part = checkpoint, layout, part
        self.has_average, self.beginning = checkpoint.has_average, checkpoint.beginning

    def check_layout(self, layout: Layout) -> None:
        """See StartState: the workers have compared the whole model."""

    def write_into(self, store: JobMemory) -> None:
        write_range(self._checkpoint, self._layout, self._part, "weights/", store.weight_views(0))
        for index, plane in enumerate(store.layout.rule.planes):
            write_range(self._checkpoint, self._layout, self._part, f"state/{plane}/", store.plane_views(0, index))
        parameters = self._checkpoint.description["parameters"]
        for index, count in zip(self._part.parameters, store.rule_steps(0), strict=True):
            count[0] = parameters[index]["steps"]


class LeafStart:
    """The state from which a leaf's arena resumes: the weights, and the steps that its node has made."""

    has_average = False

    def __init__(self, checkpoint: Checkpoint, layout: Layout, node: int) -> None:
        self._checkpoint, self._layout = checkpoint, layout
        self.steps = int(checkpoint.beginning(layout)["clocks"][node])

    def check_layout(self, layout: Layout) -> None:
        """See StartState: the home's layout was compared."""

    def beginning(self, layout: Layout) -> dict[str, Any]:
        return {"versions": [self.steps] * len(layout.shards), "clocks": [self.steps] * layout.workers, "drawn": 0}

    def write_into(self, store: JobMemory) -> None:
        write_range(self._checkpoint, self._layout, whole(self._layout), "weights/", store.weight_views(0))


def write_range(checkpoint: Checkpoint, layout: Layout, part: Part, prefix: str, views: list[Floats]) -> None:
    """Write the floats of one part of a checkpoint's tensors into flat views, one for each of the part's parameters."""
    for index, view in zip(part.parameters, views, strict=True):
        parameter = layout.parameters[index]
        flat = np.empty(parameter.length, np.float32)
        shaped(flat, parameter)[...] = checkpoint.tensors[prefix + parameter.name]
        begin = max(0, part.first - parameter.offset)
        view[:] = flat[begin : begin + len(view)]
