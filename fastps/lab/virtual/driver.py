"""The driver of a job in virtual time: the only combiner, in the place of the server process.

It plays a list of events, wherever they come from: a shard receives a push, a worker leaves it, its timer fires; a worker is
granted a step, gets a shard's weights, begins. Times are those of the events. What a worker has computed comes from the worker:
it is a process of its own, which computes on while the driver plays what the others do.
"""

import contextlib
import hashlib
import os
import pickle
import select
import socket
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any, NamedTuple

from fastps.errors import ProtocolError, TimeoutExceededError, UsageError, raise_for_outcome
from fastps.kernels.protocol.lane import BUSY, KIND_NULL, KIND_PUSH, Lane
from fastps.kernels.simulation.simulator import KINDS
from fastps.membership import rendezvous
from fastps.membership.peers import WORKER_PRESENT
from fastps.store.combining import Push
from fastps.store.server_loop import answer_as_server, with_rule
from fastps.store.server_process import Order
from fastps.store.store import Store
from fastps.store.virtual_time import BEGINS, PUSH, RANK, READ, SERVED, STOPS, STORE
from fastps.system import shared_memory
from fastps.system.clock import SYSTEM_CLOCK, Clock

BEGIN, COMPUTED, RECEIVE, FOLD, DROP, GRANT, TIMER, LEAVE, PULL, DEATH, JOIN = range(len(KINDS))
CHANGES = (DEATH, JOIN)  # of a worker
_COMMITS = (RECEIVE, TIMER, LEAVE, *CHANGES)
_ENDS_NS = 5_000_000  # between two looks whether the workers have ended
_HELD_NS = 50_000  # between two tries for a shard lock that a worker holds to copy state


class Event(NamedTuple):
    """One event, with the fields of a record of the simulator's trace."""

    time_ns: int
    version: int
    detail: int
    worker: int
    shard: int
    kind: int


class WorkerLostError(Exception):
    """A worker has ended without leaving. The launcher reports why."""


