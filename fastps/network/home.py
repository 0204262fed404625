"""The home: arenas whose workers are nodes, one for each part of the model.

Each arena is an ordinary store, so the compiled scheduler decides between nodes as it does between workers. A node has a lane
in every arena. Its sum is written straight into the lanes' slots, and its weights are read from the pinned buffers.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from fastps.errors import Error, NodeLostError
from fastps.job.layout import Layout
from fastps.job.nodes import Nodes
from fastps.job.update_rules import Hyper
from fastps.kernels.shm.arena import LANE_FREE
from fastps.membership.job_memory import Floats, JobMemory, Views
from fastps.network.link import LinkLostError, Memory
from fastps.network.messages import Header
from fastps.network.parts import Cut, Part, cut_of, whole
from fastps.network.rows import RowFolds, Table
from fastps.network.session import HomeSession
from fastps.network.sums import Outgoing, Terms
from fastps.store.store import StartState, Store
from fastps.store.worker import Worker


class NodeLanes:
    """The lanes of one node, one in each arena. One thread may write and push while another waits and reads."""

    def __init__(self, cut: Cut, workers: list[Worker], within: str, session: HomeSession) -> None:
        self.cut, self.parts = cut, cut.parts
        self.session = session  # what is posted: a push that is sent again over another edge is counted once
        self._workers, self._within = workers, within
        self._pulled = [0] * len(cut.parts)  # the step whose weights each part has pulled
        self._changed = threading.Condition()
        self._is_aborted = False
        self.has_left = False  # whether the node has said that it makes no more steps

    def check_with(self, check: Callable[[], None]) -> None:
        """Call this in every wait from now on."""
        self._is_aborted = False
        for worker in self._workers:
            worker.check = check

    def slots(self, step: int) -> list[tuple[int, Memory]]:
        """The number of each part of a step, and its slot, which may be written once the part's step before is granted."""
        return [(part, _slot(self._workers[part])) for part in self.cut.numbers(step)]

    def push(self, part: int, terms: Terms, header: Header) -> None:
        """Push the contents of a part's slot: a sum of `header.weight` gradients.

        A discipline that folds means divides by the weights. Under the others this divides the sum by its gradients, except
        with within="asp", where each gradient counts as a push.
        """
        worker = self._workers[part]
        worker.lane.weight, worker.loss = header.weight, header.loss
        is_whole = worker.store.layout.policy.is_mean or self._within == "asp"
        scale = 1.0 if is_whole else 1.0 / max(1, header.weight)
        presence = terms.presence_in(self.parts[part].parameters)
        with self._counted(part):
            worker.push(terms.hypers, presence=presence, scale=scale, samples=header.samples)

    def push_nothing(self, step: int) -> None:
        """Make a step without a gradient, in the parts that have not made it."""
        for part in self.cut.numbers(step):
            worker = self._workers[part]
            if self.is_missing(step, part):
                with self._counted(part):
                    worker.push(worker.store.hypers, null=True)

    def is_missing(self, step: int, part: int) -> bool:
        """Whether a part that a step carries is not posted yet."""
        return self.session.is_missing(step, part % self.cut.in_step)

    @contextmanager
    def _counted(self, part: int) -> Iterator[None]:
        """Count what is posted. A push may be posted and then raise, if it finds that the edge is lost."""
        worker = self._workers[part]
        before = worker.posts
        try:
            yield
        finally:
            if worker.posts > before:
                with self._changed:
                    self.session.post(part % self.cut.in_step)
                    self._changed.notify_all()

    def granted(self, step: int) -> Iterator[tuple[Part, list[Memory]]]:
        """Wait for each part's push of a step and its grant in turn, and pull its weights: whole shards, each from its buffer.

        The same step may be asked for again. Raises LinkLostError after `abort`.
        """
        for number in self.cut.numbers(step):
            part, worker = self.parts[number], self._workers[number]
            with self._changed:
                while self.is_missing(step, number) and not self._is_aborted:
                    self._changed.wait()
                if self._is_aborted:
                    raise LinkLostError("the rest of a push did not come")
            if self._pulled[number] < step:
                if worker.lane.awaits:
                    worker.advance()
                worker.pull()
                self._pulled[number] = step
            yield part, _weights(worker)

    def last(self) -> Iterator[tuple[Part, list[Memory]]]:
        """Leave all parts, wait for the other nodes in each, and pull the final weights. May be called again.

        A node that makes more steps waits in every part for those that have not left it. So this leaves all parts before it
        waits in the first.
        """
        self.has_left = True
        for worker in self._workers:
            worker.leave()
        for part, worker in zip(self.parts, self._workers, strict=True):
            worker.wait_for_others()
            yield part, _weights(worker)

    def pulled(self) -> Iterator[tuple[Part, list[Memory]]]:
        for part, worker in zip(self.parts, self._workers, strict=True):
            yield part, _weights(worker)

    @property
    def version(self) -> int:
        """The version of the first part's last pull."""
        return self._workers[0].version

    def check_peers(self) -> None:
        """Raise WorkerDiedError if another node is lost and the job ends with it."""
        for worker in self._workers:
            worker.check_peers()

    def abort(self) -> None:
        """End a wait for a part that will not come over the present edge."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def close(self, failure: str | None) -> None:
        """Give the lanes back; with `failure` the other nodes hear why. May be called twice."""
        text = failure and f"{NodeLostError.__name__}: {failure}"
        for worker in self._workers:
            worker.close(text)


@dataclass
class Home:
    """The home arenas, which node 0 has: one for each part of the model."""

    cut: Cut
    stores: list[Store]
    nodes: Nodes
    is_closing: threading.Event = field(default_factory=threading.Event)  # node 0 has left: no lost node can join again
    failure: str = ""  # why a job that ends with a lost node ends
    # For each node what tells it of a loss.
    to_tell: dict[int, Callable[[], None]] = field(default_factory=dict)
    table: Table | None = None  # of a home that has rows
    losses: int = 0  # of nodes, without which the job has gone on

    def check(self) -> None:
        """Raise NodeLostError if the job ends. A node that never joined has no lane that others would look at."""
        if self.failure:
            raise NodeLostError(self.failure)

    @staticmethod
    def create(
        layout: Layout, nodes: Nodes, leaf: JobMemory, hypers: list[Hyper], resume: "Callable[[Part], StartState] | None" = None
    ) -> "Home":
        """Make a model's arenas, with the leaf's weights of version 0, or with the state that `resume` gives for each part."""
        home = Home(cut_of(layout, nodes.policy), [], nodes)
        first = np.frombuffer(leaf.memory, np.float32, layout.buffer_floats, leaf.arena.weights_offset(0))
        try:
            for number, part in enumerate(home.cut.parts):
                state = resume(part) if resume is not None else None
                home.stores.append(_store(store_name(leaf.job, number), part, first, leaf, hypers, state))
        except BaseException:
            home.close()
            raise
        return home

    @staticmethod
    def of_rows(table: Table, nodes: Nodes, leaf: JobMemory) -> "Home":
        """Make the arena of a job of replicas, which has their rows, and no weights."""
        part = whole(table.layout)
        store = _store(
            store_name(leaf.job, 0), part, np.zeros(table.layout.buffer_floats, np.float32), leaf, [Hyper(0.0)], None
        )
        store.combining = RowFolds
        return Home(Cut([part]), [store], nodes, table=table)

    def attach(self, node: int, incarnation: int = 0) -> NodeLanes:
        """Take a node's lanes for an agent. A lost node's lanes can be taken again if the job goes on. Raises AttachError."""
        workers = [store.attach(node) for store in self.stores]
        return NodeLanes(self.cut, workers, self.nodes.policy.within, HomeSession(incarnation, self.cut.in_step))

    def give_up(self, node: int, failure: str) -> None:
        """Mark the lanes of a node that never came as failed."""
        for store in self.stores:
            store.arena.finish(node, f"{NodeLostError.__name__}: {failure}")

    def go_on_without(self, node: int) -> None:
        """Take a lost node out of all quorums. What it has posted is folded."""
        for store in self.stores:
            if store.arena.lane_state(node) == LANE_FREE:  # it never came; only an owner can be dead
                store.arena.claim(node, os.getpid())
            store.arena.mark_dead(node, store.arena.generation(node))
        self.losses += 1
        for tell in list(self.to_tell.values()):
            tell()

    def loss_of(self, error: Error) -> NodeLostError:
        """The error that ends the job on this node, by the node that failed first."""
        for store in self.stores:
            for node in range(self.nodes.count):
                if text := store.arena.failure(node):
                    return NodeLostError(text.partition(": ")[2] or text, node)
        return NodeLostError(str(error))

    def close(self) -> None:
        for store in self.stores:
            store.close()


def store_name(leaf: str, part: int) -> str:
    """The name of a part's arena, by the name of node 0's leaf arena."""
    return f"{leaf}.home{part}"


def _store(job: str, part: Part, first: Floats, leaf: JobMemory, hypers: list[Hyper], resume: StartState | None) -> Store:
    def write(views: Views) -> None:
        for view, parameter in zip(views, part.layout.parameters, strict=True):
            begin = part.first + parameter.offset
            view[:] = first[begin : begin + parameter.length]

    limit_s = leaf.timeout_s
    return Store.create_for(part.layout, write, hypers, resume=resume, job=job, timeout_s=limit_s, clock=leaf.clock)


def _slot(worker: Worker) -> Memory:
    store = worker.store
    offset = store.arena.gradient_offset(worker.rank, worker.lane.slot)
    return np.frombuffer(store.memory, np.uint8, 4 * store.layout.buffer_floats, offset)


def _weights(worker: Worker) -> list[Memory]:
    store = worker.store
    return [
        np.frombuffer(store.memory, np.uint8, 4 * (last - first), store.arena.weights_offset(buffer) + 4 * first)
        for (first, last), buffer in zip(store.layout.shards, worker.buffers, strict=True)
    ]


class NearHome:
    """The home of this node's leaf. Sums are written straight into the home's slots. `others` serve the other nodes."""

    def __init__(self, home: Home, others: Sequence[threading.Thread]) -> None:
        self._home = home
        self._lanes = home.attach(home.nodes.number)
        self._lanes.check_with(home.check)
        self._others = others

    @property
    def lanes_taken(self) -> int:
        return 1

    @property
    def losses(self) -> int:
        return self._home.losses

    def begin(self, weights: torch.Tensor) -> None:
        """Write the weights to begin with. Raises NodeLostError."""
        self._copy_weights(self._lanes.pulled(), weights)

    def coming(self) -> tuple[int, int]:
        return self._lanes.cut.span(self._lanes.session.step + 1)

    def step(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int]:
        step = self._lanes.session.step + 1
        try:
            if sent is not None:
                self._push(step, header, sent)
            else:
                self._lanes.push_nothing(step)
            self._copy_weights(self._lanes.granted(step), after)
        except Error as error:
            raise self._home.loss_of(error) from error
        return self._lanes.cut.span(step)

    def _push(self, step: int, header: Header, sent: Outgoing) -> None:
        slots = [(part, torch.from_numpy(slot.view(np.float32))) for part, slot in self._lanes.slots(step)]
        terms, chunks = sent([slot for _, slot in slots], self._lanes.cut.span(step)[0])
        for part, slot in slots:
            at = 0
            while at < len(slot):
                chunk, target = next(chunks), slot[at:]
                if chunk.data_ptr() != target.data_ptr():
                    target[: len(chunk)] = chunk
                at += len(chunk)
            self._lanes.push(part, terms, header)

    def finish(self, after: torch.Tensor) -> None:
        try:
            self._copy_weights(self._lanes.last(), after)
        except Error as error:
            raise self._home.loss_of(error) from error

    @staticmethod
    def _copy_weights(granted: Iterator[tuple[Part, list[Memory]]], weights: torch.Tensor) -> None:
        for part, memories in granted:
            at = part.first
            for memory in memories:
                held = torch.from_numpy(memory.view(np.float32))
                weights[at : at + len(held)] = held
                at += len(held)

    def check(self) -> None:
        try:
            self._lanes.check_peers()
        except Error as error:
            raise self._home.loss_of(error) from error

    def abort(self, failure: str) -> None:
        self._home.failure = self._home.failure or failure

    def leave(self, failure: str | None) -> None:
        """See Upstream. Waits until the other nodes have left or are lost, because the weights are here."""
        self._home.is_closing.set()
        self._lanes.close(failure)
        for thread in self._others:
            thread.join()
        self._home.close()
