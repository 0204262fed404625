"""The answering thread, spoken to byte by byte: hostile and slow clients, its end, forks, and what it leaves open."""

import contextlib
import ctypes
import gc
import os
import random
import re
import secrets
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastps.kernels.memory import rendezvous as answer
from tests.support import descriptors, processes

ABI = 7
HASH = bytes(range(32))
OTHER_HASH = bytes(reversed(range(32)))
AT_ONCE_S = 0.9  # below the second that a bad client may hold the thread; what an answer takes is what the machine has left


@pytest.fixture
def name() -> bytes:
    return b"\0fastps-test/" + secrets.token_hex(6).encode()


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("fastps-test")
    yield descriptor
    os.close(descriptor)


def _listener(name: bytes, memory: int, layout: bytes = b"{}", user: int | None = None) -> answer.Listener:
    """An listener at place 5. The memory stands for the pidfd too: the thread hands out both without a look."""
    return answer.Listener(name, memory, memory, ABI, HASH, layout, 5, os.geteuid() if user is None else user)


def _client(name: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)
    connection.connect(name)
    return connection


def _read_all(connection: socket.socket) -> bytes:
    """Everything until the listener hangs up."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
    return data


def _reply(name: bytes, message: bytes) -> bytes:
    """What the listener sends to a client that says `message`, and nothing more."""
    with _client(name) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
        return _read_all(connection)


def _seconds_to_answer(name: bytes) -> float:
    began = time.monotonic()
    assert answer.unpack_offer(_reply(name, answer.pack_hello(ABI, HASH, 0, False))) == (answer.OK, 5, 0)
    return time.monotonic() - began


def _threads() -> list[Path]:
    """The answering threads of this process."""
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().strip() == "fastps-answer"]


# -- messages ------------------------------------------------------------------------------------------------------------


def test_a_shorter_hello_of_another_abi_is_answered_at_once(name: bytes, memory: int) -> None:
    with _listener(name, memory), _client(name) as connection:
        began = time.monotonic()
        connection.sendall(answer.pack_hello(ABI + 1, HASH, 0, False)[: answer.PREFIX_BYTES])
        data = _read_all(connection)
        assert answer.abi_of(data) == ABI
        assert answer.unpack_offer(data)[0] == answer.ABI_DIFFERS
        assert time.monotonic() - began < AT_ONCE_S


def test_another_user_is_refused_whatever_it_says(name: bytes, memory: int) -> None:
    with _listener(name, memory, user=os.geteuid() + 1) as listener:
        for message in (b"", answer.pack_hello(ABI, HASH, 0, False), answer.pack_hello(ABI, OTHER_HASH, 1, False) + b"x"):
            assert answer.unpack_offer(_reply(name, message)) == (answer.REFUSED, 5, 0)
        assert listener.foreign_layout() is None


def test_bytes_that_are_no_answer_are_not_taken_for_one() -> None:
    assert answer.abi_of(bytes(answer.PREFIX_BYTES)) is None
    with pytest.raises(ValueError, match="at least 16 bytes, found 15"):
        answer.abi_of(bytes(15))
    with pytest.raises(ValueError, match="expected 32 bytes, found 33"):
        answer.unpack_offer(bytes(33))


# -- hostile and slow clients --------------------------------------------------------------------------------------------


HELLO = answer.pack_hello(ABI, OTHER_HASH, 0, False)
CUT_SHORT = {
    "nothing": b"",
    "one byte": HELLO[:1],
    "half a prefix": HELLO[: answer.PREFIX_BYTES // 2],
    "all but one byte": HELLO[:-1],
    "half a layout": answer.pack_hello(ABI, OTHER_HASH, 1_000_000, False) + b"x" * 500_000,
}
WRONG = {
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "noise": random.Random(5).randbytes(300_000),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a huge layout": HELLO[:-8] + struct.pack("=Q", 2**63) + b"x" * 1000,
    "the largest length": HELLO[:-8] + b"\xff" * 8,
    "one byte too many": HELLO[:-8] + struct.pack("=Q", answer.MAX_LAYOUT_BYTES + 1),
    "an unknown flag": HELLO[:12] + struct.pack("=I", 2) + HELLO[16:],
}


@pytest.mark.parametrize("what", [*CUT_SHORT, *WRONG])
def test_hostile_bytes_are_dropped_and_the_next_client_is_served(name: bytes, memory: int, what: str) -> None:
    with _listener(name, memory) as listener:
        before = descriptors.opened()
        for _ in range(5):
            if what in CUT_SHORT:
                assert _reply(name, CUT_SHORT[what]) == b""
            else:
                assert answer.unpack_offer(_reply(name, WRONG[what])) == (answer.BAD_HELLO, 5, 0)
        assert _seconds_to_answer(name) < AT_ONCE_S
        assert listener.foreign_layout() is None
        assert descriptors.settle(before) == before


@pytest.mark.parametrize(("layout", "said"), [(b"{}", b""), (b"x" * 3_000_000, HELLO)], ids=["silent", "deaf"])
def test_a_client_that_says_or_reads_nothing_delays_others_by_its_time_limit_only(
    name: bytes, memory: int, layout: bytes, said: bytes
) -> None:
    with _listener(name, memory, layout), _client(name) as client:
        client.sendall(said)
        assert 0.5 < _seconds_to_answer(name) < 3
        assert said or _read_all(client) == b""


def test_a_client_that_drips_its_bytes_has_no_more_time_than_a_silent_one(name: bytes, memory: int) -> None:
    with _listener(name, memory), _client(name) as dripping:

        def drip() -> None:
            for byte in answer.pack_hello(ABI, HASH, 0, False):
                dripping.sendall(bytes([byte]))
                time.sleep(0.2)

        child = processes.start(drip)
        assert 0.5 < _seconds_to_answer(name) < 3
        processes.finish([child], 20)
        assert child.outcome[0] in ("BrokenPipeError", "ConnectionResetError")


def test_a_client_that_leaves_before_its_answer_ends_does_no_harm(name: bytes, memory: int) -> None:
    with _listener(name, memory, layout=b"x" * 3_000_000):
        for _ in range(20):
            with _client(name) as connection:
                connection.sendall(HELLO)
                connection.recv(1)
        assert _seconds_to_answer(name) < AT_ONCE_S


# -- the thread's end, forks, arguments ----------------------------------------------------------------------------------


def test_close_ends_the_thread_and_frees_the_name(name: bytes, memory: int) -> None:
    before = descriptors.opened()
    listener = _listener(name, memory)
    assert len(_threads()) == 1
    listener.close()
    listener.close()
    assert descriptors.opened() == before
    with pytest.raises(ConnectionRefusedError):
        _client(name)
    deadline = time.monotonic() + 5  # the kernel lists a joined thread for a moment longer
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not _threads()
    with _listener(name, memory):
        _seconds_to_answer(name)


def test_close_does_not_wait_for_a_silent_client(name: bytes, memory: int) -> None:
    listener = _listener(name, memory)
    with _client(name) as silent:
        silent.sendall(b"x")
        time.sleep(0.05)
        began = time.monotonic()
        listener.close()
        assert time.monotonic() - began < AT_ONCE_S
        assert _read_all(silent) == b""


def test_an_answerer_that_is_dropped_ends_too(name: bytes, memory: int) -> None:
    before = descriptors.opened()
    listener = _listener(name, memory)
    del listener
    gc.collect()
    assert descriptors.opened() == before
    with pytest.raises(ConnectionRefusedError):
        _client(name)


def test_the_thread_takes_no_signal(name: bytes, memory: int) -> None:
    with _listener(name, memory):
        (thread,) = _threads()
        blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)", (thread / "status").read_text(), re.MULTILINE)
        assert blocked
        not_blockable = {signal.SIGKILL, signal.SIGSTOP, 32, 33}  # the last two belong to the C library
        for number in set(range(1, 65)) - not_blockable:
            assert int(blocked[1], 16) >> (number - 1) & 1, number
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "the maker's own mask is as it was"


def test_a_child_forked_behind_pythons_back_cannot_end_the_parents_thread(name: bytes, memory: int) -> None:
    with _listener(name, memory) as listener:
        child = ctypes.PyDLL(None).fork()  # runs no at-fork hook
        if child == 0:
            listener.close()
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert _seconds_to_answer(name) < AT_ONCE_S


def test_a_name_that_is_taken_is_an_error_that_leaves_nothing(name: bytes, memory: int) -> None:
    with _listener(name, memory):
        before = descriptors.opened()
        with pytest.raises(OSError, match=r"cannot answer at 'fastps-test/.*Address already in use"):
            _listener(name, memory)
        assert descriptors.opened() == before
        assert len(_threads()) == 1


def test_arguments_out_of_range_are_refused(name: bytes, memory: int) -> None:
    before = descriptors.opened()
    user = os.geteuid()
    for wrong in (b"", b"\0", b"/tmp/path", b"\0" + b"x" * answer.NAME_BYTES):
        with pytest.raises(ValueError, match="begins with a zero byte"):
            _listener(wrong, memory)
    with pytest.raises(ValueError, match="hash of 32 bytes, found 5"):
        answer.Listener(name, memory, memory, ABI, b"short", b"{}", 0, user)
    with pytest.raises(ValueError, match="at most 67108864 bytes of text, found 67108865"):
        answer.Listener(name, memory, memory, ABI, HASH, bytes(answer.MAX_LAYOUT_BYTES + 1), 0, user)
    with pytest.raises(ValueError, match="at most 67108864 bytes of text"):
        answer.pack_hello(ABI, HASH, answer.MAX_LAYOUT_BYTES + 1, False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        answer.Listener(name, memory, -1, ABI, HASH, b"{}", 0, user)
    assert descriptors.opened() == before
