"""The rendezvous: how a process gets the arena's memory from a member of the job, and a pidfd to detect that member's death.

Every attached worker, the creator of the arena and the server each have a listener at an abstract socket. A joiner connects to
them one after the other; no path is created in any file system. Any user may take any name: where a stranger has a place's
name, the process of this user takes an alias of it, which nobody can foresee. An offer brings the memory and the listening
process's pidfd: no process id is looked up, so a reused id cannot mislead. Each way in which connecting can fail has an
exception, which the caller translates. The caller also checks, when it maps the memory, that it is a sealed arena.
"""

import contextlib
import errno
import hashlib
import os
import socket
import struct
import weakref
from dataclasses import dataclass
from typing import Literal, Self

from fastps.job.environment import check_job
from fastps.kernels.memory import rendezvous
from fastps.kernels.shm.arena import ABI
from fastps.system import unix_sockets
from fastps.system.clock import SYSTEM_CLOCK, Clock

Place = int | Literal["host", "server", "board", "group", "driver", "optimizer"]
"""The listener to connect to: the worker of a lane, the process that created the arena, the job's server process, the
board of a job of several nodes, or the store of a process group: the memory of these two is no arena. Or the driver of a job in
virtual time, or the process that runs the job's optimizer in Python; these have no Listener."""

HOST_PLACE = -1
"""The place in an offer from a process that has no lane."""

_NAMED = ("host", "server", "board", "group", "driver", "optimizer")
_RETRY_NS = 1_000_000
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group
_DESCRIPTOR = struct.Struct("=i")


class Absent(Exception):  # noqa: N818  (an outcome; the caller decides whether it is an error)
    """No process listens at the place: its worker has not attached yet, has left, or is dead."""


class Silent(Exception):  # noqa: N818
    """A process listens at the place, but gave no valid answer in time: it is stopped, overloaded, or not fastps."""


class OtherUser(Absent):
    """Only a process of another user listens at the place: any user may take a name, so this says nothing about the job."""


class AbiDiffers(Exception):  # noqa: N818
    """This process and the listener have different arena formats; `theirs` is the listener's format number."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"expected the job's arena format to be {ours} as in this process, found {theirs}:"
            " use one version of fastps for all workers"
        )
        self.theirs = theirs


class LayoutDiffers(Exception):  # noqa: N818
    """The hashes of the layouts differ; `theirs` is the text of the listener's layout."""

    def __init__(self, theirs: str) -> None:
        super().__init__("the layouts of this process and the listener differ")
        self.theirs = theirs


