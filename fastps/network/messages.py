"""The headers that nodes exchange. All have one size, which no version of fastps changes.

Gloo ends a process that receives a message of another size than it expects. So both sides first exchange a header, which says
what follows; the layout, which both know, gives its size. What another
node says is checked before it has any effect.
"""

import enum
import struct
from dataclasses import dataclass
from typing import Any

from fastps.errors import ProtocolError
from fastps.job.secret import HOW_TO_GIVE

HEADER_BYTES = 512
WIRE_VERSION = 4
_MAGIC = 0x73704661
_FORMAT = struct.Struct("<IHHIqd32sQQIQIqH")
_TEXT_BYTES = HEADER_BYTES - _FORMAT.size


class Kind(enum.IntEnum):
    """The kind of a message.

    HELLO opens an edge. The home answers WELCOME if the node gets a new lane, RESUME if it goes on with its own, and REFUSED
    if it cannot join. FETCH asks for the weights of a new lane. PUSH announces a sum and NULL a step without one; WEIGHTS
    answers all three. BEAT shows that the sender lives, and has its figures. LEAVE says that a node makes no more steps;
    WEIGHTS answers it when all nodes have left, and DONE says that these have come. REOPEN says that the sender has closed the
    edge and will open another. LOST says that another node was lost, without which the job goes on. FAILED ends an edge for
    good, with a reason. In a job with a secret, CHALLENGE and PROOF come before HELLO.
    """

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    PUSH = 4
    NULL = 5
    WEIGHTS = 6
    BEAT = 7
    LEAVE = 8
    FAILED = 9
    RESUME = 10
    FETCH = 11
    REOPEN = 12
    DONE = 13
    CHALLENGE = 14
    PROOF = 15
    LOST = 16


@dataclass(frozen=True)
class Header:
    """One message.

    >>> Header.unpack(Header(Kind.PUSH, weight=2).pack()).weight
    2
    """

    kind: Kind
    weight: int = 0  # PUSH: the number of gradients in the sum. HELLO: the number of the node's workers
    samples: int = 0  # PUSH: of the sum
    loss: float = float("nan")  # PUSH: the mean of the gradients', or NaN
    layout: bytes = bytes(32)  # HELLO, CHALLENGE, PROOF: the digest of the job's layout
    incarnation: int = 0  # HELLO: a random number of the sending agent
    # PUSH, NULL: the step's number, from 1. WEIGHTS: the step that it answers, 0 for FETCH. RESUME, WELCOME: the last step that
    # the home has of this incarnation.
    step: int = 0
    part: int = 0  # PUSH: the first that follows. RESUME: how many parts the home has of the step after `step`
    version: int = 0  # WEIGHTS: the home's version of the weights
    lane: int = 0  # WELCOME, RESUME: how many lanes the node has had. HELLO: the last such number that it was told, 0 if none
    sent_ns: int = 0  # when it left, by the sender's monotonic clock; 0 before it leaves. A peer may say anything
    text: str = ""  # REFUSED, FAILED: the reason, cut to fit. CHALLENGE: a nonce. PROOF: an authentication code
    beat: bytes = b""  # BEAT: its contents, which follow the fields in place of a text

    @property
    def reason(self) -> str:
        """The text of REFUSED or FAILED as an error or a terminal may show it: one line that is not empty.

        >>> Header(Kind.FAILED, text="no memory\\n").reason
        'no memory'
        """
        line = "".join(each if each.isprintable() else " " for each in self.text).strip()
        return line or "the other side gave no reason"

    def pack(self, sent_ns: int | None = None) -> bytes:
        """The message in HEADER_BYTES bytes. `sent_ns` replaces that of the header."""
        stamp_ns = self.sent_ns if sent_ns is None else sent_ns
        tail = (self.beat if self.kind == Kind.BEAT else self.text.encode())[:_TEXT_BYTES]
        fixed = _FORMAT.pack(
            _MAGIC, WIRE_VERSION, self.kind, self.weight, self.samples, self.loss, self.layout,
            self.incarnation, self.step, self.part, self.version, self.lane, stamp_ns, len(tail),
        )  # fmt: skip
        return (fixed + tail).ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(data: bytes) -> "Header":
        """The message of `pack`. Raises ProtocolError for anything else."""
        if len(data) != HEADER_BYTES:
            raise ProtocolError(f"expected a message of {HEADER_BYTES} bytes, found {len(data)}")
        magic, wire, kind, *numbers, length = _FORMAT.unpack_from(data)
        if magic != _MAGIC:
            raise ProtocolError("expected a message of fastps, found other bytes: another program uses the rendezvous' port")
        if wire != WIRE_VERSION:
            raise ProtocolError(
                f"expected messages of version {WIRE_VERSION}, found version {wire}: install one fastps everywhere"
            )
        if kind not in Kind.__members__.values():
            raise ProtocolError(f"expected a message of a known kind, found kind {kind}")
        tail = data[_FORMAT.size :][: min(length, _TEXT_BYTES)]
        is_beat = kind == Kind.BEAT
        fields: list[Any] = [Kind(kind), *numbers, "" if is_beat else tail.decode("utf-8", "replace"), tail if is_beat else b""]
        return Header(*fields)


MOST_GRADIENTS = 1 << 20  # in one sum of a node
MOST_SAMPLES = 1 << 48  # in one sum of a node


def hello_fault(hello: Header, layout: bytes) -> str:
    """Why the first message over an edge is no HELLO of this job; empty if it is one.

    >>> hello_fault(Header(Kind.HELLO, weight=2), bytes(32))
    ''
    """
    if hello.kind == Kind.CHALLENGE:
        return f"node 0 was given no secret, and this node has one: {HOW_TO_GIVE}"
    if hello.kind != Kind.HELLO:
        return f"expected a HELLO, found {hello.kind.name}"
    if hello.layout != layout:
        return "expected a HELLO of this job's layout, found another layout: build the same model, optimizer and discipline"
    if not 1 <= hello.weight <= MOST_GRADIENTS:
        return f"expected a HELLO of 1 to {MOST_GRADIENTS} workers, found {hello.weight}"
    return ""


def check_push(header: Header) -> None:
    """Check the numbers of a PUSH. Raises ProtocolError."""
    if not 1 <= header.weight <= MOST_GRADIENTS:
        raise ProtocolError(f"expected a sum of 1 to {MOST_GRADIENTS} gradients, found {header.weight}")
    if not 0 <= header.samples <= MOST_SAMPLES:
        raise ProtocolError(f"expected a sum over 0 to {MOST_SAMPLES} samples, found {header.samples}")
