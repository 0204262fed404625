"""What the nodes of a job of replicas say of the next version before they make it: a row each, exchanged at node 0.

Where each node is a replica, node 0's home holds no weights. Its model is a table with a row for each node. A node pushes its
row, and the version that the home makes of the pushes has the rows of the nodes that take part. So the compiled scheduler and
the sessions decide which nodes a version is made of, as they decide between workers, and all nodes read the same rows.

What another node says is checked as it is read.
"""

import enum
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import ProtocolError
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout, Parameter, aligned
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Hyper, Rule
from fastps.kernels.combining.fold_call import FoldCall
from fastps.kernels.shm.counts import MAX_LANES
from fastps.kernels.update import fold
from fastps.network.messages import MOST_GRADIENTS, MOST_SAMPLES
from fastps.network.sums import Terms, pack, payload_bytes, unpack
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining

_FIXED = struct.Struct("<IiqqqQQQQqII")
_WROTE, _TELLS = 1, 2
MOST_PARTS = 56  # a bit each in `Row.stale`


class RowKind(enum.IntEnum):
    """What a node does in an exchange of rows.

    JOIN: it has no state yet, or begins with that of its script. START: its workers have attached. STEP: it makes a version, of
    `weight` gradients. LEFT: its workers have left, and it makes the versions of the others. END: all nodes have said LEFT.
    BUFFERS: its workers average their models' buffers.
    """

    JOIN = 1
    START = 2
    STEP = 3
    LEFT = 4
    END = 5
    BUFFERS = 6


@dataclass(frozen=True)
class Row:
    """What one node says."""

    kind: RowKind
    terms: Terms  # of its sum
    version: int = -1  # the versions that its state has; -1: it has no state
    weight: int = 0  # gradients in its sum
    samples: int = 0  # in its sum
    size: int = 0  # the bytes of its workers' buffers
    nonce: int = 0  # a random number of this row; the lowest node's names the next group
    group: int = 0  # the nonce that named the group which it is in; 0: it is in none
    stale: int = 0  # a bit for each part whose sum it has begun in another form than it counts, and why
    begun: int = 0  # parts whose sums it has begun
    dropped: int = 0  # pushes that it has dropped since the last exchange, because they were not finite
    digest: tuple[int, int] = (-1, 0)  # a version, and the CRC-32 of its weights; -1: none
    wrote: bool = False  # whether its workers have published weights or state since its last version
    workers: int = 0  # of the node
    tells: bool = False  # whether all nodes bring their workers' counters, if it is the first node

    def pack(self) -> bytes:
        """The row in `row_bytes` bytes, or fewer."""
        numbers = self.version, self.weight, self.samples, self.size, self.nonce, self.group, self.stale
        flags = _WROTE * self.wrote | _TELLS * self.tells
        return _FIXED.pack(
            self.kind | flags << 8 | self.begun << 16, self.dropped, *numbers, *self.digest, self.workers
        ) + pack(self.terms)

    @staticmethod
    def unpack(data: bytes, rule: Rule, groups: int, parameters: int) -> "Row | None":
        """The row of `pack`; None for that of a node that takes no part. Raises ProtocolError for what no node says."""
        word, dropped, version, weight, samples, size, nonce, group, stale, *digest, workers = _FIXED.unpack_from(data)
        if not word:
            return None
        kind, flags, begun = word & 0xFF, word >> 8 & 0xFF, word >> 16
        if kind not in RowKind.__members__.values() or flags & ~(_WROTE | _TELLS):
            raise ProtocolError(f"expected a row of a known kind, found kind {kind} and flags {flags}")
        if begun > MOST_PARTS or stale >> 60:
            raise ProtocolError(
                f"expected a row of at most {MOST_PARTS} sums, found {begun}, and of them {stale:#x} to be repeated"
            )
        if not (-1 <= version < 1 << 62 and 0 <= weight <= MOST_GRADIENTS and 0 <= samples <= MOST_SAMPLES):
            raise ProtocolError(
                f"expected a row of 0 to {MOST_GRADIENTS} gradients, found {weight} of version {version} over {samples} samples"
            )
        if not (0 <= size < 1 << 40 and 0 <= dropped <= MOST_GRADIENTS and workers <= MAX_LANES):
            raise ProtocolError(
                f"expected a row of at most {MAX_LANES} workers, found {workers} with {size} bytes of buffers and {dropped}"
                " dropped gradients"
            )
        end = _FIXED.size + payload_bytes(groups, parameters)
        terms = unpack(data[_FIXED.size : end], rule, groups, parameters)
        counted = weight, samples, size, nonce, group, stale, begun, dropped, (digest[0], digest[1])
        return Row(RowKind(kind), terms, version, *counted, bool(flags & _WROTE), workers, bool(flags & _TELLS))


