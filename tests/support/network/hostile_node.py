"""A node that does not keep to the protocol: it opens edges to node 0's agent and sends what a seeded generator draws.

Three kinds of turns: a stranger says anything but a correct HELLO; a member says it and then breaks the protocol; a visitor
opens connections to the ports at which agents listen. What a member pushes and node 0 may count is a gradient of zeros.
"""

import contextlib
import math
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
from torch.distributed import TCPStore

from fastps.job.secret import Secret
from fastps.job.update_rules import Hyper
from fastps.network.edge import chunk_ranges
from fastps.network.link import LinkLostError, Memory
from fastps.network.messages import HEADER_BYTES, WIRE_VERSION, Header, Kind
from tests.support.network.raw_edge import END_S, OPEN_S, UNTOUCHED, Job, RawEdge

FIELDS = struct.Struct("<IHHIqd32sQQIQIqH")  # written down again: a peer does not share the other side's code
MAGIC, MOST_WORKERS = 0x73704661, 1 << 20
_TRIES = 3  # of an edge, and of a correct HELLO; see RawEdge.was_given_up
EXTREMES = (
    0, 1, 2, 3, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, (1 << 20) + 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 48, (1 << 63) - 1,
    (1 << 64) - 1,
)  # fmt: skip
SENTENCE = re.compile(
    r"expected .*, found |was lost|was given no secret|has a secret, and a node did not prove|have different secrets"
    r"|have different layouts|did not prove within|sent [A-Z]+, which no leaf sends now|a reason of the test"
)


