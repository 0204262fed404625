"""A simulated job of several nodes: the sessions of real jobs under lost edges, cuts, crashes, restarts and repeats.

Leaves, the home's servers and edges are state machines that make one small step at a time, in an order drawn from the seed. An
edge carries messages in order, and loses what is on its way when it breaks. Sessions and records are those of the agents; the
loops around them are those of the agents' threads, written again without threads. A stand-in for the home's arena folds each
push at once, or one push of every live node together.
"""

import random
from collections import deque
from typing import Any

from fastps.errors import ProtocolError
from fastps.lab.worlds.node_edges import Arena, Channel, Token, ViolationError
from fastps.network.messages import Header, Kind
from fastps.network.session import HomeSession, LeafSession, NodeRecord

_MOST_TURNS = 200_000


class Leaf:
    """The agent of one node."""

    def __init__(self, world: "World", node: int, incarnation: int, steps: int) -> None:
        self._world, self._node = world, node
        self.session = LeafSession(incarnation, world.parts)
        self.channel: Channel | None = None
        self._left = steps
        self._number = 0
        self._outbox: deque[Any] = deque()
        self._state = "lost"
        self._part = 0
        self._version = 0
        self.is_done = False

    @property
    def token(self) -> Token:
        """The push that is pending."""
        return self._node, self.session.incarnation, self._number

    def turn(self, rng: random.Random) -> bool:
        """Make one step. Returns whether there was one to make."""
        if self.is_done:
            return False
        channel = self.channel
        if channel is None:
            return self._connect()
        if self._outbox:
            channel.send(channel.up, self._outbox.popleft())
            return True
        if channel.down and self._state != "ready":
            return self._read(channel.down.popleft())
        if channel.is_broken:
            self.abandon()
            return True
        return self._state == "ready" and self._next(rng)

    def abandon(self) -> None:
        """Notice that the edge is lost."""
        if self.channel is not None:
            self.channel.has_leaf = False
        self.channel, self._state = None, "lost"
        self._outbox.clear()

    def _connect(self) -> bool:
        channel = self._world.request(self._node)
        if channel is None:
            return False
        self.channel, self._state = channel, "hello"
        channel.send(channel.up, self.session.hello())
        return True

    def _next(self, rng: random.Random) -> bool:
        """Send what comes next: FETCH, the pending push, another push, or LEAVE."""
        session = self.session
        if session.must_fetch:
            self._outbox.append(Header(Kind.FETCH))
        elif session.is_pending or self._left:
            if not session.is_pending:
                session.begin()
                self._number += 1
                self._left -= 1
            first = 0 if self._world.repeats(rng) else session.part
            push = [Header(Kind.PUSH, step=session.step, part=first)]
            floats = [(self.token, part) for part in range(first, session.parts)]
            self._outbox += (push + floats) * (2 if self._world.repeats(rng) else 1)
        else:
            self._outbox.append(Header(Kind.LEAVE))
            self._state, self._part = "leaving", -1
            return True
        self._state, self._part = "waiting", -1
        return True

    def _read(self, message: Any) -> bool:
        try:
            if self._state == "hello":
                self._welcome(message)
            elif self._part < 0:
                is_push = self._state == "waiting" and not self.session.must_fetch
                self.session.check_weights(message, self.session.step if is_push else 0)
                self._part, self._version = 0, message.version
            else:
                self._take(message)
        except ProtocolError as error:
            if self._state == "hello":
                raise ViolationError(f"node {self._node} cannot go on: {error}") from error
            self.abandon()
        return True

    def _welcome(self, answer: Header) -> None:
        session = self.session
        was_pending, token, dropped = session.is_pending, self.token, session.dropped
        session.welcome(answer)
        if was_pending and answer.kind == Kind.WELCOME:
            self._world.check_dropped(token, session.dropped > dropped)
        self._state = "ready"

    def _take(self, message: Any) -> None:
        part, version = message
        if part != self._part:
            raise ProtocolError(f"expected part {self._part}, found part {part}")
        if self._state == "waiting" and not self.session.must_fetch:
            self._world.check_counted(self.token, part, version)
        self._part += 1
        if self._part < self.session.parts:
            return
        if self._state == "leaving":
            assert self.channel is not None
            self.channel.send(self.channel.up, Header(Kind.DONE))
            self.is_done = True
            return
        self.session.took(self._version)
        self._state = "ready"


