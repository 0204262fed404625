"""How the two sides of an edge prove to each other that they know the job's secret, before anything else travels.

Each side draws a nonce. Each answers with an HMAC-SHA256 over both nonces and everything that names the edge, so that an answer
is worth nothing on another edge, in the other direction, or later. The leaf proves first.
"""

import contextlib
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import NoReturn

from fastps.job.secret import HOW_TO_GIVE, Secret
from fastps.network.edge import Edge
from fastps.network.link import LinkLostError, MismatchError
from fastps.network.messages import Header, Kind

NONCE_BYTES = 32


@dataclass(frozen=True)
class EdgeName:
    """What names one edge: the job, the node at its leaf's end, its epoch, and the digest of the layout."""

    job: str
    node: int
    epoch: int
    layout: bytes


def mac(secret: Secret, *words: bytes | str | int) -> str:
    """The HMAC-SHA256 over words, in hexadecimal digits. Each word counts with its length, so no two lists are alike.

    >>> mac(Secret(b"k"), "ab", "c") == mac(Secret(b"k"), "a", "bc")
    False
    """
    code = hmac.new(secret.key, digestmod=hashlib.sha256)
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        code.update(len(data).to_bytes(8, "little") + data)
    return code.hexdigest()


def are_equal(found: str, expected: str) -> bool:
    """Whether two codes are equal, in a time that does not depend on where they differ. `found` may be any text."""
    return hmac.compare_digest(found.encode(), expected.encode())


def prove(edge: Edge, secret: Secret | None, name: EdgeName, *, is_home: bool, timeout_s: float) -> None:
    """Prove to the other side of an edge that this side knows the secret, and let it prove the same.

    Does nothing without a secret. Raises MismatchError if the other side does not prove it, and tells it why, and LinkLostError
    if it does not answer.
    """
    if secret is None:
        return
    own = secrets.token_bytes(NONCE_BYTES)
    if is_home:
        other = _nonce(_next(edge, Kind.CHALLENGE, name, timeout_s), edge)
        edge.send_header(Header(Kind.CHALLENGE, layout=name.layout, text=own.hex()))
        _check(edge, secret, name, "leaf", other + own, timeout_s)
        edge.send_header(_proof(secret, name, "home", other + own))
    else:
        edge.send_header(Header(Kind.CHALLENGE, layout=name.layout, text=own.hex()))
        other = _nonce(_next(edge, Kind.CHALLENGE, name, timeout_s), edge)
        edge.send_header(_proof(secret, name, "leaf", own + other))
        _check(edge, secret, name, "home", own + other, timeout_s)


def _proof(secret: Secret, name: EdgeName, prover: str, nonces: bytes) -> Header:
    code = mac(secret, "edge", prover, nonces, name.job, name.node, name.epoch, name.layout)
    return Header(Kind.PROOF, layout=name.layout, text=code)


def _check(edge: Edge, secret: Secret, name: EdgeName, prover: str, nonces: bytes, timeout_s: float) -> None:
    found = _next(edge, Kind.PROOF, name, timeout_s)
    if not are_equal(found.text, _proof(secret, name, prover, nonces).text):
        refuse(edge, f"the two sides have different secrets: {HOW_TO_GIVE}")


def _nonce(challenge: Header, edge: Edge) -> bytes:
    try:
        nonce = bytes.fromhex(challenge.text)
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        refuse(edge, f"expected a nonce of {NONCE_BYTES} bytes, found other text: install one fastps everywhere")
    return nonce


def _next(edge: Edge, kind: Kind, name: EdgeName, timeout_s: float) -> Header:
    header = edge.next_header(timeout_s)
    if header is None:
        raise LinkLostError(f"the other side did not prove within {timeout_s:g} s that it knows the job's secret")
    if header.kind == Kind.REFUSED:
        raise MismatchError(header.reason)
    if header.kind == Kind.HELLO:
        refuse(edge, f"this job has a secret, and a node did not prove that it knows it: {HOW_TO_GIVE}")
    if header.kind != kind:
        refuse(edge, f"expected {kind.name}, found {header.kind.name}: {HOW_TO_GIVE}")
    if header.layout != name.layout:
        refuse(edge, "the two sides have different layouts: build the same model, optimizer and discipline on all nodes")
    return header


def refuse(edge: Edge, reason: str) -> NoReturn:
    """Tell the other side why it cannot join. Raises MismatchError."""
    with contextlib.suppress(LinkLostError):
        edge.send_header(Header(Kind.REFUSED, text=reason))
    raise MismatchError(reason)