@dataclass(frozen=True)
class Table:
    """The form of a job's rows: what `model`, whose lanes are the nodes, needs in each.

    Attributes:
        floats: of one row.
        layout: of the home's arena, a model of one parameter: all rows, one after the other.
    """

    model: Layout
    floats: int = field(init=False)
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        size = _FIXED.size + payload_bytes(self.model.groups, len(self.model.parameters))
        object.__setattr__(self, "floats", aligned(-(-size // 4)))
        floats = self.model.workers * self.floats
        parameter = Parameter(f"rows of {self.model.digest().hex()}", (floats,), (1,), 0, 0)
        faults = FaultPolicy(self.model.faults.on_worker_loss, "allow")
        layout = replace(
            self.model,
            parameters=(parameter,),
            groups=1,
            rule=Rule("rows", fold.RULES["sgd"], ()),
            policy=parse_policy("bsp"),
            faults=faults,
            gradient_type="float32",
            extra_bytes=0,
            carried=(),
            max_readers=0,
        )
        object.__setattr__(self, "layout", layout)

    def written(self, node: int, row: Row) -> torch.Tensor:
        """A push: a table with one node's row."""
        whole = torch.zeros(self.model.workers * self.floats)
        data = row.pack()
        begin = 4 * node * self.floats
        whole.numpy().view(np.uint8)[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        return whole

    def check(self, node: int, memory: npt.NDArray[np.uint8]) -> None:
        """Check the table that a node pushes, of which its own row counts. Raises ProtocolError."""
        begin = 4 * node * self.floats
        row = memory[begin : begin + 4 * self.floats].tobytes()
        if Row.unpack(row, self.model.rule, self.model.groups, len(self.model.parameters)) is None:
            raise ProtocolError(f"expected a row of node {node}, found none")

    def read(self, table: torch.Tensor) -> dict[int, Row]:
        """The rows of the nodes that take part, by node. Raises ProtocolError."""
        found = {}
        for node, words in enumerate(table.numpy().reshape(self.model.workers, self.floats)):
            row = Row.unpack(words.tobytes(), self.model.rule, self.model.groups, len(self.model.parameters))
            if row is not None:
                found[node] = row
        return found


class RowFolds(Combining):
    """The part of a lane of a home of rows that folds: a version has the rows that were pushed for it, and no others."""

    def __init__(self, worker: AttachedLane) -> None:
        super().__init__(worker)
        self._store = worker.store
        worker.lane.fold_with(self._fold, [0])

    def _fold(self, call: FoldCall) -> None:
        store, nodes = self._store, self._store.layout.workers
        rows = self._rows(store.arena.weights_offset(call.weights_out), nodes)
        rows[:] = 0
        for push in call.pushes:
            rows[push.lane] = self._rows(store.arena.gradient_offset(push.lane, push.slot), nodes)[push.lane]

    def _rows(self, offset: int, nodes: int) -> npt.NDArray[np.uint32]:
        floats = self._store.layout.buffer_floats
        return np.frombuffer(self._store.memory, np.uint32, floats, offset).reshape(nodes, -1)


def common_terms(rows: Sequence[Row]) -> Terms:
    """The terms of a version: every parameter that any node's sum has, the mean of the rates, and the rest of the first node.

    The mean is weighted by gradients, as a fold of all pushes at once makes it. `rows` are those with a weight, by node.
    """
    total = sum(row.weight for row in rows)
    rates = [
        math.fsum(row.weight * row.terms.hypers[group].learning_rate for row in rows) / total
        for group in range(len(rows[0].terms.hypers))
    ]
    are_equal = all(row.terms.hypers == rows[0].terms.hypers for row in rows)
    hypers = [
        hyper if are_equal else hyper._replace(learning_rate=rate)
        for hyper, rate in zip(rows[0].terms.hypers, rates, strict=True)
    ]
    return Terms(hypers, np.logical_or.reduce([row.terms.present for row in rows]))


def no_terms(layout: Layout, hypers: Sequence[Hyper]) -> Terms:
    """The terms of a node that has no sum."""
    return Terms(list(hypers), np.zeros(len(layout.parameters), np.bool_))


def differing(rows: dict[int, Row]) -> Iterator[str]:
    """What says that nodes have other weights at one version, of each that differs from the first node."""
    told = {node: row.digest for node, row in rows.items() if row.digest[0] >= 0}
    for node, (version, digest) in told.items():
        first = next(other for other, (at, _) in told.items() if at == version)
        if told[first][1] != digest:
            yield (
                f"node {node} has other weights at version {version} than node {first}: expected equal bits on all nodes;"
                " resume from a checkpoint, and look at the memory and the processor of that machine"
            )
