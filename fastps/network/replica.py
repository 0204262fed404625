"""A replica: a leaf whose node has the whole state. All nodes fold the same sums, so their weights have the same bits.

A version is made in three steps. Each node begins to sum the gradients of its workers over all nodes, by parts. The nodes
exchange rows at node 0, which say what each brings, and which nodes the version is made of. Each node then applies the script's
rule to the parts as their sums arrive.

Where a sum is lost (a node came or is gone, or a connection was reset), the nodes exchange rows again, form another group, and
begin the sums again from the workers' slots. A node that has made a version that another has not, or that has state which the
others lack, gives them all of its state. So each push counts once, on all nodes.
"""

import contextlib
import logging
import math
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fastps.errors import NodeLostError, ProtocolError
from fastps.job.nodes import Nodes
from fastps.job.update_rules import Hyper
from fastps.kernels.combining.fold_call import FoldCall
from fastps.kernels.update import fold
from fastps.membership.job_memory import JobMemory
from fastps.network.gathering import buffers_of, buffers_size, counters_of, counters_size, put_buffers, read_counters
from fastps.network.group import Group, GroupLostError, Groups
from fastps.network.group_sums import GroupSums, Rows
from fastps.network.leaf import Upstream
from fastps.network.messages import MOST_SAMPLES, Header, Kind
from fastps.network.monitoring.report import Report
from fastps.network.replica_state import LocalPush, ReplicaMemory, State, local_pushes
from fastps.network.rows import Row, RowKind, Table, common_terms, differing, no_terms
from fastps.network.spare import Spare, VersionBuffers
from fastps.network.sums import Terms
from fastps.store.lane_room import FINAL, LaneRooms, PublishedState

logger = logging.getLogger("fastps.network")
_DIGEST_EVERY = 1024  # versions
_TELL_NS = 1_000_000_000  # between two exchanges of counters
_MOST_LOSSES = 8  # of groups, in a row
_ROW_TERMS = Terms([Hyper(0.0)], np.ones(1, np.bool_))  # of a push of a home of rows


@dataclass
class Own:
    """What this node does in an exchange, and with which pushes."""

    kind: RowKind
    spare: Spare
    pushes: list[LocalPush] = field(default_factory=list)
    terms: Terms | None = None
    samples: int = 0
    loss: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """What an exchange has led to: the rows, and for each push the parameter that is not finite, or -1; None: none is told."""

    rows: Rows
    told: list[int] | None = None
    has_buffers: bool = False  # whether the buffers of all nodes' workers are in the rooms


