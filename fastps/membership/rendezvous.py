"""The rendezvous: how a process gets the arena's memory from a job's member, and learns to tell when that member dies.

Every attached worker, and the creator of the arena, answers at an abstract socket of its own; whoever joins asks them
in turn, and no path is created in any file system. An answer brings the memory and the answering process's own pidfd:
no process id is looked up, so a reused number cannot deceive. Refuses to decide: each way in which asking can end is an
exception of its own, which store and peers translate; whether the memory is a sealed arena is checked by who maps it.
"""

import contextlib
import errno
import os
import select
import socket
import struct
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fastps.kernels.shm import rendezvous as answer
from fastps.system.clock import SYSTEM_CLOCK, Clock

Place = int | Literal["host", "server"]
"""Who is asked: the worker of a lane, the process that created the arena, or the job's server process."""

HOST_PLACE = -1
"""How the creator of the arena, and the server, call their place in an answer."""

_RETRY_NS = 1_000_000
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group
_DESCRIPTOR = struct.Struct("=i")


class Absent(Exception):  # noqa: N818  (these are findings; whether one is an error, the caller knows)
    """Nobody listens there: not attached yet, gone, or dead."""


class Silent(Exception):  # noqa: N818
    """Somebody listens there, but gave no answer that we understand in time: stopped, overloaded, or no fastps."""


class OtherUser(Exception):  # noqa: N818
    """Asker and listener belong to different users."""


class AbiDiffers(Exception):  # noqa: N818
    """Asker and listener lay out the arena differently; `theirs` is the listener's number."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"expected the job's arena format to be {ours} as in this process, found {theirs}:"
            " use one version of fastps for all workers"
        )
        self.theirs = theirs


class LayoutDiffers(Exception):  # noqa: N818
    """The layouts' hashes differ; `theirs` is the text of the listener's layout."""

    def __init__(self, theirs: str) -> None:
        super().__init__("the layouts of asker and listener differ")
        self.theirs = theirs


@dataclass(frozen=True)
class Offer:
    """What a successful `connect` brings. Both descriptors belong to the asker, who closes them.

    Attributes:
        memfd: the arena's memory, not checked yet.
        pidfd: the answering process; readable once it has ended.
        place: its lane, or HOST_PLACE.
        process_id: its number as the kernel tells it, for messages only.
    """

    memfd: int
    pidfd: int
    place: int
    process_id: int


_live: "weakref.WeakSet[Listener]" = weakref.WeakSet()


class Listener(answer.Listener):
    """A thread that answers at `name` for this process until it is closed, whatever Python is doing meanwhile.

    The descriptors are duplicated: the caller keeps its own. `place` is told to clients: a lane, or HOST_PLACE.
    Raises ValueError for an argument out of range, OSError when another process answers at `name`.

    Example::

        with Listener(place_name("mnist", 0), memfd, pidfd, ABI, layout.digest(), layout.text().encode(), 0):
            ...  # any process of this user may now connect("mnist", 0, ...)
    """

    def __init__(self, name: bytes, memfd: int, pidfd: int, abi: int, layout_hash: bytes, layout: bytes, place: int) -> None:
        _live.add(self)  # before it listens, so that no fork can miss it
        super().__init__(name, memfd, pidfd, abi, layout_hash, layout, place, os.geteuid())


def _after_fork_in_child() -> None:
    """No thread was forked, but the listening sockets were: left open, they would keep a dead parent's names alive."""
    for listener in list(_live):
        listener.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def place_name(job: str, place: Place) -> bytes:
    """The abstract socket name of a place: a zero byte and `fastps/<job>/<place>`. Raises ValueError.

    >>> place_name("mnist", 3)
    b'\\x00fastps/mnist/3'
    """
    if place not in ("host", "server") and (not isinstance(place, int) or place < 0):
        raise ValueError(f"expected a lane's number, 'host' or 'server' as the place, found {place!r}")
    name = b"\0fastps/" + os.fsencode(job) + b"/" + str(place).encode()
    if not job or len(name) > answer.NAME_BYTES:
        limit = answer.NAME_BYTES - (len(name) - len(os.fsencode(job)))
        raise ValueError(f"expected a job's name of 1 to {limit} bytes, found {job!r}; give the job a shorter name")
    return name