class Driver:
    """The driver of a store whose first workers are all attached, at the other ends of `links`; others find it by `listener`.

    Attributes:
        store: the job's store.
        lane: the server's lane, which makes every commit.
        start: starts the process of a worker that joins, for `play`.
    """

    def __init__(
        self, store: Store, links: Sequence[socket.socket], clock: Clock = SYSTEM_CLOCK, listener: "Listener | None" = None
    ) -> None:
        self.store = store
        self.start: Callable[[int], None] = lambda worker: None
        self._links, self._clock, self._listener = dict(enumerate(links)), clock, listener
        self.lane = Lane(store.arena, store.arena.server_lane)
        self.lane.set_user_rule(store.layout.rule.address)
        self._lanes = [Lane(store.arena, rank) for rank in range(store.arena.lanes)]
        policy = store.layout.policy
        self._overlaps = policy.overlap  # pulls go on while a step computes with the weights before
        self._keeps_old = policy.pull < 1 or policy.overlap  # a step may begin without a shard's newest weights
        self._combines = policy.combine
        self._shards = range(store.arena.shards)
        self._granted: dict[tuple[int, int], tuple[int, int]] = {}
        self._kept: dict[int, tuple[int, int]] = {}  # by worker, the newest weights that a pull in the background has brought
        self._computing: set[int] = set()  # workers that have begun a step, and whose push is not posted
        self._has_begun: set[int] = set()
        self._news = {
            worker: {shard: self._pin(self._lanes[worker], shard) for shard in self._shards} for worker in self._links
        }

    def play(self, events: Iterable[Event]) -> None:
        """Play events in their order."""
        drain: list[Event] = []
        for event in events:
            if drain and event.kind != DROP and not (event.kind == RECEIVE and self._is_beside(event, drain[0])):
                self.commit(drain)
                drain = []
            if event.kind == RECEIVE:
                drain.append(event)
            elif event.kind in _COMMITS:
                self._prepare(event)
                self.commit([event])
            elif event.kind == GRANT:
                self._grant(event)
            elif event.kind == PULL:
                self._pull(event.worker, event.shard)
            elif event.kind == BEGIN:
                self._begin(event.worker)
        if drain:
            self.commit(drain)

    def _is_beside(self, event: Event, first: Event) -> bool:
        """Whether a shard receives two pushes in one drain."""
        return self._combines and (event.shard, event.time_ns) == (first.shard, first.time_ns)

    def commit(self, events: Sequence[Event]) -> None:
        """Let a shard take the next push of each event's worker, or its LEAVE, its changes, and its timers, in one commit.

        Rows of tables change in place, and a step reads them as it computes: so a commit waits for every step that has begun.
        """
        for worker in self._computing if self.store.tables else ():
            self.await_any((worker,))
        played = [(_lane_of(event), event.time_ns) for event in events]
        while (outcome := self.lane.play(events[0].shard, played)) == BUSY:
            self._clock.sleep_ns(_HELD_NS)
        if (failure := self.lane.fold_failure) is not None:
            raise failure  # of an optimizer's own step()
        raise_for_outcome(outcome, self.lane.bad_lane, self.store.arena.buffers)

    def _prepare(self, event: Event) -> None:
        """End the process of a worker that dies; start that of one that joins, and wait until it is here."""
        if event.kind == DEATH:
            self.lose(event.worker, dies=True)
        elif event.kind == JOIN:
            self.start(event.worker)
            self.await_any((), joins=True)
            self.meet()

    def _grant(self, event: Event) -> None:
        """Pin the weights of the moment of the grant for the worker, which waits in `step()`."""
        if self._overlaps and event.detail:  # the weights come from another worker, in a tree
            read = self._kept[event.detail - 1]
            self._lanes[event.worker].prefetch_kept(read[0])
        else:
            read = self._pin(self._lanes[event.worker], event.shard)
        if read[1] != event.version:
            raise ProtocolError(
                f"worker {event.worker} was granted version {event.version} of shard {event.shard}, and finds"
                f" {read[1]}: this is an error of fastps, please report it"
            )
        self._granted[event.worker, event.shard] = read

    def _pin(self, lane: Lane, shard: int) -> tuple[int, int]:
        """Pin a shard's newest weights: (buffer, version). What was pinned is free, unless a worker may still read it."""
        if self._keeps_old:
            return lane.prefetch(shard)
        return lane.pull(shard), lane.shard_version(shard)

    def _pull(self, worker: int, shard: int) -> None:
        """Let the worker's next step read what it was granted."""
        self._news[worker][shard] = read = self._granted.pop((worker, shard))
        if self._overlaps:
            self._lanes[worker].keep_prefetched(read[0])
            self._kept[worker] = read
        elif self._keeps_old:
            self._lanes[worker].take_prefetched(*read, shard)

    def _begin(self, worker: int) -> None:
        """Let the worker's next step begin."""
        for shard, read in self._news[worker].items() if self._overlaps else ():
            self._lanes[worker].take_prefetched(*read, shard)  # before the next weights are kept
        self._computing.add(worker)
        self._has_begun.add(worker)
        if 0 not in self._has_begun:  # the others wait to hear whether it writes weights before its first step: that is later
            self._lanes[0].announce(1)
        self._say(worker)

    def _say(self, worker: int) -> None:
        """Let the worker's next step begin, or tell it that all is over."""
        with contextlib.suppress(ConnectionError):  # its end is noticed where it is waited for
            self._links[worker].send(BEGINS + b"".join(READ.pack(shard, *read) for shard, read in self._news[worker].items()))
        self._news[worker] = {}

    def await_any(self, workers: Collection[int], *, joins: bool = False) -> int:
        """Wait until one of these workers has computed, or if `joins` another one is here: -1. Returns which.

        Raises TimeoutExceededError if a worker that joins does not come.
        """
        poll, of_link = select.poll(), {self._links[worker].fileno(): worker for worker in workers}
        if joins and self._listener is not None:
            of_link[self._listener.fileno()] = -1
        for number in of_link:
            poll.register(number, select.POLLIN)
        found = poll.poll(self.store.timeout_s * 1000 if joins else None)
        if not found:
            raise TimeoutExceededError(
                f"expected every worker that joins within {self.store.timeout_s:g} s, found one missing; raise FASTPS_TIMEOUT"
                " if it is only slow"
            )
        return min(of_link[number] for number, _ in found)

    def meet(self) -> int:
        """Take the link of the next worker that joins, which waits for its first step. Returns which."""
        assert self._listener is not None
        worker, link = self._listener.next_link()
        self._links[worker], self._news[worker] = link, {}
        return worker

    def lose(self, worker: int, *, dies: bool) -> None:
        """Let a worker's process end here, marked dead if it `dies`; else it has left."""
        self._computing.discard(worker)
        if not dies:
            return self._say(worker)
        self.store.arena.mark_dead(worker, self.store.arena.generation(worker))
        with contextlib.suppress(ConnectionError):
            self._links[worker].send(STOPS)

    def await_push(self, worker: int, time_ns: int, read_version: int = -1, *, null: bool = False) -> Push:
        """Wait until the worker has computed, and post for it: with another version as the one read, or `null`, no gradient.

        Returns what it handed over. Raises WorkerLostError.
        """
        try:
            message = self._links[worker].recv(PUSH.size)
        except ConnectionError:
            message = b""
        if len(message) != PUSH.size:
            raise WorkerLostError(f"worker {worker} has ended without leaving")
        self._computing.discard(worker)
        push = Push._make(PUSH.unpack(message))
        kind, step, slot, version, scale, loss, samples = push
        version = read_version if read_version >= 0 else version
        kind = KIND_NULL if null and kind == KIND_PUSH else kind
        if not self._lanes[worker].post(kind, step, slot, version, time_ns, scale, loss, samples):
            raise ProtocolError(f"the ring of worker {worker} is full: this is an error of fastps, please report it")
        return push

    def is_free(self, worker: int, descriptors: int) -> bool:
        """Whether every shard is done with so many of the worker's descriptors."""
        return self._lanes[worker].done() >= descriptors

    def is_granted(self, worker: int, steps: int) -> bool:
        """Whether every shard has granted the worker so many steps."""
        return all(self._lanes[worker].granted(shard) >= steps for shard in self._shards)

    def digest(self) -> str:
        """The digest of the present weights."""
        digest = hashlib.sha256()
        for view in self.store.weight_views(self.store.committed()[0]):
            digest.update(view)
        return digest.hexdigest()[:16]

    def end(self) -> str:
        """Let all workers end, after each has left. Returns the digest of the final weights."""
        digest = self.digest()
        for worker in self._links:
            self._say(worker)
        return digest

    def stop(self, left: Container[int]) -> None:
        """End all workers where they are: each waits in `step()`, or has `left`. Returns once they have left the arena.

        Until then this is the server, so that nobody folds what is posted and not played.
        """
        for worker, link in self._links.items():
            if worker in left:
                self._say(worker)
            else:
                with contextlib.suppress(ConnectionError):
                    link.send(STOPS)
        until_ns = self._clock.now_ns() + int(self.store.timeout_s * 1e9)
        while any(state in WORKER_PRESENT for state in self.store.arena.lane_states()) and self._clock.now_ns() < until_ns:
            self._clock.sleep_ns(_ENDS_NS)


