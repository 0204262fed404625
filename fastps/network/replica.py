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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed import Work

from fastps.errors import NodeLostError, ProtocolError
from fastps.job.nodes import Nodes
from fastps.job.update_rules import Hyper
from fastps.job.wire import CHUNK_BYTES, part_count
from fastps.kernels.combining.fold_call import FoldCall
from fastps.kernels.update import fold
from fastps.membership.job_memory import JobMemory
from fastps.network.group import Group, GroupLostError, Groups
from fastps.network.leaf import Upstream
from fastps.network.messages import MOST_SAMPLES, Header, Kind
from fastps.network.monitoring.report import Report
from fastps.network.places import Places, Spare
from fastps.network.replica_state import LocalPush, ReplicaMemory, State, local_pushes
from fastps.network.rows import Row, RowKind, Table, common_terms, differing, no_terms
from fastps.network.sums import Terms
from fastps.store.replica_words import PublishedState, ReplicaWords

logger = logging.getLogger("fastps.network")
_DIGEST_EVERY = 1024  # versions
_MOST_LOSSES = 8  # of groups, in a row
_PATIENCE = 4.0  # a sum may take so many node timeouts for each chunk, once the rows have come
_ROW_TERMS = Terms([Hyper(0.0)], np.ones(1, np.bool_))  # of a push of a home of rows
Rows = Mapping[int, Row]


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


