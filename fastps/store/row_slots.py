"""What a push has: rows of a job's tables (checks, memory, the collection of equal rows), and the bitmap of its parameters."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fastps.errors import UnsupportedError, UsageError
from fastps.job.layout import Parameter
from fastps.job.policy import Policy
from fastps.job.update_rules import UPDATE_RULES, Hyper, Rule
from fastps.kernels.protocol.row_writer import RowWriter
from fastps.kernels.rows import rows
from fastps.membership.job_memory import JobMemory
from fastps.system import shared_memory

_LEAST_ROWS = 1024  # memory is reserved for at least so many rows at a time


class RowSlots:
    """The rows in the slots of one lane. Only one thread may use it."""

    def __init__(self, store: JobMemory, lane: int) -> None:
        self._store = store
        self._lane = lane
        self._writer = RowWriter(store.arena, lane)
        self._reserved: dict[tuple[int, int], int] = {}  # by slot and table: rows

    def number_of(self, name: str) -> int:
        """The number of the table of this name among the parameters. Raises UsageError."""
        names = {self._store.layout.parameters[index].name: index for index in self._store.tables}
        if name not in names:
            raise UsageError(f"expected the name of a table ({', '.join(names) or 'the job has none'}), found {name!r}")
        return names[name]

    def put(self, slot: int, parameter: int, numbers: npt.ArrayLike, values: npt.ArrayLike) -> int:
        """Write rows of a table into a slot, in place of those that it had. Returns how many different rows these are.

        `parameter` is the table's number among the parameters. `numbers` are int64, one a row, and `values` float32 of shape
        (rows, width of the table); those of equal numbers are summed. Raises UsageError for a number out of range or values of
        another shape, and ArenaError without memory; the slot then has the rows that it had.
        """
        table, described = self._store.tables.index(parameter), self._store.layout.parameters[parameter]
        wanted = np.ascontiguousarray(numbers, np.int64).reshape(-1)
        given = np.ascontiguousarray(values, np.float32)
        if given.shape != (len(wanted), described.shape[1]):
            raise UsageError(
                f"table {described.name!r}: expected values of shape ({len(wanted)}, {described.shape[1]}), one row for each"
                f" number, found {given.shape}"
            )
        outside = self._writer.outside(table, wanted)
        if outside >= 0:
            raise UsageError(
                f"table {described.name!r}: expected rows 0 to {described.shape[0] - 1}, found row {wanted[outside]}; nothing"
                " was pushed"
            )
        self._reserve(slot, table, min(len(wanted), described.shape[0]), described.shape[0])
        return int(self._writer.collect(slot, table, wanted, given))

    def values(self, slot: int, parameter: int) -> npt.NDArray[np.float32]:
        """The values of a table's rows in a slot, one row for each different number. Valid until the next push."""
        return self._store.pushed_rows(self._lane, slot, parameter)[1]

    def counts(self, slot: int, present: bytes) -> list[int]:
        """How many rows of each shard's tables a push of this slot has; none without tables. `present`: its presence bitmap."""
        if not self._store.tables:
            return []
        found, bits = [0] * self._store.arena.shards, int.from_bytes(present, "little")
        for parameter in self._store.tables:
            if bits >> parameter & 1:
                found[self._store.layout.parameters[parameter].shard] += len(self.values(slot, parameter))
        return found

    def _reserve(self, slot: int, table: int, count: int, most: int) -> None:
        """Allocate memory for so many rows in the slot, and for the log of a fold that writes them."""
        reserved = self._reserved.get((slot, table), 0)
        if count <= reserved:
            return
        wanted = min(most, max(2 * reserved, count, _LEAST_ROWS))
        arena, descriptor = self._store.arena, self._store.descriptor
        what = f"a push of {count:,} rows of {self._store.layout.parameters[self._store.tables[table]].name!r}"
        for offset, length in arena.table_slot_ranges(self._lane, slot, table, wanted):
            shared_memory.allocate(descriptor, offset, length, what)
        offset, room, _ = arena.undo_range(table)
        shared_memory.allocate(descriptor, offset, min(room, self._writer.reserve(table, wanted - reserved)), what)
        self._reserved[slot, table] = wanted