def check_free(job: str, place: Place) -> None:
    """Raise OSError where another process answers at a place; does not answer there, not even for a moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.bind(place_name(job, place))


def connect(
    job: str,
    place: Place,
    *,
    abi: int,
    layout_hash: bytes,
    layout: bytes,
    observer: bool = False,
    timeout_s: float,
    clock: Clock = SYSTEM_CLOCK,
) -> Offer:
    """Ask at a place for the memory and the pidfd of whoever answers there.

    Args:
        job, place: whom to ask.
        abi, layout_hash: this process's; the listener compares them. The hash has 32 bytes.
        layout: UTF-8 text of the layout, which the listener keeps when the hashes differ, to name the difference too.
        observer: only the ABI has to agree; `layout_hash` and `layout` are not looked at.
        timeout_s: longest time until the answer; an absent listener is found at once.
        clock: measures it.

    Raises Absent, Silent, OtherUser, AbiDiffers or LayoutDiffers; ValueError for an argument out of range; OSError when
    this process has no descriptors left.
    """
    name = place_name(job, place)
    hello = answer.pack_hello(abi, layout_hash, len(layout), observer) + layout
    deadline = _Deadline(clock, timeout_s, f"place {place} of job {job}")
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            _connect(connection, name, deadline)
            process_id = _check_user(connection)
            found = _exchange(connection, hello, abi, process_id, deadline)
        if found is not None:
            return found
        # Hung up on: its process ended, or it drops clients that are too slow. The next connect tells which.
        deadline.pause()


def dead_among(pidfds: Iterable[int]) -> list[int]:
    """Those of the pidfds whose processes have ended, by one system call. Raises OSError for one that is not open."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    dead = poll.poll(0)
    for pidfd, events in dead:
        if events & select.POLLNVAL:
            raise OSError(errno.EBADF, f"expected an open pidfd, found the closed descriptor {pidfd}")
    return [pidfd for pidfd, _ in dead]


def pidfd_alive(pidfd: int) -> bool:
    """Whether the process has not ended; one that ended and was not waited for counts as ended. Raises OSError."""
    return not dead_among([pidfd])


# -- the asking side -------------------------------------------------------------------------------


class _Deadline:
    """The time that is left for one `connect`. Raises Silent when there is none."""

    def __init__(self, clock: Clock, timeout_s: float, whom: str) -> None:
        self._clock = clock
        self._end_ns = clock.now_ns() + int(timeout_s * 1e9)
        self._timeout_s = timeout_s
        self._whom = whom

    def limit(self, connection: socket.socket) -> None:
        """Let the connection's next call take no longer than what is left."""
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
    connection.setblocking(False)  # a local connect ends at once, and then fails when the queue of clients is full
    while True:
        try:
            return connection.connect(name)
        except BlockingIOError:
            deadline.pause()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise Absent(f"nobody answers at {name[1:].decode(errors='replace')!r}") from error


def _check_user(connection: socket.socket) -> int:
    """The listener's process id, after its user is known to be ours: anybody may take a name in the abstract space."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, user, _ = _CREDENTIALS.unpack(data)
    if user != os.geteuid():
        raise OtherUser(f"process {process_id} answers for another user: expected user {os.geteuid()}, found {user}")
    return int(process_id)


def _exchange(connection: socket.socket, hello: bytes, abi: int, process_id: int, deadline: _Deadline) -> Offer | None:
    """Send the hello and read the answer; None when the listener hung up before the answer was complete."""
    descriptors: list[int] = []
    try:
        deadline.limit(connection)
        with contextlib.suppress(ConnectionError):
            # An listener that knows enough hangs up before our text ends; its answer lies there to be read.
            connection.sendall(hello)
        status, place, layout_bytes = answer.unpack_offer(_receive_head(connection, descriptors, abi, deadline))
        if status == answer.LAYOUT_DIFFERS:
            if layout_bytes > answer.MAX_LAYOUT_BYTES:
                raise deadline.silent(f"an announced layout of {layout_bytes} bytes")
            raise LayoutDiffers(_receive(connection, layout_bytes, deadline).decode("utf-8", "replace"))
        if status == answer.REFUSED:
            raise OtherUser(f"process {process_id} refused to answer user {os.geteuid()}, who is not its own")
        if status != answer.OK or len(descriptors) != 2:
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
    """The fixed part of an answer; the descriptors that come with it are appended, so that the caller closes them."""
    deadline.limit(connection)
    data, ancillary, flags, _ = connection.recvmsg(
        answer.PREFIX_BYTES, socket.CMSG_LEN(2 * _DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.extend(number for (number,) in _DESCRIPTOR.iter_unpack(content))
    data += _receive(connection, answer.PREFIX_BYTES - len(data), deadline)
    theirs = answer.abi_of(data)
    if theirs is None:
        raise deadline.silent("one from something that is not fastps")
    if theirs != abi:
        raise AbiDiffers(abi, theirs)
    if flags & socket.MSG_CTRUNC:
        if len(descriptors) < 2:
            raise OSError(errno.EMFILE, "no descriptors are left to join the job; raise the limit (`ulimit -n`)")
        raise deadline.silent("more descriptors than an answer has")
    return data + _receive(connection, answer.OFFER_BYTES - answer.PREFIX_BYTES, deadline)


def _receive(connection: socket.socket, length: int, deadline: _Deadline) -> bytes:
    """Exactly `length` bytes. Raises EOFError when the other side hangs up before."""
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        deadline.limit(connection)
        count = connection.recv_into(rest)
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return bytes(data)
