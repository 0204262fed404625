"""Arbitrary messages to a listener, arbitrary answers to a joiner: named errors, no leaks, and the next joiner is served."""

import array
import contextlib
import hashlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from fastps.kernels.memory import rendezvous as answer
from fastps.membership import rendezvous
from tests.fuzz.amount import fuzz
from tests.support import descriptors

ABI = 7
LAYOUT = b'{"parameters": ["ours"]}'
HELLO = answer.pack_hello(ABI, hashlib.sha256(LAYOUT).digest(), len(LAYOUT), False) + LAYOUT
FINDINGS = rendezvous.Absent, rendezvous.Silent, rendezvous.OtherUser, rendezvous.AbiDiffers, rendezvous.LayoutDiffers
KINDS = ("memfd", "pipe", "null")


@contextlib.contextmanager
def _opened(kinds: list[str]) -> Iterator[list[int]]:
    """Descriptors of these kinds, closed at the end."""
    with contextlib.ExitStack() as stack:
        found = []
        for kind in kinds:
            if kind == "memfd":
                found.append(os.memfd_create("fuzz"))
            elif kind == "null":
                found.append(os.open("/dev/null", os.O_RDWR))
            else:
                reader, writer = os.pipe()
                os.close(writer)
                found.append(reader)
            stack.callback(os.close, found[-1])
        yield found


@st.composite
def _mutated(draw: st.DrawFn, valid: bytes, words: st.SearchStrategy[bytes]) -> bytes:
    """A valid message with bytes overwritten, inserted and removed; or arbitrary bytes."""
    message = bytearray(valid)
    kind = draw(st.sampled_from(["valid", "words", "bytes", "cut", "prolonged", "anything"]))
    if kind == "anything":
        return draw(st.binary(max_size=200))
    if kind == "cut":
        return bytes(message[: draw(st.integers(0, len(message)))])
    if kind == "prolonged":
        return bytes(message) + draw(st.binary(max_size=300)) * draw(st.sampled_from([1, 1, 500]))
    for _ in range(draw(st.integers(1, 4)) if kind != "valid" else 0):
        place = draw(st.integers(0, len(message) - 1))
        new = draw(words if kind == "words" else st.binary(min_size=1, max_size=9))
        message[place : place + len(new)] = new
    return bytes(message)


_WORDS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, ABI, 1 << 26, (1 << 26) + 1, (1 << 31) - 1, 1 << 32, (1 << 64) - 1]).map(
        lambda number: struct.pack("<Q", number)
    ),
    st.integers(0, (1 << 32) - 1).map(lambda number: struct.pack("<I", number)),
)
_PIECES = st.lists(st.integers(1, 80), max_size=4)


def _send(connection: socket.socket, message: bytes, pieces: list[int], sent: list[int]) -> None:
    """Send a message in pieces of these lengths, with the descriptors on the first; stop if the peer closes."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))] if sent else []
    with contextlib.suppress(OSError):
        for length in pieces:
            if message:
                connection.sendmsg([message[:length]], rights)
                message, rights = message[length:], []
        if message or rights:
            connection.sendmsg([message or b"x"], rights)


@pytest.mark.slow
def test_whatever_is_said_the_next_joiner_is_served() -> None:
    """Several clients at a time: some close the connection, some wait, and some send descriptors."""
    job, memory, pidfd = f"fuzz-{secrets.token_hex(6)}", os.memfd_create("fuzz"), os.pidfd_open(os.getpid())
    name = rendezvous.place_name(job, 0)
    with rendezvous.Listener(name, memory, pidfd, LAYOUT, 0, ABI) as listener:
        before = descriptors.opened()

        def check(data: st.DataObject) -> None:
            clients = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(data.draw(st.integers(1, 4)))]
            for client in clients:
                client.settimeout(5)
                client.connect(name)
                with _opened(data.draw(st.lists(st.sampled_from(KINDS), max_size=8))) as sent:
                    _send(client, data.draw(_mutated(HELLO, _WORDS)), data.draw(_PIECES), sent)
            for client in clients:
                if data.draw(st.booleans()):
                    client.shutdown(socket.SHUT_WR)  # the message is complete: an answer, or the end, comes immediately
                    with contextlib.suppress(ConnectionError):
                        _, rights, _, _ = client.recvmsg(4096, socket.CMSG_SPACE(64))
                        for _, _, content in rights:
                            for (number,) in struct.iter_unpack("=i", content):
                                os.close(number)
                client.close()
            found = rendezvous.connect(job, 0, 10.0, LAYOUT, abi=ABI)
            found.close()
            assert listener.foreign_layout() is None or isinstance(listener.foreign_layout(), str)

        fuzz("attach messages", check)
        assert descriptors.settle(before) == before
    os.close(memory)
    os.close(pidfd)


def test_whatever_is_answered_who_asks_gets_a_named_finding() -> None:
    """A hostile server under a job's name sends arbitrary answers and descriptors, and closes at an arbitrary moment."""
    job = f"fuzz-{secrets.token_hex(6)}"
    name, before = rendezvous.place_name(job, 0), descriptors.opened()
    with _opened(["memfd", "memfd"]) as sent, rendezvous.Listener(name, *sent, LAYOUT, 0, ABI):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(name)
            connection.sendall(HELLO)
            accepting = connection.recv(answer.OFFER_BYTES)
    differing = (
        accepting[:12] + struct.pack("<I", answer.LAYOUT_DIFFERS) + accepting[16:24] + struct.pack("<Q", 9) + b"[1, 2, 3]"
    )

    def check(data: st.DataObject) -> None:
        reply = data.draw(_mutated(data.draw(st.sampled_from([accepting, differing])), _WORDS))
        kinds, pieces = data.draw(st.lists(st.sampled_from(KINDS), max_size=8)), data.draw(_PIECES)
        hears = data.draw(st.booleans())

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, _opened(kinds) as given:
                    if hears:
                        connection.recv(4096)
                    _send(connection, reply, pieces, given)

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(name)
            listener.listen()
            server = threading.Thread(target=serve)
            server.start()
            began = time.monotonic()
            try:
                found = rendezvous.connect(job, 0, 0.05, LAYOUT, abi=ABI)
                found.close()
            except FINDINGS:
                pass
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                server.join()
            assert time.monotonic() - began < 20, "it is no hang, but for a machine that stood still"

    fuzz("answers to a joiner", check)
    assert descriptors.settle(before) == before