@dataclass
class HostileNode:
    """Plays turns, one after the other.

    Attributes:
        agents: the process ids of the agents whose ports are visited.
        joins: whether it ever says a correct HELLO.
        turns: how often each kind of turn was played.
        sentences: how often each reason came.
    """

    job: Job
    seed: int
    agents: list[int]
    joins: bool = True
    turns: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)
    held: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        how: Any = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=OPEN_S)}
        self._store = TCPStore("127.0.0.1", self.job.port, **how)
        self._draw = random.Random(self.seed)
        self._incarnation = self._lane = self._step = 0
        self._has_left = False
        self.said: list[str] = []

    def play(self, number: int) -> None:
        """Play one turn. Raises AssertionError, with what the turn was."""
        self._draw = random.Random(f"{self.seed}/{number}")
        turn: Callable[[], Any] = self._draw.choices((self.stranger, self.member, self.visitor), (4, 5 * self.joins, 2))[0]
        if number == 0:
            turn = self.stranger  # the first request may take a minute, so silence would last long
        self.last, self.said = self.said, []
        try:
            turn()
        except (AssertionError, LinkLostError) as error:
            raise AssertionError(
                f"turn {number} of seed {self.seed}, {turn.__name__} {self.said} after {self.last}: {error}"
            ) from error

    def _open(self, *, has_data: bool = True) -> RawEdge:
        """An edge, or the next one where node 0 has given it up before this process, on busy cores, has opened its links."""
        for _ in range(_TRIES - 1):
            with contextlib.suppress(LinkLostError):
                return RawEdge(self.job, self._store, has_data=has_data)
        return RawEdge(self.job, self._store, has_data=has_data)

    def _note(self, what: str) -> None:
        self.said.append(what)
        self.turns[what] += 1

    # -- strangers ---------------------------------------------------------------------------------

    def stranger(self) -> None:
        """Say anything but a correct HELLO: no weights, and no welcome."""
        ways = [self._garbage, self._mutated_hello, self._other_kind, self._silent, self._half_open]
        if self.job.secret is not None:
            ways += [self._unproven, self._wrong_proof, self._wrong_challenge, self._mirror] * 2
        way = self._draw.choice(ways) if self.turns else self._garbage
        self._note(f"stranger: {way.__name__[1:].replace('_', ' ')}")
        edge = self._open(has_data=way != self._half_open)
        bait = edge.bait()
        try:
            way(edge)
            self._end(edge)
            assert not {Kind.WELCOME, Kind.RESUME, Kind.WEIGHTS} & {header.kind for header in edge.heard}, edge.heard
            assert (bait == UNTOUCHED).all(), "floats came before a correct HELLO"
        finally:
            edge.close()

    def _end(self, edge: RawEdge) -> None:
        """Node 0 ends the edge, and says why in a sentence if it says anything."""
        assert edge.is_over.wait(END_S), "node 0 does not end the edge"
        for header in edge.heard:
            if header.kind in (Kind.REFUSED, Kind.FAILED):
                assert SENTENCE.search(header.text), f"no sentence: {header.text!r}"
                self.sentences[re.sub(r"-?\d[\d.e+]*", "#", header.text)] += 1

    def _garbage(self, edge: RawEdge) -> None:
        edge.send(self._draw.randbytes(HEADER_BYTES))

    def _mutated_hello(self, edge: RawEdge) -> None:
        if self._draw.random() < 0.5:
            edge.prove()
        good = self.mutated(Header(Kind.HELLO, layout=self.job.digest, weight=1, incarnation=self._draw.getrandbits(64)))
        data = next(each for each in good if not self._is_hello(each))
        edge.send(data)

    def _is_hello(self, data: bytes) -> bool:
        magic, wire, kind, weight, *_ = found = FIELDS.unpack_from(data)
        same = (magic, wire, kind, found[6]) == (MAGIC, WIRE_VERSION, 1, self.job.digest)
        return same and 1 <= weight <= MOST_WORKERS

    def mutated(self, header: Header) -> Iterator[bytes]:
        """Endlessly many bytes that differ a little from a header: a field is another one, or some bits are."""
        while True:
            data = bytearray(header.pack())
            if self._draw.random() < 0.7:
                fields: list[Any] = list(FIELDS.unpack_from(data))
                at = self._draw.randrange(len(fields))
                fields[at] = self._other(at, fields[at])
                FIELDS.pack_into(data, 0, *fields)
            else:
                for _ in range(self._draw.choice((1, 1, 2, 8, 64))):
                    data[self._draw.choice((self._draw.randrange(FIELDS.size), self._draw.randrange(len(data))))] ^= (
                        1 << self._draw.randrange(8)
                    )
            yield bytes(data)

    def _other(self, at: int, value: Any) -> Any:
        if isinstance(value, bytes):
            return self._draw.choice((bytes(32), self._draw.randbytes(32), value[:-1] + bytes([value[-1] ^ 1])))
        if isinstance(value, float):
            return self._draw.choice((0.0, -1.0, math.inf, -math.inf, math.nan, 1e308, 5e-324))
        bits = {"I": 32, "H": 16, "q": 63, "Q": 64}[FIELDS.format[1:].replace("32s", "s")[at]]
        return self._draw.choice((*EXTREMES, value + 1, self._draw.getrandbits(bits))) & ((1 << bits) - 1)

    def _other_kind(self, edge: RawEdge) -> None:
        kind = self._draw.choice([each for each in Kind if each not in (Kind.HELLO, Kind.BEAT)])
        step = self._draw.choice((0, 1, 7))
        edge.send(Header(kind, layout=self.job.digest, weight=1, step=step, text="a reason of the test"))

    def _silent(self, edge: RawEdge) -> None:
        if self._draw.random() < 0.5:
            edge.close()

    def _half_open(self, edge: RawEdge) -> None:
        """The second link is never opened."""

    def _unproven(self, edge: RawEdge) -> None:
        edge.send(Header(Kind.HELLO, layout=self.job.digest, weight=1, incarnation=5))

    def _wrong_proof(self, edge: RawEdge) -> None:
        own = self._draw.randbytes(32)
        edge.send(Header(Kind.CHALLENGE, layout=self.job.digest, text=own.hex()))
        found = edge.hear(Kind.CHALLENGE)
        if found is None:  # this process was slower than node 0 waits; a member's proof shows that node 0 answers
            return
        other = bytes.fromhex(found.text)
        assert self.job.secret is not None
        wrong = self._draw.choice(
            [
                edge.proof(own + other, Secret(b"another secret of the tests")),
                edge.proof(other + own, self.job.secret),
                replace(edge.proof(own + other, self.job.secret), layout=self._draw.randbytes(32)),
                replace(edge.proof(own + other, self.job.secret), text=self._draw.choice(("", "ä" * 32, "0" * 64, "x" * 400))),
                Header(Kind.HELLO, layout=self.job.digest, weight=1),
            ]
        )
        edge.send(wrong)

    def _wrong_challenge(self, edge: RawEdge) -> None:
        text = self._draw.choice(("", "00", "x" * 64, "00" * 31, "00" * 33, "\u20ac" * 30, "0" * 63))
        edge.send(Header(Kind.CHALLENGE, layout=self._draw.choice((self.job.digest, bytes(32))), text=text))

    def _mirror(self, edge: RawEdge) -> None:
        """Send everything back that comes."""
        edge.send(Header(Kind.CHALLENGE, layout=self.job.digest, text=bytes(32).hex()))
        found = edge.hear(Kind.CHALLENGE)
        if found is None:  # this process was slower than node 0 waits; a member's proof shows that node 0 answers
            return
        edge.send(found if self._draw.random() < 0.5 else replace(found, kind=Kind.PROOF))

    # -- members -----------------------------------------------------------------------------------

    def join(self) -> tuple[RawEdge, Header]:
        """Say a correct HELLO, now and then as the agent of the turn before. Returns the edge and the answer."""
        if self._draw.random() < 0.7:
            self._incarnation, self._lane = self._draw.getrandbits(64), 0
        for _ in range(_TRIES):
            edge = self._open()
            edge.prove()
            edge.send(Header(Kind.HELLO, layout=self.job.digest, weight=1, incarnation=self._incarnation, lane=self._lane))
            answer = edge.hear(Kind.WELCOME, Kind.RESUME)
            if answer is not None or not edge.was_given_up:
                break
        assert answer is not None, f"node 0 refused a correct HELLO: {edge.heard}"
        self._lane = answer.lane
        self._has_left = answer.kind == Kind.RESUME and self._has_left
        self._step = answer.step if answer.kind == Kind.RESUME else 0
        return edge, answer

    def fetch(self, edge: RawEdge) -> Memory | None:
        """The weights of a new lane."""
        edge.send(Header(Kind.FETCH))
        return edge.receive_floats(self.job.floats) if edge.hear(Kind.WEIGHTS) is not None else None

    def member(self) -> None:
        """Join, be good for a while, and then break the protocol."""
        edge, _ = self.join()
        try:
            for _ in range(0 if self._has_left else self._draw.choice((0, 0, 1, 2, 5))):
                good = self._draw.choice((self._fetch, self._push, self._nothing, self._repeat, self._beats))
                self._note(f"member: {good.__name__[1:]}")
                good(edge)
            bad = self._draw.choice(self._evils())
            self._note(f"member, then {bad.__name__[1:].replace('_', ' ')}")
            if bad(edge) is not False:
                self._end(edge)
        finally:
            edge.close()

    def _evils(self) -> list[Callable[[RawEdge], Any]]:
        return [
            self._mutated_push, self._bad_numbers, self._bad_terms, self._cut, self._garbage, self._wrong_order,
            self._flood, self._strange_floats, self._leaves, self._vanishes, self._reasons,
        ]  # fmt: skip

    def _fetch(self, edge: RawEdge) -> None:
        assert self.fetch(edge) is not None, "no weights for a member"

    def _beats(self, edge: RawEdge) -> None:
        """Beats with any contents, stamps and echoes. They have no effect, and the edge stays open."""
        for _ in range(self._draw.choice((1, 5, 30))):
            size = self._draw.choice((0, 1, 15, 16, 17, 119, 120, 121, 400))
            data = bytearray(Header(Kind.BEAT, beat=self._draw.randbytes(size)).pack())
            fields = list(FIELDS.unpack_from(data))
            fields[-2] = self._draw.choice((0, 1, -1, 2**63 - 1, -(2**63), time.monotonic_ns(), self._draw.getrandbits(62)))
            FIELDS.pack_into(data, 0, *fields)
            edge.send(bytes(data))
        assert self.fetch(edge) is not None, "no weights after strange beats"

    def _sum(self, **changes: Any) -> tuple[Header, list[Memory]]:
        """A correct push of zeros."""
        header = Header(
            Kind.PUSH, weight=self._draw.choice((1, 2, 100)), samples=self._draw.choice((0, 8)), loss=0.5, step=self._step + 1
        )
        terms = np.frombuffer(self.job.terms(Hyper(1.0)), np.uint8).copy()
        floats = [np.zeros(4 * (last - first), np.uint8) for first, last in chunk_ranges(0, self.job.floats)]
        return replace(header, **changes), [terms, *floats]

    def _push(self, edge: RawEdge) -> None:
        self._exchange(edge, *self._sum())

    def _exchange(self, edge: RawEdge, header: Header, messages: list[Memory]) -> None:
        edge.send(header)
        edge.send_floats(messages)
        answer = edge.hear(Kind.WEIGHTS)
        assert answer is not None, f"a correct push was refused: {edge.heard}"
        assert answer.step == header.step
        assert edge.receive_floats(self.job.floats) is not None
        self._step = header.step

    def _nothing(self, edge: RawEdge) -> None:
        self._exchange(edge, Header(Kind.NULL, step=self._step + 1), [])

    def _repeat(self, edge: RawEdge) -> None:
        """A step that node 0 has is answered again and not counted, whatever its floats are."""
        if self._step:
            header, (terms, *floats) = self._sum(step=self._step)
            self._exchange(edge, header, [terms, *[np.full(len(each), 0x3F, np.uint8) for each in floats]])

    def _mutated_push(self, edge: RawEdge) -> bool:
        """Any mutation of a header, with or without the floats of a push, which are zeros."""
        self._has_left = True  # the mutated header may be LEAVE
        header, messages = self._sum()
        if self._draw.random() < 0.3:
            header = Header(Kind.NULL, step=self._step + 1)
        edge.send(next(self.mutated(header)))
        edge.send_floats(messages) if self._draw.random() < 0.3 else None
        edge.is_over.wait(self._draw.choice((0.0, 0.2, 1.0)))
        return False

    def _bad_numbers(self, edge: RawEdge) -> None:
        """Numbers beyond their range: refused before a float is read."""
        step = self._step
        edge.send(
            self._sum(
                **self._draw.choice(
                    [
                        {"weight": 0}, {"weight": MOST_WORKERS + 1}, {"weight": 2**32 - 1}, {"samples": -1}, {"samples": 2**62},
                        {"step": step + 2}, {"step": step + 1000}, {"step": 2**64 - 1}, {"step": 0},
                        {"part": 2}, {"part": 2**32 - 1}, {"part": 1},
                    ]
                )
            )[0]
        )  # fmt: skip

    def _bad_terms(self, edge: RawEdge) -> None:
        """Hyper-parameters that are not finite, flags that are none, and presence of parameters that do not exist."""
        header, messages = self._sum()
        fields, terms = len(Hyper._fields), messages[0]
        words = terms[: 8 * fields * self.job.groups].view(np.float64)
        at = self._draw.randrange(len(words))
        if self._draw.random() < 0.8:
            values = [math.nan, math.inf, -math.inf]
            values += [-1.0, 0.5, 2.0**31, 1e300] if at % fields == fields - 1 else []
            values += [0.9, 1e-300] if at % fields == Hyper._fields.index("momentum") else []  # the job has no momentum buffer
            words[at] = self._draw.choice(values)
        else:
            terms[-1] |= 0x80
        edge.send(header)
        edge.send_floats(messages)

    def _strange_floats(self, edge: RawEdge) -> bool:
        """Floats and hyper-parameters that a script may send, and that change nothing: node 0 counts or rejects them."""
        header, messages = self._sum()
        if self._has_left:
            edge.close()
            return False
        way = self._draw.choice(("not finite", "absent", "hypers"))
        if way == "not finite":
            messages[1].view(np.float32)[:3] = self._draw.choice((math.nan, math.inf, -math.inf))
        elif way == "absent":
            messages[0] = np.frombuffer(self.job.terms(Hyper(1.0), present=False), np.uint8).copy()
            messages[1][:] = np.frombuffer(self._draw.randbytes(len(messages[1])), np.uint8)
        else:
            values = (0.0, -1.0, 0.5, 1e-300, 1e300, -1e300, 3e38)
            odd = {name: self._draw.choice(values) for name in Hyper._fields if name not in ("weight_decay", "flags")}
            odd |= {"learning_rate": self._draw.choice((0.0, 1.0, -1.0, 2.0)), "momentum": 0.0}
            hyper = Hyper(**odd, flags=self._draw.choice((0, self._draw.getrandbits(31))))  # type: ignore[arg-type]
            messages[0] = np.frombuffer(self.job.terms(hyper), np.uint8).copy()
        self._exchange(edge, header, messages)
        return False

    def _cut(self, edge: RawEdge) -> bool:
        """The edge ends in the middle of a sum."""
        header, messages = self._sum()
        edge.send(header)
        edge.send_floats(messages[: self._draw.randrange(len(messages))])
        if self._draw.random() < 0.3:
            time.sleep(self._draw.choice((0.1, 0.5)))
        return False

    def _wrong_order(self, edge: RawEdge) -> None:
        """Kinds that no leaf sends at this place."""
        kinds = (
            Kind.HELLO, Kind.WELCOME, Kind.REFUSED, Kind.WEIGHTS, Kind.RESUME, Kind.CHALLENGE, Kind.PROOF, Kind.DONE,
            Kind.REOPEN, Kind.FAILED,
        )  # fmt: skip
        edge.send(Header(self._draw.choice(kinds), layout=self.job.digest, weight=1, text="a reason of the test"))

    def _flood(self, edge: RawEdge) -> bool:
        """More messages than anybody reads."""
        self._has_left = True
        kind = self._draw.choice((Kind.BEAT, Kind.FETCH, Kind.NULL, Kind.LEAVE))
        for _ in range(self._draw.choice((20, 300, 1500))):
            edge.send(Header(kind, step=self._step + 1))
            if edge.is_over.is_set():
                break
        return False

    def _leaves(self, edge: RawEdge) -> bool:
        """It says that it leaves, and goes on all the same."""
        self._has_left = True
        edge.send(Header(Kind.LEAVE))
        if self._draw.random() < 0.5:
            edge.send(self._sum()[0])
        edge.is_over.wait(self._draw.choice((0.0, 0.3)))
        return False

    def _vanishes(self, edge: RawEdge) -> bool:
        """It closes one link or both, or waits without a beat."""
        if self._draw.random() < 0.3:
            assert edge.is_over.wait(END_S), "node 0 does not miss a node that is silent"
        return False

    def _reasons(self, edge: RawEdge) -> None:
        """It fails, with a reason of any text."""
        texts = "", "\0", "\n\n", "%s%n{0}", "\u20ac" * 130 + "\U0001f4a5" * 4, "x" * 900, "\x1b[2J", "a: b: c"
        edge.send(Header(Kind.FAILED, text=self._draw.choice(texts)))
        edge.close()
        edge.is_over.set()

    # -- visitors ----------------------------------------------------------------------------------

    def ports(self) -> list[int]:
        """The ports at which the agents listen now."""
        found = [each for agent in self.agents for each in psutil.Process(agent).net_connections("tcp")]
        return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]

    def visitor(self) -> None:
        """Random bytes, half handshakes, connections that are opened and closed, and some that stay open."""
        ports = self.ports()
        for _ in range(self._draw.choice((1, 5, 40))):
            if not ports:
                return
            way = self._draw.choice(("nothing", "bytes", "bytes", "handshake", "hold", "reset"))
            self._note(f"visitor: {way}")
            with contextlib.suppress(OSError):
                self._visit(self._draw.choice(ports), way)
        while len(self.held) > 40:
            self.held.pop(self._draw.randrange(len(self.held))).close()

    def _visit(self, port: int, way: str) -> None:
        visitor = socket.create_connection(("127.0.0.1", port), 0.2)  # the port of an open link of Gloo does not answer
        visitor.settimeout(2.0)
        if way in ("bytes", "hold"):
            visitor.sendall(self._draw.randbytes(self._draw.choice((1, 7, 8, 9, 63, 64, 65, 512, 100_000))))
        elif way == "handshake":
            visitor.sendall(self._greeting()[: self._draw.choice((1, 8, 10, 11, 64, 200))])
        elif way == "reset":
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if way == "hold" or self._draw.random() < 0.1:
            self.held.append(visitor)
        else:
            visitor.close()

    def _greeting(self) -> bytes:
        """How a connection of ZeroMQ (ZMTP 3.1) begins, with what may follow; over Gloo, a number of a connection."""
        if self.job.link == "gloo":
            return struct.pack("<q", self._draw.choice((-1, 0, 1, 2, 3, 2**63 - 1)))
        mechanism = self._draw.choice((b"NULL", b"PLAIN", b"CURVE")).ljust(20, b"\0")
        rest = self._draw.choice((b"\x04\x19\x05READY", b"\x04\xc8\x05HELLO\x01\x00", b"\x06\xff\xff\xff\xff\xff\xff\xff\xff"))
        return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism + bytes(32) + rest + self._draw.randbytes(200)

    def close(self) -> None:
        for each in self.held:
            each.close()
        self.held.clear()
