"""Another user of the machine may bind any abstract socket name: no job stops, and none is misled."""

import contextlib
import errno
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.errors import AttachError, WorkerDiedError
from fastps.integrations.process_group import meet
from fastps.membership import discovery, rendezvous
from fastps.system import unix_sockets
from tests.support import processes

_STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
WEIGHTS = {"w": np.zeros(4, np.float32)}


@pytest.fixture
def job() -> str:
    return f"test-{secrets.token_hex(6)}"


@contextlib.contextmanager
def _bound(*names: bytes) -> Iterator[list[socket.socket]]:
    """Sockets that listen at these names."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in names]
        for each, name in zip(sockets, names, strict=True):
            each.bind(name)
            each.listen()
        yield sockets


@contextlib.contextmanager
def _stranger(*names: bytes, kind: str = "listens") -> Iterator[None]:
    """A process of another user that has these names: it listens, has only bound them, or listens with a full backlog."""
    ready, done = os.pipe(), os.pipe()

    def work() -> None:
        os.setuid(_STRANGER)
        sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in names]
        asking = []
        for each, name in zip(sockets, names, strict=True):
            each.bind(name)
            if kind != "bound":
                each.listen(0 if kind == "full" else 16)
            if kind == "full":
                asking.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                asking[-1].connect(name)
        os.write(ready[1], b"x")
        os.read(done[0], 1)

    child = processes.start(work)
    try:
        os.close(ready[1])
        assert os.read(ready[0], 1) == b"x"
        yield
    finally:
        os.write(done[1], b"x")
        processes.finish([child], 20)
        for descriptor in (ready[0], *done):
            os.close(descriptor)
    assert child.exit_code == 0, child.outcome


def _places(job: str, *places: Any) -> list[bytes]:
    return [rendezvous.place_name(job, place) for place in places]


# -- names with anything in them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        b"fastps/x\n/0",
        b"fastps/x\n0: 2 0 00010000 0001 01 7 @fastps/forged/host",
        b"fastps/x\n0: 2 0 0000000g 0001 01 7 @fastps/forged/0",
        b"fastps/x\n0: 2 0 " + b"f" * 40 + b" 1 1 7 @fastps/forged/0",
        b"fastps/\xff\xfe/0",
        b"fastps/\x1b[2J/0",
        b"fastps//0",
        b"fastps/x/" + b"9" * 60,
        b"fastps/x/\xc2\xb2",
    ],
)
def test_no_name_makes_the_list_of_jobs_unreadable(job: str, name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with _bound(b"\0" + name, *_places(job, "host")):
        for diagnosed in (unix_sockets._diagnosed, _no_diagnostics):
            monkeypatch.setattr(unix_sockets, "_diagnosed", diagnosed)
            found = discovery.listening()
            assert found[job] == {"host"}
            assert all(each.isprintable() and each for each in found)
            assert discovery.arenas_of(job) == [job]


def _no_diagnostics(prefix: bytes) -> Any:
    raise OSError(errno.EPROTONOSUPPORT, "no diagnostics here")


def test_the_kernels_diagnostics_give_no_forged_names(job: str) -> None:
    name = b"\0fastps/x\n0: 2 0 00010000 0001 01 7 @fastps/" + job.encode() + b"/host"
    with _bound(name[:108]):
        assert job not in discovery.listening()


# -- names that a stranger has -------------------------------------------------------------------------------------------


@needs_root
def test_a_strangers_socket_is_no_job_and_no_sign_of_one(job: str) -> None:
    with _stranger(*_places(job, "host", 0)):
        assert job not in discovery.listening()
        with pytest.raises(AttachError, match=f"answers for another user: expected user 0, found {_STRANGER}"):
            fastps.observe(job, timeout_s=0)


@needs_root
@pytest.mark.parametrize("kind", ["listens", "bound", "full"])
@pytest.mark.sampled(3)
def test_a_job_trains_although_a_stranger_has_all_its_names(job: str, kind: str) -> None:
    readers = [rendezvous._name(job, f"reader{number}") for number in range(8)]
    with _stranger(*_places(job, "host", "server", 0, 1), *readers, kind=kind):
        with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), workers=2, job=job) as store, store.attach(0) as worker:
            assert discovery.listening()[job] == {"host", 0}
            with pytest.raises(AttachError, match="another process answers in its place"):
                store.attach(0)

            def work() -> float:
                theirs = fastps.Store.connect(job, store.layout, store.hypers, timeout_s=60)
                with theirs, theirs.attach(1) as other:
                    other.step({"w": np.ones(4)})
                    return float(other.weights["w"][0])

            child = processes.start(work)
            worker.step({"w": np.ones(4)})
            with fastps.reader(job, timeout_s=10) as reader:
                assert reader.version >= 1
            processes.finish([child], 60)
            assert child.outcome == -1.0


@needs_root
def test_a_stranger_that_takes_a_dead_workers_name_does_not_hide_its_death(job: str) -> None:
    """It took the name before any other worker had looked, which ended the survivors with an error that nobody translated."""
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), workers=2, job=job) as store, store.attach(0) as worker:

        def work() -> None:
            fastps.Store.connect(job, store.layout, store.hypers, timeout_s=60).attach(1)
            os.kill(os.getpid(), signal.SIGKILL)

        child = processes.start(work)
        processes.finish([child], 60)
        with _stranger(*_places(job, 1)), pytest.raises(WorkerDiedError, match="worker 1"):
            for _ in range(3):
                worker.step({"w": np.ones(4)})


@needs_root
def test_a_group_begins_although_a_stranger_has_its_name(job: str) -> None:
    found: list[Any] = []
    with _stranger(rendezvous.place_name(job, "group")):
        threads = [threading.Thread(target=lambda rank=rank: found.append(meet(job, rank, 2, 60.0))) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found[0].set("key", "value")
    assert found[1].get("key") == b"value"


# -- a name still has one process of this user ---------------------------------------------------------------------------


@needs_root
def test_a_second_process_of_this_user_gets_no_alias(job: str) -> None:
    name = _places(job, 0)[0]
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(3))
        with _stranger(name):
            unix_sockets.take(name, first.bind)
            first.listen()
            assert unix_sockets.aliases(name) == [first.getsockname()]
            with pytest.raises(OSError, match="another process of this user"):
                unix_sockets.take(name, second.bind)
            second.close()
        with pytest.raises(OSError, match="another process of this user"):  # the plain name is free again, the place is not
            unix_sockets.take(name, third.bind)


def test_two_that_take_one_name_never_both_have_it(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other takes an alias between the look at the name and the look for rivals."""
    name, both = _places(job, 0)[0], SimpleNamespace(other=socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    with both.other, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:

        def bind(taken: bytes) -> None:
            own.bind(taken)
            both.other.bind(name + b"~0a1b2c3d")

        with pytest.raises(OSError, match="another process of this user"):
            unix_sockets.take(name, bind)


def test_without_diagnostics_a_taken_name_is_an_error(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "_diagnosed", _no_diagnostics)
    name = _places(job, 0)[0]
    with _bound(name), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        with pytest.raises(OSError, match="in use"):
            unix_sockets.take(name, own.bind)
        assert unix_sockets.aliases(name) == []
        unix_sockets.take(_places(job, 1)[0], own.bind)