def check_tables(
    arrays: Mapping[str, npt.NDArray[np.float32]], tables: Collection[str], rule: Rule, policy: Policy, hyper: Hyper
) -> set[int]:
    """The numbers of the parameters that are tables. Raises UsageError, UnsupportedError."""
    if isinstance(tables, str) or not set(tables) <= set(arrays):
        raise UsageError(f"tables: expected names of parameters ({', '.join(arrays)}), found {tables!r}")
    names = list(arrays)
    check_rows(rule, policy, [(name, arrays[name].shape, hyper) for name in tables], len(arrays))
    return {names.index(name) for name in tables}


def check_rows(rule: Rule, policy: Policy, tables: Sequence[tuple[str, tuple[int, ...], Hyper]], parameters: int) -> None:
    """Raise UnsupportedError for tables that a job's rule or policy cannot have, and for a rule that needs tables only.

    `tables`: the name, the shape and the hyper-parameters of each; `parameters`: how many the job has, tables included.
    """
    row = None if rule.address else UPDATE_RULES.get(rule.name)  # a user's rule may have the name of another
    if tables and (row is None or not row.row_rule):
        known = ", ".join(name for name, each in UPDATE_RULES.items() if each.row_rule)
        raise UnsupportedError(
            f"expected a rule for rows of tables ({known}), found {rule.name}: give the tables an optimizer of their own (SGD,"
            " Adagrad, SparseAdam, RowWiseAdagrad), or build the layers with sparse=False"
        )
    if row is not None and row.only_rows and len(tables) < parameters:
        raise UnsupportedError(
            f"{rule.name}: expected tables only (layers with sparse=True), found a dense parameter: give the dense parameters"
            " an optimizer of their own"
        )
    if tables and policy.ema:
        raise UnsupportedError(
            f"sync {policy.spec!r}: expected no moving average of the weights beside tables, because it changes every row at"
            " every update; leave ema= out"
        )
    if tables and policy.warm_up:
        raise UnsupportedError(
            'sync="auto" moves the job to another arena after its warm-up: expected no tables, which lie in memory once; choose'
            " a discipline"
        )
    for name, shape, hyper in tables:
        if len(shape) != 2 or not 1 <= shape[0] <= rows.MAX_ROWS or shape[1] < 1:
            is_dense = "it is no table: give dense parameters an optimizer of their own (Adam beside SparseAdam)"
            cure = "build the layer with sparse=False" if len(shape) == 2 else is_dense
            raise UnsupportedError(
                f"table {name!r}: expected a matrix of 1 to {rows.MAX_ROWS:,} rows, found shape {tuple(shape)}; {cure}"
            )
        if hyper.momentum or hyper.weight_decay:  # torch refuses these, too
            raise UnsupportedError(
                f"{rule.name}: expected momentum 0 and weight_decay 0 for tables, found momentum={hyper.momentum:g} and"
                f" weight_decay={hyper.weight_decay:g}, which would change rows without a gradient; give the tables a"
                " param_group or an optimizer of their own"
            )


def presence_of(present: Iterable[int], parameters: int) -> bytes:
    """The bitmap of the parameters that have a gradient, as little-endian uint64 words.

    >>> presence_of([0, 2], 3)[0]
    5
    """
    bits = sum(1 << index for index in present)
    return bits.to_bytes(8 * -(-parameters // 64), "little")


class Presence:
    """What a push has whose caller says nothing: all dense parameters, and the tables whose rows were given."""

    def __init__(self, parameters: tuple[Parameter, ...]) -> None:
        self._dense = [index for index, parameter in enumerate(parameters) if not parameter.is_table]
        self._count = len(parameters)
        self._everything = presence_of(range(self._count), self._count)
        self._given: set[int] = set()

    def add(self, table: int) -> None:
        """Let the next push have rows of this table."""
        self._given.add(table)

    def take(self) -> bytes:
        """The bitmap of the next push; the one after it begins without rows."""
        if len(self._dense) == self._count:
            return self._everything
        found = presence_of([*self._dense, *self._given], self._count)
        self._given.clear()
        return found