class Replica:
    """The fold of a replica's arena. The model of `table` has the nodes as workers. The script begins with `hypers`."""

    def __init__(
        self, store: JobMemory, nodes: Nodes, table: Table, hypers: Sequence[Hyper], upstream: Upstream, groups: Groups,
        report: Report,
    ) -> None:  # fmt: skip
        self.nodes, self._store, self._table = nodes, store, table
        self._upstream, self._groups, self._report = upstream, groups, report
        self._memory, self._published = ReplicaMemory(store), PublishedState(store)
        self._no_terms = no_terms(table.model, hypers)
        self._parts = parts_of(self._memory.numbers)
        self._version = -1  # of this node's state; -1: it has none
        self._lane = 0  # how many lanes the home had given this node at the last exchange
        self._losses = 0  # how many nodes were lost when the group was formed
        self._works: list[Work | None] = []  # the sums under way, of the first parts
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
        def first() -> Iterator[Places]:
            yield Places(0, 0, 0, 0)

        self._settle(Own(RowKind.JOIN, first))

    def start(self, spare: Spare) -> None:
        """Wait until the workers of all nodes have attached; those of this node have."""
        while any(row.kind == RowKind.JOIN for row in self._settle(Own(RowKind.START, spare)).rows.values()):
            pass
        ReplicaWords(self._store).set_started()

    def fold(self, call: FoldCall) -> list[int] | None:
        """Make one version; the function given to Lane.fold_with. Raises NodeLostError."""
        pushes, terms = local_pushes(self._store, call.pushes)
        if terms is not None:
            self._no_terms = no_terms(self._table.model, terms.hypers)
        places = Places(call.weights_in, call.weights_out, call.state_in, call.state_out)
        samples = sum(push.samples for push in call.pushes)
        losses = [float(self._store.arena.counters(push.lane)["loss"]) for push in pushes]
        loss = sum(losses) / len(losses) if losses else math.nan
        own = Own(RowKind.STEP, lambda: contextlib.nullcontext(places), pushes, terms, samples, loss)
        return self._settle(own).told

    def finish(self, spare: Spare) -> None:
        """Make the versions of the other nodes, until the workers of all have left."""
        kind = RowKind.LEFT
        while True:
            kinds = {row.kind for row in self._settle(Own(kind, spare)).rows.values()}
            if kinds == {RowKind.END}:
                break
            if kinds <= {RowKind.LEFT, RowKind.END}:
                kind = RowKind.END
                with spare() as places:
                    self._note_digest(places.weights_in, places.state_in)
        self._upstream.finish(self._rows)

    def check(self) -> None:
        """Raise NodeLostError if the home is lost or has failed."""
        self._upstream.check()

    def end(self, failure: str | None) -> None:
        """End what is under way: nothing, because a version is made in a fold."""

    # -- an exchange of rows, and what follows from it ---------------------------------------------------

    def _settle(self, own: Own) -> Outcome:
        """Exchange rows until this node's own has counted. Raises NodeLostError, ProtocolError."""
        losses = 0
        while True:
            if own.kind == RowKind.STEP and self._groups.now is not None:
                with contextlib.suppress(GroupLostError):  # the rows then show that the group is lost
                    self._begin_sums(own)
            rows = self._exchange(own)
            try:
                outcome = self._follow(own, rows)
            except GroupLostError as error:
                self._lose_group()
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
                self._lose_group()
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
            nonce=secrets.randbits(63) | 1, group=self._groups.nonce, dropped=self._dropped, digest=self._digest,
            wrote=self._published.is_new(),
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
        if RowKind.STEP not in kinds:
            return Outcome(rows)
        if kinds <= {RowKind.STEP, RowKind.LEFT, RowKind.END}:
            return self._make(own, rows)
        return Outcome(rows) if own.kind in (RowKind.JOIN, RowKind.START) else None  # a node comes that has no push yet

    def _share(self, own: Own, rows: Rows, source: int, *, is_written: bool) -> bool:
        """Give all nodes the state of one, which those take that are behind, or all if its workers wrote it.

        Returns whether this node was behind.
        """
        group, number = self._form_group(rows), self.nodes.number
        is_behind = rows[number].version < rows[source].version
        with own.spare() as places:
            before = self._state_before(places)
            state = before if number == source else before.empty()
            arrays = [torch.from_numpy(array) for array in state.arrays()]
            limit_s = sum(map(self._limit_s, arrays))
            for work in [group.broadcast(array, source) for array in arrays]:
                group.wait(work, limit_s, self._look)
            if is_written and number != source and own.kind == RowKind.STEP and not is_behind:
                self._before = state
            elif is_behind or (is_written and number != source):
                self._memory.state(places.weights_out, places.state_out).take(state)
                self._memory.write_halves(places.weights_out)
                places.is_made, places.advances = True, is_behind
                self._before = None
        if is_behind:
            self._version = rows[source].version
        self._published.take()
        return is_behind

    def _make(self, own: Own, rows: Rows) -> Outcome | None:
        """Make a version of the sums. None, or what is told to the core, if it is not finite: then it is made again."""
        now, members = self._groups.now, tuple(sorted(rows))
        is_whole = now is not None and now.members == members and all(row.group == now.nonce for row in rows.values())
        group = now if is_whole and now is not None else self._form_group(rows)
        self._begin_sums(own)
        with own.spare() as places:
            if self._fold(group, rows, places):
                self._version, self._before, self._is_again = self._version + 1, None, False
                places.is_made = True
                if self._version % _DIGEST_EVERY == 0:
                    self._note_digest(places.weights_out, places.state_out)
                return Outcome(rows)
        told = [self._memory.first_bad(push) for push in own.pushes]
        if self._is_again and not any(row.dropped for row in rows.values()):  # finite gradients, whose result is not
            told = [int(np.flatnonzero(push.present)[0]) for push in own.pushes]
        self._is_again = True
        self._dropped = sum(index >= 0 for index in told)
        return Outcome(rows, told) if self._dropped else None

    def _fold(self, group: Group, rows: Rows, places: Places) -> bool:
        """Apply the rule to the sums as they arrive. Returns whether the result may be published."""
        before, policy = self._state_before(places), self._table.model.policy
        pushing = [row for _, row in sorted(rows.items()) if row.weight]
        total = sum(row.weight for row in pushing)
        after = self._memory.state(places.weights_out, places.state_out)
        if not pushing:
            deque(self._await_sums(group), maxlen=0)
            after.take(before)
            self._memory.write_halves(places.weights_out)
            return True
        rate_scale = {
            "square-root": math.sqrt(sum(row.samples for row in pushing) / max(1, policy.reference)),
            "linear": float(total),
        }.get(policy.scale, 1.0)
        folding = self._memory.folding(common_terms(pushing), total, rate_scale, before, places)
        is_summing = self._table.model.rule.number == fold.RULE_SUMMING
        checks, is_finite = self._store.layout.faults.nonfinite != "allow", True
        for first, last in self._await_sums(group):
            if not is_summing:
                folding.run(first, last)
                is_finite = is_finite and (not checks or self._memory.is_finite(places, first, last))
        if is_summing:
            folding.run(0, self._memory.numbers)
            is_finite = not checks or self._memory.is_finite(places, 0, self._memory.numbers)
        return is_finite

    def _state_before(self, places: Places) -> State:
        return self._before or self._memory.state(places.weights_in, places.state_in)

    def _note_digest(self, weights: int, state: int) -> None:
        self._digest = self._version, zlib.crc32(self._memory.state(weights, state).weights)

    # -- sums over the group -----------------------------------------------------------------------------

    def _begin_sums(self, own: Own) -> None:
        """Begin the sums of the parts whose sums are not under way."""
        group = self._groups.now
        assert group is not None
        for first, last in self._parts[len(self._works) :]:
            self._works.append(group.all_reduce(self._memory.add(own.pushes, first, last)))

    def _await_sums(self, group: Group) -> Iterator[tuple[int, int]]:
        """Wait for the sum of each part in turn; its range."""
        for number, (first, last) in enumerate(self._parts):
            group.wait(self._works[number], self._limit_s(self._memory.sums[first:last]), self._look)
            yield first, last
        self._works = []

    def _form_group(self, rows: Rows) -> Group:
        self._lose_group()
        members, policy = tuple(sorted(rows)), self.nodes.policy
        self._losses = self._upstream.losses
        return self._groups.form(members, rows[members[0]].nonce, policy.timeout_s, self._store.timeout_s)

    def _lose_group(self) -> None:
        if self._works:
            self._works, self._memory.sums = [], torch.zeros_like(self._memory.sums)  # a sum may still write the other
        self._groups.lose()

    def _limit_s(self, tensor: torch.Tensor) -> float:
        return _PATIENCE * self.nodes.policy.timeout_s * max(1.0, tensor.nbytes / CHUNK_BYTES)

    def _look(self) -> None:
        """Raise what ends the wait for a sum."""
        self._upstream.check()
        if self._upstream.losses != self._losses:
            raise GroupLostError("a node was lost")


def parts_of(numbers: int) -> list[tuple[int, int]]:
    """The ranges in which so many numbers are summed, in the order in which backward makes them: the last first."""
    count = part_count(numbers)
    edges = [round(numbers * part / count / 16) * 16 for part in range(count)] + [numbers]
    return [(edges[part], edges[part + 1]) for part in reversed(range(count))]


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