def _lane_of(event: Event) -> int:
    """An event's lane, as the combiner's `play` names it."""
    if event.kind in CHANGES:
        return -2 - event.worker
    return -1 if event.kind == TIMER else event.worker


class Listener:
    """The socket at which the workers of a job find the driver. `close`, from any thread, ends every wait at it.

    `awaited` has the ranks of workers that have been started and have not come yet.
    """

    def __init__(self, job: str, awaited: Iterable[int] = ()) -> None:
        self.awaited = set(awaited)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(rendezvous.place_name(job, "driver"))
        self._socket.listen(1024)
        self._open: list[socket.socket] = []

    def store(self, clock: Clock = SYSTEM_CLOCK) -> tuple[Store, object, Any]:
        """Wait for worker 0's store and serve it. Returns it, what keeps its rule's code alive, and what `offer` got as `more`.

        Raises UsageError for a store that has no place in virtual time, and WorkerLostError if the listener is closed.
        """
        connection, message, files = self._next()
        if message != STORE or len(files) != 2:
            raise ProtocolError(f"expected the job's store first, found {message[:20]!r}")
        with os.fdopen(files[1], "rb") as file:
            order: Order = pickle.load(file)  # a worker's, of this user
        layout, compiled = with_rule(order.layout, order.rule)
        memory = shared_memory.map_shared(files[0])
        store = Store(files[0], memory, layout, order.job, order.timeout_s, clock, [])
        try:
            if reason := _refusal(store):
                connection.send(reason.encode())
                raise UsageError(reason)
            answer_as_server(store)
            store.arena.serve(os.getpid())
            connection.send(SERVED)
        except BaseException:
            store.close()
            raise
        return store, compiled, order.more

    def links(self, store: Store) -> list[socket.socket]:
        """Wait until all workers are attached. Returns a connection to each. Raises TimeoutExceededError, WorkerLostError."""
        workers, found = store.layout.workers, dict[int, socket.socket]()
        while len(found) < workers:
            if not select.select([self._socket], [], [], store.timeout_s)[0]:
                missing = ", ".join(str(rank) for rank in range(workers) if rank not in found)
                raise TimeoutExceededError(
                    f"expected every worker of the script to wrap its optimizer within {store.timeout_s:g} s, found none of"
                    f" workers {missing}; raise FASTPS_TIMEOUT if they are only slow"
                )
            worker, connection = self.next_link()
            found[worker] = connection
        return [found[rank] for rank in range(workers)]

    def next_link(self) -> tuple[int, socket.socket]:
        """Wait for a worker. Returns its rank and a connection to it. Raises WorkerLostError."""
        connection, message, _ = self._next()
        worker: int = RANK.unpack(message)[0]
        self.awaited.discard(worker)
        return worker, connection

    def fileno(self) -> int:
        """The descriptor at which the next worker is noticed."""
        return self._socket.fileno()

    def _next(self) -> tuple[socket.socket, bytes, list[int]]:
        """The next connection of this user, with its first message and its descriptors."""
        while True:
            try:
                # Without a timeout, with which accept would try for ever once the socket is shut.
                connection = self._socket.accept()[0]
            except OSError:
                raise WorkerLostError("the workers have ended before all were attached") from None
            self._open.append(connection)
            with contextlib.suppress(rendezvous.OtherUser, ConnectionError):
                rendezvous.check_user(connection)
                message, files, _, _ = socket.recv_fds(connection, 64, 2)
                if message:
                    return connection, message, files

    def close(self) -> None:
        """End all connections: workers that wait for the driver's word end with an error. May be called twice."""
        for each in (self._socket, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def free(self) -> None:
        """Free the descriptors, once no thread waits."""
        for each in (self._socket, *self._open):
            each.close()


def _refusal(store: Store) -> str:
    """Why a driver cannot serve a store; "" if it can."""
    return f"virtual time begins at version 0: expected no resume, found version {store.version}" if store.version else ""
