"""The messages between nodes: headers of one fixed size, which no version of fastps changes.

Gloo ends the process that receives a message of another size than it expects, so everything of another size follows a header
that both sides have understood. A header says what follows, and the layout, which both sides know, says how long that is.
"""

import enum
import struct
from dataclasses import dataclass, field

from fastps.errors import ProtocolError

HEADER_BYTES = 512
WIRE_VERSION = 1
_MAGIC = 0x73704661
_FORMAT = struct.Struct("<IHHIIqqqqIId32s16s")
_NUMBERS = ("node", "epoch", "step", "version", "samples", "read_version", "weight", "flags", "loss")
_TEXT_BYTES = HEADER_BYTES - _FORMAT.size - 2


class Kind(enum.IntEnum):
    """What a message is.

    HELLO and WELCOME open an edge, and REFUSED ends one that could not be. PUSH announces a sum, NULL a step without one, and
    WEIGHTS answers both. BEAT says that the sender lives. LEAVE is the last message of a leaf, FAILED that of a failed side.
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


@dataclass(frozen=True)
class Header:
    """One message.

    Attributes:
        node: the sender's number.
        epoch: the number of this edge between the two nodes, from 0.
        step: PUSH, NULL, WEIGHTS: the number of the node's step, from 0. HELLO, WELCOME: steps so far.
        version: WEIGHTS: the version that follows.
        samples: PUSH: samples of the sum.
        read_version: PUSH: reserved for the version that was read.
        weight: PUSH: the gradients in the sum. HELLO: the node's workers.
        flags: reserved.
        loss: PUSH: the mean loss of the gradients, or NaN.
        layout: HELLO: the digest of the job's layout.
        secret: HELLO: proof that both nodes were given the same job name.
        text: REFUSED, FAILED: a sentence for people; cut to fit. HELLO: what floats travel in.

    >>> Header.unpack(Header(Kind.PUSH, node=1, step=7).pack()).step
    7
    """

    kind: Kind
    node: int = 0
    epoch: int = 0
    step: int = 0
    version: int = 0
    samples: int = 0
    read_version: int = 0
    weight: int = 0
    flags: int = 0
    loss: float = float("nan")
    layout: bytes = field(default=bytes(32))
    secret: bytes = field(default=bytes(16))
    text: str = ""

    def pack(self) -> bytes:
        """The message in HEADER_BYTES bytes."""
        text = self.text.encode()[:_TEXT_BYTES]
        numbers = (getattr(self, name) for name in _NUMBERS)
        fixed = _FORMAT.pack(_MAGIC, WIRE_VERSION, self.kind, *numbers, self.layout, self.secret)
        return (fixed + struct.pack("<H", len(text)) + text).ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(data: bytes) -> "Header":
        """The message of `pack`. Raises ProtocolError for anything else."""
        if len(data) != HEADER_BYTES:
            raise ProtocolError(f"expected a message of {HEADER_BYTES} bytes, found {len(data)}")
        magic, wire, kind, *numbers, layout, secret = _FORMAT.unpack_from(data)
        if magic != _MAGIC:
            raise ProtocolError("expected a message of fastps, found other bytes: another program uses the rendezvous' port")
        if wire != WIRE_VERSION:
            raise ProtocolError(
                f"expected messages of version {WIRE_VERSION}, found version {wire}: install one fastps everywhere"
            )
        if kind not in Kind.__members__.values():
            raise ProtocolError(f"expected a message of a known kind, found kind {kind}")
        (length,) = struct.unpack_from("<H", data, _FORMAT.size)
        text = data[_FORMAT.size + 2 :][: min(length, _TEXT_BYTES)].decode("utf-8", "replace")
        return Header(Kind(kind), **dict(zip(_NUMBERS, numbers, strict=True)), layout=layout, secret=secret, text=text)
