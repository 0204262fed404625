"""The rendezvous between real processes: what an answer brings, how differences are named, deaths, nothing leaked."""

import contextlib
import hashlib
import json
import mmap
import os
import re
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastps.errors import UsageError
from fastps.kernels.memory import rendezvous as answer
from fastps.membership import rendezvous
from fastps.system import unix_sockets
from tests.support import descriptors, processes

ABI = 7
LAYOUT = b'{"parameters": ["ours"]}'
HASH = hashlib.sha256(LAYOUT).digest()
AT_ONCE_S = 0.5  # far above what an answer takes


@pytest.fixture
def job() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("fastps-test")
    os.write(descriptor, b"arena")
    yield descriptor
    os.close(descriptor)


def _listener(job: str, memory: int, place: rendezvous.Place = 0, layout: bytes = LAYOUT) -> rendezvous.Listener:
    pidfd = os.pidfd_open(os.getpid())
    try:
        number = rendezvous.HOST_PLACE if place == "host" else place
        return rendezvous.Listener(rendezvous.place_name(job, place), memory, pidfd, layout, number, ABI)
    finally:
        os.close(pidfd)


def _ask(job: str, place: rendezvous.Place = 0, **changes: Any) -> rendezvous.Offer:
    arguments: dict[str, Any] = {"abi": ABI, "layout": LAYOUT, "timeout_s": 5.0}
    return rendezvous.connect(job, place, **arguments | changes)


def _ask_and_close(job: str, place: rendezvous.Place = 0, **changes: Any) -> rendezvous.Offer:
    found = _ask(job, place, **changes)
    found.close()
    return found