class Replica:
    """The fold of a replica's arena. The model of `table` has the nodes as workers. The script begins with `hypers`."""

    def __init__(
        self, store: JobMemory, nodes: Nodes, table: Table, hypers: Sequence[Hyper], upstream: Upstream, groups: Groups,
        report: Report,
    ) -> None:  # fmt: skip
        self.nodes, self._store, self._table = nodes, store, table
        self._upstream, self._report = upstream, report
        self._memory, self._rooms = ReplicaMemory(store), LaneRooms(store, table.model.extra_bytes)
        self._published = PublishedState(self._rooms)
        self._sums = GroupSums(store, nodes, groups, self._memory, self._rooms, upstream)
        self._told_ns = 0  # when this node last asked for all workers' counters
        self._no_terms = no_terms(table.model, hypers)
        self._version = -1  # of this node's state; -1: it has none
        self._lane = 0  # how many lanes the home had given this node at the last exchange
        self._before: State | None = None  # what the next version begins from, if not from the published buffers
        self._is_again = False  # whether the version's first result was not finite
        self._dropped = 0  # pushes since the last exchange that were not finite
        self._digest = (-1, 0)
        self._rows = torch.zeros(table.layout.buffer_floats)
        report.groups = groups

    def begin(self) -> None:
        """Take the state with which this node begins, before any worker reads it: node 0's, or that of a running job."""
        self._upstream.begin(self._rows)
        self._lane = self._upstream.lanes_taken
        if self.nodes.is_first:
            self._version = self._store.version

        @contextlib.contextmanager
        def first() -> Iterator[VersionBuffers]:
            yield VersionBuffers(0, 0, 0, 0)

        self._agree(Own(RowKind.JOIN, first))

    def start(self, spare: Spare) -> None:
        """Wait until the workers of all nodes have attached; those of this node have."""
        while any(row.kind == RowKind.JOIN for row in self._agree(Own(RowKind.START, spare)).rows.values()):
            pass
        self._rooms.have_started = True

    def attend(self, spare: Spare) -> None:
        """Begin the sums of what the workers have marked, and exchange models' buffers if all live workers wait for them."""
        with contextlib.suppress(GroupLostError):  # the next rows show that
            self._sums.begin_early()
        if number := self._rooms.due():
            while not self._agree(Own(RowKind.BUFFERS, spare)).has_buffers:
                pass
            self._rooms.gathered = number

    def fold(self, call: FoldCall) -> list[int] | None:
        """Make one version; the function given to Lane.fold_with. Raises NodeLostError."""
        pushes, terms = local_pushes(self._store, call.pushes)
        if terms is not None:
            self._no_terms = no_terms(self._table.model, terms.hypers)
        buffers = VersionBuffers(call.weights_in, call.weights_out, call.state_in, call.state_out)
        samples = sum(push.samples for push in call.pushes)
        losses = [float(self._store.arena.counters(push.lane)["loss"]) for push in pushes]
        loss = sum(losses) / len(losses) if losses else math.nan
        own = Own(RowKind.STEP, lambda: contextlib.nullcontext(buffers), pushes, terms, samples, loss)
        return self._agree(own).told

    def finish(self, spare: Spare) -> None:
        """Make the versions of the other nodes, until the workers of all have left."""
        kind = RowKind.LEFT
        while True:
            outcome = self._agree(Own(kind, spare))
            kinds = {row.kind for row in outcome.rows.values()}
            if kinds == {RowKind.END}:
                self._exchange_counters(outcome.rows)
                self._rooms.gathered = FINAL
                break
            if kinds <= {RowKind.LEFT, RowKind.END}:
                kind = RowKind.END
                with spare() as buffers:
                    self._note_digest(buffers.weights_in, buffers.state_in)
        self._upstream.finish(self._rows)

    def check(self) -> None:
        """Raise NodeLostError if the home is lost or has failed."""
        self._upstream.check()

    def end(self, failure: str | None) -> None:
        """End what is under way: nothing, because a version is made in a fold."""

    # -- an exchange of rows, and what follows from it ---------------------------------------------------

    def _agree(self, own: Own) -> Outcome:
        """Exchange rows until this node's own has counted, and do what they say. Raises NodeLostError, ProtocolError."""
        losses = 0
        while True:
            if own.kind == RowKind.STEP:
                with contextlib.suppress(GroupLostError):  # the rows then show that the group is lost
                    self._sums.begin(own.pushes)
            rows = self._exchange(own)
            try:
                outcome = self._follow(own, rows)
            except GroupLostError as error:
                self._sums.lose_group()
                losses += 1
                logger.info("node %d: the group is lost (%s)", self.nodes.number, error)
                if losses >= _MOST_LOSSES:
                    raise NodeLostError(f"node {self.nodes.number} lost the other nodes {losses} times: {error}") from error
                continue
            if outcome is not None:
                return outcome

    def _exchange(self, own: Own) -> Rows:
        """Push this node's row, and take those of the nodes that take part."""
        began_ns = self._store.clock.now_ns()
        header = Header(Kind.PUSH, weight=1, samples=min(own.samples, MOST_SAMPLES), loss=own.loss)
        try:
            while True:
                sent = self._table.written(self.nodes.number, self._row(own))
                self._upstream.step(header, sent_as(sent), self._rows, self._rows)
                if self._upstream.lanes_taken == self._lane:
                    break
                # The node was lost meanwhile, and has joined again: the others have gone on without it.
                self._lane, self._version = self._upstream.lanes_taken, -1
                self._sums.lose_group()
        finally:
            self._report.wait_ns += self._store.clock.now_ns() - began_ns
        self._dropped = 0
        rows = self._table.read(self._rows)
        if self.nodes.number not in rows:
            raise ProtocolError(f"expected the row of node {self.nodes.number} among those of nodes {sorted(rows)}")
        for text in differing(rows):
            raise ProtocolError(text)
        return rows

    def _row(self, own: Own) -> Row:
        return Row(
            own.kind, own.terms or self._no_terms, self._version, len(own.pushes), own.samples,
            nonce=secrets.randbits(63) | 1, group=self._sums.group_nonce, stale=self._sums.stale(own.pushes),
            begun=self._sums.begun, dropped=self._dropped, digest=self._digest,
            wrote=self._published.is_new(), size=buffers_size(self._rooms), workers=self._store.layout.lanes,
            tells=self._store.clock.now_ns() - self._told_ns >= _TELL_NS,
        )  # fmt: skip

    def _follow(self, own: Own, rows: Rows) -> Outcome | None:
        """Do what the rows say. None: exchange again. Raises GroupLostError."""
        newest = max(row.version for row in rows.values())
        if newest < 0:
            raise ProtocolError("expected a node that has the job's state, found none")
        wrote = [node for node, row in rows.items() if row.wrote and row.version == newest]
        if wrote or any(row.version < newest for row in rows.values()):
            having = [node for node, row in rows.items() if row.version == newest]
            is_behind = self._share(own, rows, min(wrote or having), is_written=bool(wrote))
            return Outcome(rows) if own.kind == RowKind.JOIN or (is_behind and own.kind == RowKind.STEP) else None
        kinds = {row.kind for row in rows.values()}
        if RowKind.BUFFERS in kinds or kinds == {RowKind.END}:
            return self._exchange_buffers(own, rows, kinds)
        if kinds == {RowKind.START}:
            self._exchange_counters(rows)
        if RowKind.STEP not in kinds:
            return Outcome(rows)
        if kinds <= {RowKind.STEP, RowKind.LEFT, RowKind.END}:
            return self._make(own, rows)
        return Outcome(rows) if own.kind in (RowKind.JOIN, RowKind.START) else None  # a node comes that has no push yet

    def _share(self, own: Own, rows: Rows, source: int, *, is_written: bool) -> bool:
        """Give all nodes the state of one, which those take that are behind, or all if its workers wrote it.

        Returns whether this node was behind.
        """
        group, number = self._sums.form_group(rows), self.nodes.number
        is_behind = rows[number].version < rows[source].version
        with own.spare() as buffers:
            before = self._state_before(buffers)
            state = before if number == source else before.empty()
            self._sums.broadcast(group, [(torch.from_numpy(array), source) for array in state.arrays()])
            if is_written and number != source and own.kind == RowKind.STEP and not is_behind:
                self._before = state
            elif is_behind or (is_written and number != source):
                self._memory.state(buffers.weights_out, buffers.state_out).take(state)
                self._memory.write_halves(buffers.weights_out)
                buffers.is_made, buffers.advances = True, is_behind
                self._before = None
        if is_behind:
            self._version = rows[source].version
        self._published.take()
        return is_behind

    def _make(self, own: Own, rows: Rows) -> Outcome | None:
        """Make a version of the sums. None, or what is told to the core, if it is not finite: then it is made again."""
        group = self._sums.group_of(rows)
        self._sums.begin(own.pushes)
        with own.spare() as buffers:
            if self._fold(group, own, rows, buffers):
                self._version, self._before, self._is_again = self._version + 1, None, False
                buffers.is_made = True
                if self._version % _DIGEST_EVERY == 0:
                    self._note_digest(buffers.weights_out, buffers.state_out)
            is_made = buffers.is_made
        if is_made:
            if rows[min(rows)].tells:
                self._exchange_counters(rows)
            return Outcome(rows)
        told = [self._memory.first_bad(push) for push in own.pushes]
        if self._is_again and not any(row.dropped for row in rows.values()):  # finite gradients, whose result is not
            told = [int(np.flatnonzero(push.present)[0]) for push in own.pushes]
        self._is_again = True
        self._dropped = sum(index >= 0 for index in told)
        return Outcome(rows, told) if self._dropped else None

    def _fold(self, group: Group, own: Own, rows: Rows, buffers: VersionBuffers) -> bool:
        """Apply the rule to the sums as they arrive. Returns whether the result may be published."""
        before, policy = self._state_before(buffers), self._table.model.policy
        pushing = [row for _, row in sorted(rows.items()) if row.weight]
        total = sum(row.weight for row in pushing)
        after = self._memory.state(buffers.weights_out, buffers.state_out)
        if not pushing:
            deque(self._sums.arrive(group, own.pushes, 0), maxlen=0)
            after.take(before)
            self._memory.write_halves(buffers.weights_out)
            return True
        rate_scale = {
            "square-root": math.sqrt(sum(row.samples for row in pushing) / max(1, policy.reference)),
            "linear": float(total),
        }.get(policy.scale, 1.0)
        folding = self._memory.folding(common_terms(pushing), total, rate_scale, before, buffers)
        is_summing = self._table.model.rule.number == fold.RULE_SUMMING
        checks, is_finite = self._store.layout.faults.nonfinite != "allow", True
        for first, last in self._sums.arrive(group, own.pushes, self._sums.stale_of(rows)):
            if not is_summing:
                folding.run(first, last)
                is_finite = is_finite and (not checks or self._memory.is_finite(buffers, first, last))
        if is_summing:
            folding.run(0, self._memory.numbers)
            is_finite = not checks or self._memory.is_finite(buffers, 0, self._memory.numbers)
        return is_finite

    def _state_before(self, buffers: VersionBuffers) -> State:
        return self._before or self._memory.state(buffers.weights_in, buffers.state_in)

    def _note_digest(self, weights: int, state: int) -> None:
        self._digest = self._version, zlib.crc32(self._memory.state(weights, state).weights)

    # -- what the nodes bring besides ----------------------------------------------------------------------

    def _exchange_buffers(self, own: Own, rows: Rows, kinds: set[RowKind]) -> Outcome | None:
        """Write the buffers of the other nodes' workers into the rooms, if the workers of all nodes wait for them or have left.

        Raises ProtocolError if those of a node make a step instead.
        """
        if not kinds <= {RowKind.BUFFERS, RowKind.LEFT, RowKind.END}:
            if RowKind.STEP in kinds:
                waiting, stepping = (
                    next(node for node, row in rows.items() if row.kind == kind) for kind in (RowKind.BUFFERS, RowKind.STEP)
                )
                raise ProtocolError(
                    f"the workers of node {waiting} average their buffers, and those of node {stepping} make a step: expected"
                    " average_buffers() equally often, and between the same steps, in all workers"
                )
            return None if own.kind == RowKind.BUFFERS else Outcome(rows)
        sizes = {node: row.size for node, row in rows.items()}
        if any(sizes.values()):
            with own.spare():
                put_buffers(self._rooms, self._sums.gather(rows, sizes, buffers_of(self._rooms)), self.nodes.number)
        return Outcome(rows, has_buffers=True)

    def _exchange_counters(self, rows: Rows) -> None:
        """Show the counters of all nodes' workers on the board."""
        self._told_ns, kinds = self._store.clock.now_ns(), {row.kind for row in rows.values()}
        sizes = {node: counters_size(row.workers) for node, row in rows.items()}
        try:
            blocks = self._sums.gather(rows, sizes, counters_of(self._store.arena), are_over=RowKind.STEP in kinds)
        except GroupLostError as error:  # the next version shows that; this one is made
            logger.info("node %d: the counters of the workers did not come: %s", self.nodes.number, error)
            self._sums.lose_group()
            return
        self._report.show_workers([row.pack() for row in read_counters(blocks)])


def sent_as(table: torch.Tensor) -> Callable[[Sequence[torch.Tensor], int], tuple[Terms, Iterator[torch.Tensor]]]:
    """A table of rows as what a leaf sends to its home."""

    def begin(outs: Sequence[torch.Tensor], first: int) -> tuple[Terms, Iterator[torch.Tensor]]:
        def chunks() -> Iterator[torch.Tensor]:
            at = first
            for out in outs:
                yield table[at : at + len(out)]
                at += len(out)

        return _ROW_TERMS, chunks()

    return begin