@dataclass(frozen=True)
class Offer:
    """The result of a successful `connect`. The caller owns both descriptors, and closes what it does not keep."""

    memfd: int  # the arena's memory, not checked yet
    pidfd: int  # the listening process; readable once it has ended
    place: int  # the lane of that process, or HOST_PLACE
    process_id: int  # as the kernel reports it, for messages only

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.memfd)
        os.close(self.pidfd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_live: "weakref.WeakSet[Listener | ReaderName]" = weakref.WeakSet()


class Listener(rendezvous.Listener):
    """A thread that answers at `name` for this process until it is closed. It runs without the GIL.

    The descriptors are duplicated: the caller keeps its own. Clients receive `place`: a lane, or HOST_PLACE. `layout` is the
    text of the layout, `abi` the format. Raises ValueError for an argument out of range, and OSError if another process listens
    at `name`.
    """

    def __init__(self, name: bytes, memfd: int, pidfd: int, layout: bytes, place: int, abi: int = ABI) -> None:
        _live.add(self)  # before the socket listens, so that no fork can miss it
        listen, digest = super().__init__, _digest_of(layout)
        try:
            unix_sockets.take(name, lambda taken: listen(taken, memfd, pidfd, abi, digest, layout, place, os.geteuid()))
        except BaseException:
            self.close()
            raise


class ReaderName:
    """The socket name of one place for readers of a job, for as long as it is open. The kernel frees it when its process ends.

    No process can connect to it. Raises OSError if another process has the name.
    """

    def __init__(self, job: str, reader: int) -> None:
        _live.add(self)  # before the name is taken, so that no fork can miss it
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix_sockets.take(_name(job, f"reader{reader}"), self._socket.bind)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Free the name. May be called twice."""
        self._socket.close()


def _after_fork_in_child() -> None:
    """Close the inherited sockets: the child has no listener thread, and would keep the names of a dead parent taken."""
    for listener in list(_live):
        listener.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def place_name(job: str, place: Place) -> bytes:
    """The abstract socket name of a place: a zero byte and `fastps/<job>/<place>`. Raises ValueError.

    The name leaves room for the tail of an alias. Raises UsageError for a job's name that is too long.

    >>> place_name("mnist", 3)
    b'\\x00fastps/mnist/3'
    """
    if place not in _NAMED and (not isinstance(place, int) or place < 0):
        raise ValueError(f"expected a lane's number or one of {', '.join(_NAMED)} as the place, found {place!r}")
    return _name(job, str(place))


def _name(job: str, place: str) -> bytes:
    before, after = b"\0fastps/", b"/" + place.encode()
    check_job(job, rendezvous.NAME_BYTES - unix_sockets.TAIL_BYTES - len(before + after))
    return before + os.fsencode(job) + after


def _digest_of(layout: bytes) -> bytes:
    """The hash of a layout's text; without a text one that no layout has."""
    return hashlib.sha256(layout).digest() if layout else bytes(32)


def check_free(job: str, place: Place) -> None:
    """Raise OSError if another process of this user listens at a place. This process never does, not even for a moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        unix_sockets.take(place_name(job, place), probe.bind)


def connect(
    job: str,
    place: Place,
    timeout_s: float,  # the longest wait for the answer; an absent listener is found at once
    layout: bytes = b"",  # UTF-8 text; the listener compares its hash, and keeps it to log a difference
    *,
    abi: int = ABI,  # the format in this process, which the listener compares with its own
    observer: bool = False,  # compare only the ABI
    clock: Clock = SYSTEM_CLOCK,
) -> Offer:
    """Connect to the listener at a place, or at an alias of its name, and return its offer of the memory and its pidfd.

    Raises Absent, Silent, OtherUser, AbiDiffers or LayoutDiffers; ValueError for an argument out of range; OSError if this
    process has no descriptors left.
    """
    name = place_name(job, place)
    hello = rendezvous.pack_hello(abi, _digest_of(layout), len(layout), observer) + layout

    def ask(at: bytes) -> Offer:
        return _ask(at, hello, abi, _Deadline(clock, timeout_s, f"place {place} of job {job}"))

    try:
        return ask(name)
    except (Absent, Silent):
        for alias in unix_sockets.aliases(name):
            with contextlib.suppress(Absent):
                return ask(alias)
        raise


def _ask(name: bytes, hello: bytes, abi: int, deadline: "_Deadline") -> Offer:
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            _connect(connection, name, deadline)
            process_id = check_user(connection)
            found = _exchange(connection, hello, abi, process_id, deadline)
        if found is not None:
            return found
        # The listener hung up: its process ended, or it drops clients that are too slow. The next connect tells which.
        deadline.pause()


class _Deadline:
    """The time left for one `connect`. Raises Silent if none is left."""

    def __init__(self, clock: Clock, timeout_s: float, whom: str) -> None:
        self._clock = clock
        self._end_ns = clock.now_ns() + int(timeout_s * 1e9)
        self._timeout_s = timeout_s
        self._whom = whom

    def limit(self, connection: socket.socket) -> None:
        connection.settimeout(self._left_ns() / 1e9)

    def pause(self) -> None:
        self._clock.sleep_ns(min(_RETRY_NS, self._left_ns()))

    def silent(self, found: str) -> Silent:
        return Silent(f"{self._whom}: expected an answer within {self._timeout_s:g} s, found {found}")

    def _left_ns(self) -> int:
        left_ns = self._end_ns - self._clock.now_ns()
        if left_ns <= 0:
            raise self.silent("a process that listens but does not answer")
        return left_ns


def _connect(connection: socket.socket, name: bytes, deadline: _Deadline) -> None:
    connection.setblocking(False)  # a local connect returns at once, and fails if the backlog is full
    while True:
        try:
            return connection.connect(name)
        except BlockingIOError:
            deadline.pause()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise Absent(f"nobody answers at {name[1:].decode(errors='replace')!r}") from error


def check_user(connection: socket.socket) -> int:
    """Check the user at the other end: any can use an abstract name. Return its process id. Raises OtherUser."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, user, _ = _CREDENTIALS.unpack(data)
    if user != os.geteuid():
        raise OtherUser(f"process {process_id} answers for another user: expected user {os.geteuid()}, found {user}")
    return int(process_id)


def _exchange(connection: socket.socket, hello: bytes, abi: int, process_id: int, deadline: _Deadline) -> Offer | None:
    """Send the hello and read the answer. Return None if the listener hung up before the answer was complete."""
    descriptors: list[int] = []
    try:
        deadline.limit(connection)
        with contextlib.suppress(ConnectionError):
            # A listener may hang up before it has read the whole text. Its answer can still be received.
            connection.sendall(hello)
        status, place, layout_bytes = rendezvous.unpack_offer(_receive_head(connection, descriptors, abi, deadline))
        if status == rendezvous.LAYOUT_DIFFERS:
            if layout_bytes > rendezvous.MAX_LAYOUT_BYTES:
                raise deadline.silent(f"an announced layout of {layout_bytes} bytes")
            raise LayoutDiffers(_receive(connection, layout_bytes, deadline).decode("utf-8", "replace"))
        if status == rendezvous.REFUSED:
            raise OtherUser(f"process {process_id} refused to answer user {os.geteuid()}: it belongs to another user")
        if status != rendezvous.OK or len(descriptors) != 2:
            raise deadline.silent(f"status {status} with {len(descriptors)} descriptors")
        memfd, pidfd = descriptors
        descriptors.clear()
        return Offer(memfd, pidfd, place, process_id)
    except TimeoutError:
        raise deadline.silent("a process that listens but does not answer") from None
    except (ConnectionError, EOFError):
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_head(connection: socket.socket, descriptors: list[int], abi: int, deadline: _Deadline) -> bytes:
    """The fixed part of an answer. Its descriptors are appended to `descriptors`, which the caller closes."""
    deadline.limit(connection)
    data, ancillary, flags, _ = connection.recvmsg(
        rendezvous.PREFIX_BYTES, socket.CMSG_LEN(2 * _DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.extend(number for (number,) in _DESCRIPTOR.iter_unpack(content))
    data += _receive(connection, rendezvous.PREFIX_BYTES - len(data), deadline)
    theirs = rendezvous.abi_of(data)
    if theirs is None:
        raise deadline.silent("one from something that is not fastps")
    if theirs != abi:
        raise AbiDiffers(abi, theirs)
    if flags & socket.MSG_CTRUNC:
        if len(descriptors) < 2:
            raise OSError(errno.EMFILE, "no descriptors are left to join the job; raise the limit (`ulimit -n`)")
        raise deadline.silent("more descriptors than an answer has")
    return data + _receive(connection, rendezvous.OFFER_BYTES - rendezvous.PREFIX_BYTES, deadline)


def _receive(connection: socket.socket, length: int, deadline: _Deadline) -> bytes:
    """Receive exactly `length` bytes. Raises EOFError if the listener hangs up before."""
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        deadline.limit(connection)
        count = connection.recv_into(rest)
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return bytes(data)
