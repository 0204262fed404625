"""The layout: where each parameter lies in a buffer, and what all workers of a job must agree on before they share memory.

A layout is a description and touches no memory. Workers compare layouts by hash and, if the hashes differ, parameter by
parameter.
"""

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from fastps.errors import UnsupportedError
from fastps.job.fault_policy import DEFAULT_FAULTS, FaultPolicy
from fastps.job.options import OPTIONS
from fastps.job.policy import Policy
from fastps.job.update_rules import UPDATE_RULES, Rule
from fastps.kernels.memory.mapping import DTYPES
from fastps.kernels.rows import rows
from fastps.kernels.shm import arena
from fastps.kernels.update import fold

GradientType = Literal["float32", "float16", "bfloat16", "float64"]
GRADIENT_NUMBERS: dict[GradientType, int] = {
    "float32": fold.FLOAT32,
    "float16": fold.FLOAT16,
    "bfloat16": fold.BFLOAT16,
    "float64": fold.FLOAT64,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter: `length` floats at `offset` floats into a buffer, with the strides of the tensor, in values.

    Shard number `shard` holds and versions it. A table has no floats in a buffer: its rows lie in the arena once. `type` is
    that of the model's parameter: for a half the float32 values are master weights, which the fold writes once more in it. A
    value of float64 takes two floats. A carried one is a tensor of any type that a version has besides: `offset` floats into
    what the version carries.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    group: int
    offset: int
    shard: int = 0
    is_table: bool = False
    type: str = "float32"
    is_carried: bool = False

    @property
    def length(self) -> int:
        """The number of floats in a weights buffer: 0 for a table, and for what is carried."""
        return 0 if self.is_table or self.is_carried else self.size * (2 if self.type == "float64" else 1)

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def stored(self) -> str:
        """The type of its values in weights buffers and optimizer state: "float32" or "float64"; if it is carried, `type`."""
        return self.type if self.is_carried or self.type == "float64" else "float32"

    @property
    def nbytes(self) -> int:
        """The bytes of its values, if it is carried."""
        return self.size * ELEMENT_BYTES[self.type]


ELEMENT_BYTES = {name: bits // 8 for name, (_, bits) in DTYPES.items()}
"""The types of carried tensors, as torch calls them, and the bytes of an element."""
TAG = ""
"""The name of the carried bytes that have a publisher's tag: no tensor's name."""
LEAF = "leaf"
"""The name of the rule of a leaf arena, whose fold is made on another arena."""


@dataclass(frozen=True)
class Layout:
    """All that a job's workers share: parameters, rule, discipline, number of workers, room for model buffers, and more."""

    parameters: tuple[Parameter, ...]
    groups: int
    rule: Rule
    policy: Policy
    workers: int
    extra_bytes: int = 0
    faults: FaultPolicy = DEFAULT_FAULTS
    # The precision in which gradients are pushed. They are summed and applied in single precision; "float64" says that all
    # numbers of the job are in double precision.
    gradient_type: GradientType = "float32"
    # For each shard its owner lane, on whose device its floats lie; () if all floats lie in the arena. Numbers from `lanes` on
    # are the devices of the server.
    owner_lanes: tuple[int, ...] = ()
    # For each lane the owner of its slots on devices; (): the lane itself, or the server's first device.
    slot_owners: tuple[int, ...] = ()
    # Which processes combine: "workers" that wait, a server "process", or a node's agent, in whose place none can: the "agent"
    # of a leaf takes the weights from a home, and that of a "replica" makes them.
    server: str = "workers"
    # The most readers at a time. The creator decides alone, so the layouts of others may differ in it.
    max_readers: int = OPTIONS["FASTPS_MAX_READERS"].default
    # The numbers of parameters without a gradient so far. They lie in memory once, in the spare weights buffer, until a worker
    # thaws them. The creator decides alone, too.
    frozen: frozenset[int] = frozenset()
    lanes_are: str = "workers"  # what errors call the owners of lanes: "workers", or "nodes" in a home
    # What each version has besides parameters, for readers: a model's buffers, or all that a publisher publishes.
    carried: tuple[Parameter, ...] = ()

    @property
    def lanes(self) -> int:
        """Lanes of the arena: the most workers at a time."""
        return self.faults.lanes(self.workers)

    @property
    def floats_each(self) -> int:
        """The floats of a buffer that hold one number: two in double precision."""
        return 2 if self.gradient_type == "float64" else 1

    @property
    def has_agent(self) -> bool:
        """Whether this is the arena of one node of several, whose agent combines."""
        return self.server in ("agent", "replica")

    @property
    def has_server(self) -> bool:
        """Whether a server combines: a process, or an agent. Its lane is number `lanes`, behind the workers' lanes."""
        return self.server != "workers"

    @property
    def steps_alone(self) -> bool:
        """Whether an optimizer in Python steps as without fastps: in its only worker, on that one's own gradients."""
        is_own = self.rule.runs_in_python and self.lanes == 1 and not self.has_server and not self.policy.clip
        types = {kind for parameter in self.parameters for kind in (parameter.type, parameter.stored)}
        return is_own and types == {self.gradient_type}

    @property
    def has_no_state(self) -> bool:
        """Whether this is the arena of one node of several: its server is the node's agent, and node 0 has the state."""
        return self.rule.name == LEAF

    def check_has_state(self, what: str) -> None:
        """Raise UnsupportedError for what needs the job's state, if this is a leaf arena."""
        if self.has_no_state:
            raise UnsupportedError(
                f"{what}: not in a job of several nodes yet, because node 0 has the job's state and no worker reaches it; save"
                " a checkpoint on node 0 (--checkpoint, fastps.save), resume it (--resume), or load weights before wrapping the"
                " optimizer"
            )

    @property
    def planes(self) -> int:
        """Optimizer-state tensors: the rule's, then the moving average of the weights if there is one."""
        return len(self.rule.planes) + (self.policy.ema > 0)

    @property
    def is_published(self) -> bool:
        """Whether versions come from a publisher, which writes them whole, and not from pushes."""
        return not self.parameters

    @property
    def momentum_begin(self) -> int:
        """Where a worker's own momentum (momentum=worker) begins in its lane's room, behind the model buffers."""
        return 4 * aligned(-(-self.extra_bytes // 4)) if self.extra_bytes else 0

    @property
    def slots(self) -> int:
        """Gradient slots of a lane."""
        return 0 if self.is_published else self.policy.slots(self.lanes)

    @property
    def buffers(self) -> int:
        """Weights buffers: one per worker, or in use, received and under way if it fetches in the background; and three more.

        The three are the published buffer, a free one, and one that stays pinned while a checkpoint is copied. A publisher
        needs the first two.
        """
        if self.is_published:
            return 2
        return self.lanes * (3 if self.policy.overlap else 1) + 3

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The range of floats [first, last) of each shard in a buffer."""
        count = self.parameters[-1].shard + 1 if self.parameters else 1
        begins = [next((p.offset for p in self.parameters if p.shard == shard), 0) for shard in range(count)]
        return list(zip(begins, [*begins[1:], self.buffer_floats], strict=True))

    @property
    def tables(self) -> list[tuple[int, int, int, int, int]]:
        """For each table: its rows, the floats of a row, its number among the parameters, its group and its shard."""
        return [
            (parameter.shape[0], parameter.shape[1], index, parameter.group, parameter.shard)
            for index, parameter in enumerate(self.parameters)
            if parameter.is_table
        ]

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """For each parameter: its first float in a buffer, its floats there when the job begins, and its group."""
        parameters = enumerate(self.parameters)
        return [(each.offset, 0 if index in self.frozen else each.length, each.group) for index, each in parameters]

    @property
    def frozen_runs(self) -> list[tuple[int, int]]:
        """Runs of frozen parameters: the first float in a buffer, and the floats."""
        return self.runs(sorted(self.frozen))

    def runs(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Runs of these parameters, in order: the first float in a buffer, and the floats, padding inside included."""
        runs: list[tuple[int, int]] = []
        last = -1
        for number in numbers:
            parameter = self.parameters[number]
            begin = runs.pop()[0] if runs and number - 1 == last else parameter.offset
            runs.append((begin, parameter.offset + parameter.length - begin))
            last = number
        return runs

    @property
    def row_rule(self) -> int:
        """The number of the rule that updates rows of tables; 0 without tables."""
        return rows.RULES[UPDATE_RULES[self.rule.name].row_rule] if self.tables else 0

    @property
    def buffer_floats(self) -> int:
        """Floats of one weights buffer, padding included."""
        if not self.parameters:
            return 0
        last = self.parameters[-1]
        return last.offset + aligned(last.length)

    @property
    def carried_bytes(self) -> int:
        """The bytes of what a version carries, a line of marks included; 0 for nothing."""
        return carried_bytes(self.carried)

    @property
    def shown_type(self) -> GradientType:
        """The half precision of the parameters that have one; else "float32". A model has at most one half type."""
        found = next((parameter.type for parameter in self.parameters if parameter.type != parameter.stored), "float32")
        return cast(GradientType, found)

    @property
    def host_shards(self) -> list[tuple[int, int]]:
        """The range of floats of each shard in a buffer in the arena: empty ranges if the weights are on devices."""
        return [(0, 0) for _ in self.shards] if self.owner_lanes else self.shards

    def with_shards(self, shards: int) -> "Layout":
        """This layout with its parameters in at most that many shards, and a discipline that versions them separately."""
        parameters = tuple(_sharded(list(self.parameters), min(shards, len(self.parameters)), self.buffer_floats))
        return replace(self, parameters=parameters, policy=replace(self.policy, shards=shards))

    def text(self) -> str:
        """The description as JSON. It is hashed, and sent to a peer whose hash differs."""
        description = {
            "abi": arena.ABI,
            "byte_order": sys.byteorder,
            "workers": self.workers,
            "sync": self.policy.spec,
            "faults": asdict(self.faults),
            "rule": {
                "name": self.rule.name,
                "planes": list(self.rule.planes),
                "initial": list(self.rule.initial),
                "code": self.rule.digest,
            },
            "groups": self.groups,
            "extra_bytes": self.extra_bytes,
            "gradient_type": self.gradient_type,
            "owner_lanes": list(self.owner_lanes),
            "slot_owners": list(self.slot_owners),
            "server": self.server,
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "carried": [asdict(parameter) for parameter in self.carried],
        }
        return json.dumps(description, sort_keys=True, separators=(",", ":"))

    def digest(self) -> bytes:
        """SHA-256 of the text: 32 bytes."""
        return hashlib.sha256(self.text().encode()).digest()


@dataclass(frozen=True)
class Description:
    """What a process that only reads a job must know of its layout."""

    parameters: tuple[Parameter, ...]
    carried: tuple[Parameter, ...]
    workers: int
    continues: bool  # without a lost worker

    @staticmethod
    def of(text: str) -> "Description":
        """The description in a layout's text. Raises ValueError for another text."""
        try:
            found = json.loads(text)
            parameters, carried = (
                tuple(Parameter(**{**row, "shape": tuple(row["shape"]), "stride": tuple(row["stride"])}) for row in rows)
                for rows in (found["parameters"], found["carried"])
            )
            _check_carried(carried)
            continues = found["faults"]["on_worker_loss"] == "continue"
            return Description(parameters, carried, int(found["workers"]), continues)
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"expected the description of a job, found {text[:60]!r}") from error


def place(
    parameters: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], int]],
    shards: int = 1,
    tables: Container[int] = frozenset(),
    types: Sequence[str] = (),
) -> tuple[Parameter, ...]:
    """Lay out parameters (name, shape, stride, group) one after the other, each from the start of a cache line.

    The parameters are split into at most `shards` runs of about equal length; no parameter is split. `tables` has the numbers
    of the parameters that are tables. `types`: the type of each; default: float32.

    >>> [p.offset for p in place([("a", (3,), (1,), 0), ("b", (2, 2), (2, 1), 0)])]
    [0, 16]
    """
    placed: list[Parameter] = []
    offset = 0
    for index, (name, shape, stride, group) in enumerate(parameters):
        kind = types[index] if types else "float32"
        parameter = Parameter(name, tuple(shape), tuple(stride), group, offset, is_table=index in tables, type=kind)
        placed.append(parameter)
        offset += aligned(parameter.length)
    return tuple(_sharded(placed, min(shards, len(placed)), offset))