def _process_of(pidfd: int) -> int:
    found = re.search(r"^Pid:\s*(-?\d+)", Path(f"/proc/self/fdinfo/{pidfd}").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _is_alive(pidfd: int) -> bool:
    return not select.select([pidfd], [], [], 0)[0]


SPAWNED = """
import ctypes, os, sys
from fastps.membership import rendezvous
job, seconds_held = sys.argv[1], float(sys.argv[2])
memory, pidfd = os.memfd_create("fastps-test"), os.pidfd_open(os.getpid())
listener = rendezvous.Listener(rendezvous.place_name(job, 0), memory, pidfd, b'{"parameters": ["ours"]}', 0, 7)
print("ready", flush=True)
if seconds_held:
    ctypes.PyDLL(None).usleep(int(seconds_held * 1e6))  # a PyDLL call keeps the GIL
    print("awake", flush=True)
print(os.pread(memory, 5, 0).decode() if sys.stdin.readline() else "", flush=True)
"""


@contextlib.contextmanager
def _spawned(job: str, seconds_held: float = 0.0) -> Iterator["subprocess.Popen[str]"]:
    """A process that shares nothing with this one, and answers at place 0."""
    command = [sys.executable, "-c", SPAWNED, job, str(seconds_held)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


# -- what an answer brings -----------------------------------------------------------------------------------------------


def test_an_answer_brings_the_memory_and_the_pidfd_of_whoever_answers(job: str, memory: int) -> None:
    with _listener(job, memory, 3):
        found = _ask(job, 3)
        assert os.fstat(found.memfd).st_ino == os.fstat(memory).st_ino
        assert os.pread(found.memfd, 5, 0) == b"arena"
        assert (found.place, found.process_id) == (3, os.getpid())
        assert _process_of(found.pidfd) == os.getpid()
        assert _is_alive(found.pidfd)
        found.close()


def test_the_host_and_the_lanes_of_one_process_have_places_of_their_own(job: str, memory: int) -> None:
    with _listener(job, memory, "host"), _listener(job, memory, 0), _listener(job, memory, 12):
        assert [_ask_and_close(job, place).place for place in ("host", 0, 12)] == [rendezvous.HOST_PLACE, 0, 12]


def test_two_unrelated_processes_share_the_memory_and_see_each_other_end(job: str) -> None:
    with _spawned(job) as process:
        found = _ask(job)
        assert (found.process_id, _process_of(found.pidfd)) == (process.pid, process.pid)
        os.pwrite(found.memfd, b"hello", 0)
        assert _is_alive(found.pidfd)
        text, _ = process.communicate("\n", timeout=20)
        assert text == "hello\n"
        assert not _is_alive(found.pidfd)
        found.close()


def test_a_process_answers_while_its_interpreter_is_busy(job: str) -> None:
    with _spawned(job, seconds_held=3.0) as process:
        assert process.stdout is not None
        for _ in range(20):
            began = time.monotonic()
            _ask_and_close(job)
            assert time.monotonic() - began < AT_ONCE_S
        assert not select.select([process.stdout], [], [], 0)[0], "it woke before the last answer: nothing was shown"


def test_a_forked_child_asks_its_parent_and_answers_for_itself(job: str, memory: int) -> None:
    answered = mmap.mmap(-1, 1)

    def work() -> tuple[int, int]:
        with _listener(job, memory, 1):
            asked = _ask_and_close(job, 0).process_id
            processes.wait_until(lambda: answered[0])
        return asked, os.getpid()

    with _listener(job, memory, 0):
        child = processes.start(work)
        found: list[rendezvous.Offer] = []
        while not found:
            with contextlib.suppress(rendezvous.Absent):
                found.append(_ask_and_close(job, 1))
        answered[0] = 1
        processes.finish([child], 10)
    assert found[0].process_id == child.process_id
    assert child.outcome == (os.getpid(), child.process_id)


def test_two_jobs_do_not_meet(job: str, memory: int) -> None:
    absent: list[tuple[str, rendezvous.Place]] = [(job, 1), (job, "host"), (f"{job}/b", 0), (job[:-1], 0), (f"{job} ", 0)]
    with _listener(job, memory, 0), _listener(f"{job}/b", memory, 1):
        for place in absent:
            with pytest.raises(rendezvous.Absent):
                _ask(*place)


def test_no_descriptor_would_reach_a_program_that_is_started(job: str, memory: int) -> None:
    before = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    with _listener(job, memory):
        found = _ask(job)
        now = {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.exists() or entry.is_symlink()}
        fresh = now - before
        assert {found.memfd, found.pidfd} < fresh
        assert not [descriptor for descriptor in fresh if os.get_inheritable(descriptor)]
        found.close()


# -- differences ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 3_000_000])
def test_a_different_layout_is_known_on_both_sides(job: str, memory: int, padding: int) -> None:
    ours, theirs, later = (json.dumps([name, "x" * padding], ensure_ascii=False) for name in ("ours", "thëirs", "later"))
    with _listener(job, memory, layout=ours.encode()) as listener:
        assert listener.foreign_layout() is None
        with pytest.raises(rendezvous.LayoutDiffers) as caught:
            _ask(job, layout=theirs.encode())
        assert caught.value.theirs == ours
        assert listener.foreign_layout() == theirs
        with pytest.raises(rendezvous.LayoutDiffers):
            _ask(job, layout=later.encode())
        assert listener.foreign_layout() == theirs, "the first one is kept"
        _ask_and_close(job, layout=ours.encode())


def test_an_observer_needs_no_layout(job: str, memory: int) -> None:
    with _listener(job, memory) as listener:
        _ask_and_close(job, layout=b"", observer=True)
        _ask_and_close(job, layout=b"x" * 1_000_000, observer=True)
        assert listener.foreign_layout() is None
        with pytest.raises(rendezvous.LayoutDiffers):
            _ask(job, layout=b"")
        assert listener.foreign_layout() is None, "no text is none"


def test_equal_hashes_are_answered_however_long_the_text_is(job: str, memory: int) -> None:
    with _listener(job, memory, layout=b"x" * 2_000_000) as listener:
        for _ in range(20):
            _ask_and_close(job, layout=b"x" * 2_000_000)
        assert listener.foreign_layout() is None


def test_another_abi_is_told_which_one_is_here(job: str, memory: int) -> None:
    with _listener(job, memory) as listener:
        with pytest.raises(rendezvous.AbiDiffers, match="format to be 8 as in this process, found 7") as caught:
            _ask(job, abi=8, layout=b"x" * 1_000_000)
        assert caught.value.theirs == ABI
        assert listener.foreign_layout() is None


# -- users ---------------------------------------------------------------------------------------------------------------


def test_an_answerer_that_refuses_this_user_is_named_so(job: str, memory: int) -> None:
    name = rendezvous.place_name(job, 0)
    with (
        answer.Listener(name, memory, memory, ABI, HASH, LAYOUT, 0, os.geteuid() + 1),
        pytest.raises(rendezvous.OtherUser, match="refused to answer user"),
    ):
        _ask(job)


def test_another_users_answerer_is_not_even_greeted(job: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    with _listener(job, memory) as listener:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(rendezvous.OtherUser, match=f"expected user {user + 1}, found {user}"):
            _ask(job, layout=b"another")
        assert listener.foreign_layout() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_two_real_users_get_nothing_from_each_other(job: str, memory: int) -> None:
    def work() -> tuple[str, bytes]:
        os.setuid(65534)
        with pytest.raises(rendezvous.OtherUser) as caught:
            _ask(job)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(rendezvous.place_name(job, 0))
            return str(caught.value), connection.recv(100)

    with _listener(job, memory):
        text, data = processes.ended(work).outcome
        assert text.endswith("expected user 65534, found 0")
        assert answer.unpack_offer(data) == (answer.REFUSED, 0, 0)
        _ask_and_close(job)


# -- impostors, and a lack of descriptors --------------------------------------------------------------------------------


@contextlib.contextmanager
def _impostor(job: str, reply: bytes, sent: list[int]) -> Iterator[None]:
    """A forked process that listens at place 0 and gives each client the same reply."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(rendezvous.place_name(job, 0))
        listener.listen()

        def work() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    socket.send_fds(connection, [reply], sent)
                    time.sleep(0.05)

        child = processes.start(work)
    try:
        yield
    finally:
        processes.kill(child)


@pytest.fixture
def good_answer(job: str, memory: int) -> bytes:
    """The bytes of an accepting answer, without its descriptors."""
    with _listener(job, memory), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(rendezvous.place_name(job, 0))
        connection.sendall(answer.pack_hello(ABI, HASH, 0, False))
        return connection.recv(1000)


@pytest.mark.parametrize(("whole", "count", "message"), [
    *((64, count, "descriptors") for count in (0, 1, 3)),
    (0, 2, "not fastps"),  # another language
    (20, 2, r"within 0\.3 s"),  # it only hangs up
])  # fmt: skip
def test_an_answer_that_is_none_is_told_and_its_descriptors_are_closed(
    job: str, memory: int, good_answer: bytes, whole: int, count: int, message: str
) -> None:
    before = descriptors.opened()
    reply = good_answer[:whole] or b"x" * 64
    with _impostor(job, reply, [memory] * count), pytest.raises(rendezvous.Silent, match=message):
        _ask(job, timeout_s=0.3 if whole == 20 else 5.0)
    assert descriptors.settle(before) == before


def test_a_lack_of_descriptors_is_named_and_passes(job: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _spawned(job):
        highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
        held: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            os.close(held.pop())  # room for the connection, but not for what it brings
            with pytest.raises(OSError, match="no descriptors are left to join the job"):
                _ask(job)
            held.append(os.dup(0))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)
        _ask_and_close(job)


# -- deaths --------------------------------------------------------------------------------------------------------------


def test_a_killed_process_is_absent_at_once(job: str) -> None:
    with _spawned(job) as process:
        found = _ask(job)
        process.kill()
        assert select.select([found.pidfd], [], [], 10)[0]
        began = time.monotonic()
        with pytest.raises(rendezvous.Absent, match=f"nobody answers at 'fastps/{job}/0'"):
            _ask(job)
        assert time.monotonic() - began < AT_ONCE_S
        assert not _is_alive(found.pidfd)
        found.close()


def test_a_killed_process_is_absent_although_its_forked_child_lives(job: str, memory: int) -> None:
    def parent(ready: Callable[[], object]) -> None:
        with _listener(job, memory):
            os.fork()
            ready()
            time.sleep(60)
            os._exit(0)

    process = processes.start_ready(parent)
    [grandchild] = processes.children_of(process.process_id)
    grandchild_pidfd = os.pidfd_open(grandchild)
    try:
        try:
            _ask_and_close(job)
        finally:
            os.kill(process.process_id, signal.SIGKILL)
            os.waitpid(process.process_id, 0)  # not `finish`: the grandchild holds the pipe that it reads to the end
        with pytest.raises(rendezvous.Absent):
            _ask(job)
        with _listener(job, memory):
            assert _ask_and_close(job).process_id == os.getpid(), "the name is free again"
        assert _is_alive(grandchild_pidfd)
    finally:
        signal.pidfd_send_signal(grandchild_pidfd, signal.SIGKILL)
        assert select.select([grandchild_pidfd], [], [], 10)[0]
        for descriptor in (grandchild_pidfd, process.reader):
            os.close(descriptor)


def test_a_forked_child_holds_none_of_its_parents_sockets(job: str, memory: int) -> None:
    def sockets() -> list[str]:
        return [target for target in descriptors.opened() if "socket:" in target or "anon_inode" in target]

    before = sockets()
    with _listener(job, memory) as listener, _listener(job, memory, 1):

        def look_and_close() -> tuple[list[str], str | None]:
            found = sockets(), listener.foreign_layout()
            listener.close()
            return found

        assert processes.ended(look_and_close).outcome == (before, None)
        _ask_and_close(job, 0)
        _ask_and_close(job, 1)


def test_a_process_killed_while_it_is_asked_is_absent_and_not_silent(job: str) -> None:
    with _spawned(job) as process:
        processes.stop(process.pid)

        def kill_soon() -> None:
            time.sleep(0.3)
            os.kill(process.pid, signal.SIGKILL)

        killer = processes.start(kill_soon)
        with pytest.raises(rendezvous.Absent):
            _ask(job, timeout_s=20.0)
        processes.finish([killer], 10)


def test_a_stopped_process_is_silent_until_it_goes_on(job: str) -> None:
    with _spawned(job) as process:
        processes.stop(process.pid)
        began = time.monotonic()
        with pytest.raises(rendezvous.Silent, match=r"within 0\.3 s, found a process that listens but does not answer"):
            _ask(job, timeout_s=0.3)
        assert 0.3 <= time.monotonic() - began < 2
        process.send_signal(signal.SIGCONT)
        _ask_and_close(job)


def test_a_full_queue_of_clients_is_silent_too(job: str) -> None:
    name = rendezvous.place_name(job, 0)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first,
    ):
        listener.bind(name)
        listener.listen(0)
        first.connect(name)
        with pytest.raises(rendezvous.Silent):
            _ask(job, timeout_s=0.2)


# -- names ---------------------------------------------------------------------------------------------------------------


def test_a_name_is_abstract_and_made_of_job_and_place() -> None:
    assert rendezvous.place_name("mnist", 3) == b"\0fastps/mnist/3"
    assert rendezvous.place_name("mnist", "host") == b"\0fastps/mnist/host"
    assert len(rendezvous.place_name("x" * 86, "host")) == answer.NAME_BYTES - unix_sockets.TAIL_BYTES


@pytest.mark.parametrize("wrong", ["", "x" * 88, "é" * 50])
def test_a_job_name_of_another_length_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="of 1 to 87 bytes"):
        rendezvous.place_name(wrong, 100)


@pytest.mark.parametrize("wrong", [-1, "holder", 1.5, None])
def test_another_kind_of_place_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="lane's number or one of host, server, board, group, driver"):
        rendezvous.place_name("mnist", wrong)