class Server:
    """The home's thread that serves one node."""

    def __init__(self, world: "World", node: int) -> None:
        self._world, self._node = world, node
        self.record = NodeRecord()
        self.channel: Channel | None = None
        self._epoch = 0
        self._header: Header | None = None
        self._part = 0
        self._answers: deque[tuple[int, int]] = deque()  # (step, part) to answer; part -1 is the header
        self._pulled: dict[int, int] = {}
        self._has_final = self.is_done = False

    def turn(self, rng: random.Random) -> bool:
        """Make one step. Returns whether there was one to make."""
        if self.is_done:
            return False
        channel = self.channel
        if channel is None:
            return self._open() or (self._world.may_lose(self._node, rng) and self._lose())
        if self._answers and rng.random() < 0.5 and self._answer(channel):
            return True
        if channel.up and (self._header is not None or not self._answers):
            return self._read(channel.up.popleft())
        if self._answers and self._answer(channel):
            return True
        if channel.is_broken or not channel.has_leaf:
            self._abandon()
            return True
        return False

    def _open(self) -> bool:
        newest = self._world.requests.get(self._node)
        if newest is None or newest.epoch <= self._epoch:
            return False
        self._epoch = newest.epoch
        if newest.has_leaf:
            self.channel = newest
        return True

    def _abandon(self) -> None:
        self.channel = self._header = None
        self._answers.clear()

    def _lose(self) -> bool:
        """Give the lanes of a lost node back; a node that has its last weights has left."""
        if self._has_final:  # nobody waits for a node that is lost after the job's end
            self.is_done = True
            self._world.end(self._node)
        if self.record.session is None:
            return False
        self.record.lose()
        self._world.arena.leave(self._node)
        return True

    def _read(self, message: Any) -> bool:
        if self._header is not None:
            self._take(message)
        elif message.kind == Kind.HELLO:
            self._welcome(message)
        elif message.kind == Kind.DONE:
            self.is_done = True
        else:
            step = message.step
            if message.kind == Kind.PUSH:
                self._check(message)
                self._header, self._part = message, message.part
                self._end_of_push()
            elif message.kind == Kind.LEAVE:
                self._world.arena.leave(self._node)
                self._world.left.add(self._node)
            self._answers += [(step, part) for part in range(-1, self._world.parts)]
        return True

    def _check(self, message: Header) -> None:
        assert self.record.session is not None
        try:
            self.record.session.check(message)
        except ProtocolError as error:
            raise ViolationError(f"the home refuses node {self._node}: {error}") from error

    def _welcome(self, hello: Header) -> None:
        record, world = self.record, self._world
        if record.session is not None and not record.is_owner(hello):
            self._has_final = False
            self._lose()
        if record.session is None:
            world.arena.attach(self._node)
            world.left.discard(self._node)
            record.begin(HomeSession(hello.incarnation, world.parts))
            self._pulled, self._has_final = {}, False
        assert self.channel is not None
        self.channel.send(self.channel.down, record.answer(hello))

    def _take(self, message: tuple[Token, int]) -> None:
        """Take one part of a push, and post it unless it is posted already."""
        session = self.record.session
        assert session is not None and self._header is not None
        token, part = message
        if part != self._part:
            raise ViolationError(f"expected part {self._part} of a push of node {self._node}, found part {part}")
        if session.is_missing(self._header.step, part):
            self._world.check_posted(token, session)
            self._world.arena.post(self._node, part, token)
            session.post(part)
        self._part += 1
        self._end_of_push()

    def _end_of_push(self) -> None:
        if self._part == self._world.parts:
            self._header = None

    def _answer(self, channel: Channel) -> bool:
        """Send the next part of the weights, if its step is granted."""
        step, part = self._answers[0]
        arena, session = self._world.arena, self.record.session
        number = max(part, 0)
        if step == 0 and self._node in self._world.left:
            if arena.lanes:
                return False  # others still train
        elif step and session is not None:
            waits = self._node in arena.lanes and arena.lanes[self._node][number]
            if session.is_missing(step, number) or waits:
                return False
        self._answers.popleft()
        if (part <= 0 and step == 0) or self._pulled.get(number, -1) < step:
            self._pulled[number] = step
            self._world.pulls[self._node, number] = arena.versions[number]
        version = self._world.pulls[self._node, number]
        channel.send(channel.down, (part, version) if part >= 0 else Header(Kind.WEIGHTS, step=step, version=version))
        self._has_final = self._has_final or (self._node in self._world.left and part == self._world.parts - 1)
        return True