def place_carried(
    tensors: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], str]], shard: int = 0
) -> tuple[Parameter, ...]:
    """Lay out carried tensors (name, shape, stride, type) behind the line of marks, each from the start of a cache line.

    >>> [p.offset for p in place_carried([("mean", (3,), (1,), "float32"), ("count", (), (), "int64")])]
    [16, 32]
    """
    placed: list[Parameter] = []
    offset = arena.LINE_FLOATS
    for name, shape, stride, kind in tensors:
        placed.append(Parameter(name, tuple(shape), tuple(stride), 0, offset, shard, type=kind, is_carried=True))
        offset += aligned(-(-placed[-1].nbytes // 4))
    return tuple(placed)


def _check_carried(carried: tuple[Parameter, ...]) -> None:
    """Raise ValueError unless these, which another process describes, lie as `place_carried` lays them out."""
    numbers = [number for each in carried for number in (*each.shape, *each.stride, each.shard)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("expected sizes of 0 or more")
    rows = [(each.name, each.shape, each.stride, each.type) for each in carried]
    if carried != place_carried(rows, carried[0].shard if carried else 0):
        raise ValueError("expected carried tensors one after the other")


def carried_bytes(carried: Sequence[Parameter]) -> int:
    """The bytes of what a version carries, a line of marks included; 0 for nothing."""
    return 4 * (carried[-1].offset + aligned(-(-carried[-1].nbytes // 4))) if carried else 0


def _sharded(placed: list[Parameter], shards: int, total: int) -> list[Parameter]:
    """Assign each parameter to the shard in whose share of the floats it begins. No shard stays empty."""
    numbered: list[Parameter] = []
    shard = 0
    for index, parameter in enumerate(placed):
        left_for_others = len(placed) - index == shards - 1 - shard
        if index and shard + 1 < shards and (left_for_others or parameter.offset * shards >= total * (shard + 1)):
            shard += 1
        numbered.append(replace(parameter, shard=shard))
    return numbered


def first_difference(mine: str, theirs: str) -> str:
    """One sentence that names the first difference between two layouts; `mine` is "here"."""
    try:
        return _first_difference(json.loads(mine), json.loads(theirs))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "there the description is not one of fastps"


def _first_difference(own: Any, other: Any) -> str:
    for key in ("abi", "byte_order", "workers", "sync", "faults", "rule", "groups", "owner_lanes", "slot_owners", "server"):
        if own.get(key) != other.get(key):
            return f"here {key.replace('_', ' ')} is {json.dumps(own.get(key))}, there it is {json.dumps(other.get(key))}"
    for index in range(max(len(own["parameters"]), len(other["parameters"]))):
        here, there = (layout["parameters"][index] if index < len(layout["parameters"]) else None for layout in (own, other))
        if here != there:
            names, others = ([each["name"] for each in layout["parameters"]] for layout in (own, other))
            if here and there and names != others and sorted(names) == sorted(others):
                return (
                    f"parameter {index} is {here['name']!r} here and {there['name']!r} there: give all optimizers the"
                    " parameters in one order (model.parameters(), not a set)"
                )
            return f"parameter {index}: here {_parameter_shown(here)}, there {_parameter_shown(there)}"
    for here, there in itertools.zip_longest(own["carried"], other["carried"]):
        if here != there:
            return f"model buffer: here {_parameter_shown(here)}, there {_parameter_shown(there)}"
    return f"here model buffers take {own.get('extra_bytes')} bytes, there {other.get('extra_bytes')}"


def _parameter_shown(parameter: dict[str, object] | None) -> str:
    if parameter is None:
        return "there is none"
    shown = [f"{key} {parameter.get(key)}" for key in ("shape", "stride", "group", "type")]
    kind = ", a table" if parameter.get("is_table") else ""
    return f"{parameter['name']!r} has {', '.join(shown)}{kind}"


def aligned(length: int) -> int:
    """Round a length up to whole cache lines. An empty parameter gets a line too, so no two parameters share an offset."""
    return max(1, -(-length // arena.LINE_FLOATS)) * arena.LINE_FLOATS