class World:
    """One job. Node 0's own leaf shares the process of the home, and its pushes cannot be lost."""

    def __init__(self, seed: int, nodes: int) -> None:
        rng = self._rng = random.Random(seed)
        self.parts = rng.choice((1, 1, 3))
        self._goes_on = self.parts == 1  # a job that goes on after a loss has one part
        self.arena = Arena(self.parts, together=rng.random() < 0.5 or self.parts > 1)
        self._steps = rng.randint(2, 8)
        self.arena.attach(0)
        self._own = self._own_posted = 0
        self.left: set[int] = set()
        self.pulls: dict[tuple[int, int], int] = {}
        self.requests: dict[int, Channel] = {}
        self._cut: set[int] = set()
        self._dropped: set[Token] = set()
        self._budget = rng.randint(0, 12)
        self._repeats = rng.choice((0.0, 0.1, 0.5))
        self._incarnations = 0
        self.leaves: dict[int, Leaf | None] = {node: self._leaf(node) for node in range(1, nodes)}
        self.servers = {node: Server(self, node) for node in range(1, nodes)}
        self.faults = {"breaks": 0, "cuts": 0, "crashes": 0, "restarts": 0, "false_losses": 0, "repeats": 0}
        self.turns = 0

    def _leaf(self, node: int) -> Leaf:
        self._incarnations += 1
        return Leaf(self, node, self._incarnations, self._steps)

    # -- what leaves and servers ask ------------------------------------------------------------------

    def request(self, node: int) -> Channel | None:
        """Ask for an edge; None while the node is cut off."""
        if node in self._cut:
            return None
        before = self.requests.get(node)
        self.requests[node] = Channel(before.epoch + 1 if before is not None else 1)
        return self.requests[node]

    def end(self, node: int) -> None:
        """A node that is cut off at the end of the job ends without the last weights."""
        leaf = self.leaves[node]
        if leaf is not None:
            leaf.is_done = True

    def repeats(self, rng: random.Random) -> bool:
        """Whether a message is sent again without need."""
        repeats = self._budget > 0 and rng.random() < self._repeats
        self.faults["repeats"] += repeats
        return repeats

    def may_lose(self, node: int, rng: random.Random) -> bool:
        """Whether the home gives up a node now: it is gone or cut off, or, as a fault, slower than the timeout."""
        leaf = self.leaves[node]
        if leaf is None or leaf.is_done:
            return True
        if not self._goes_on or self.servers[node].record.session is None:
            return False
        if node in self._cut:
            return rng.random() < 0.3
        is_false = self._budget > 0 and rng.random() < 0.02
        self.faults["false_losses"] += is_false
        return is_false

    # -- what is promised -----------------------------------------------------------------------------

    def check_posted(self, token: Token, session: HomeSession) -> None:
        """A push is posted over the lanes of its own agent, and not after it was dropped."""
        if token[1] != session.incarnation:
            raise ViolationError(f"push {token} is posted as one of agent {session.incarnation}")
        if token in self._dropped:
            raise ViolationError(f"push {token} is posted after it was dropped")

    def check_counted(self, token: Token, part: int, version: int) -> None:
        """Weights that answer a push contain it."""
        folded = self.arena.folded.get((token, part))
        if folded is None or folded > version:
            raise ViolationError(f"version {version} answers push {token}, whose part {part} is folded in version {folded}")

    def check_dropped(self, token: Token, is_dropped: bool) -> None:
        """A push is dropped if the home has nothing of it, and only then."""
        has = any((token, part) in self.arena.folded for part in range(self.parts))
        if has == is_dropped:
            raise ViolationError(
                f"push {token} is {'dropped' if is_dropped else 'counted'} and {'is' if has else 'not'} folded"
            )
        if is_dropped:
            self._dropped.add(token)

    # -- the course of the job ------------------------------------------------------------------------

    def run(self) -> None:
        """Play until every node is done. Raises ViolationError."""
        idle = 0
        actors: list[int] = [0, *self.servers, *(-node for node in self.leaves)]
        while not self._is_over():
            self.turns += 1
            if self.turns > _MOST_TURNS:
                raise ViolationError(f"the job is not over after {_MOST_TURNS:,} steps")
            if self._budget and self._rng.random() < 0.03:
                self._fault()
            actor = self._rng.choice(actors)
            idle = 0 if self._turn(actor) else idle + 1
            if idle > 200 * len(actors):
                self._rescue()
                idle = 0
        posted = {token for token, _ in self.arena.folded}
        if any((token, part) not in self.arena.folded for token in posted for part in range(self.parts)):
            raise ViolationError("a push is folded in part")

    def _is_over(self) -> bool:
        done = all(leaf is None or leaf.is_done for leaf in self.leaves.values())
        return done and 0 not in self.arena.lanes and not self._budget

    def _turn(self, actor: int) -> bool:
        if actor > 0:
            return self.servers[actor].turn(self._rng)
        if actor == 0:
            return self._turn_of_home()
        leaf = self.leaves[-actor]
        return leaf is not None and leaf.turn(self._rng)

    def _turn_of_home(self) -> bool:
        """Node 0's own leaf pushes and waits."""
        lanes = self.arena.lanes.get(0)
        if lanes is None or any(lanes):
            return False
        if self._own == self._steps:
            self.arena.leave(0)
            return True
        self._own += 1
        for part in range(self.parts):
            self.arena.post(0, part, (0, 0, self._own))
        return True

    def _rescue(self) -> None:
        """Nothing moves: end what holds the job up, if it is a fault; otherwise the job hangs."""
        if self._budget:
            self._fault()
        elif self._cut:
            self._cut.clear()
        else:
            states = {node: leaf and leaf._state for node, leaf in self.leaves.items()}
            raise ViolationError(f"no node can go on: {states}")

    def _fault(self) -> None:
        self._budget -= 1
        node = self._rng.choice(list(self.leaves))
        leaf, channel = self.leaves[node], self.requests.get(node)
        draw = self._rng.random()
        if leaf is None:
            if node not in self.left:
                self.faults["restarts"] += 1
                self.leaves[node] = self._leaf(node)
        elif draw < 0.5:
            if channel is not None:
                self.faults["breaks"] += 1
                channel.lose(self._rng)
        elif self._goes_on and draw < 0.7 and node not in self.left:
            self.faults["crashes"] += 1
            self.leaves[node] = None
            if channel is not None:
                channel.lose(self._rng)
                channel.has_leaf = False
        elif node in self._cut:
            self._cut.remove(node)
        else:
            self.faults["cuts"] += 1
            self._cut.add(node)
            if channel is not None:
                channel.lose(self._rng)
