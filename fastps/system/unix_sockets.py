"""The Unix sockets of this machine that have an abstract name: their names, their users, and whether they listen.

Every user may bind any name, and may put any bytes into it. The kernel's socket diagnostics give names as bytes, and each
socket's user. Where the kernel has no diagnostics, /proc/net/unix is read: a line there can be forged, and shows no user.
"""

import errno
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_TABLE = Path("/proc/net/unix")
_LINE = re.compile(rb"^[0-9a-f]+: [0-9a-f]+ [0-9a-f]+ ([0-9a-f]{1,16}) [0-9a-f]+ [0-9a-f]+ +[0-9]+ @(.*)$", re.I | re.M)
_LISTENS = 0x10000  # __SO_ACCEPTCON, in the table's column of flags
_TAIL = re.compile(rb"~[0-9a-f]{8}")  # of a name that was taken because a stranger has the plain one
TAIL_BYTES = 9

# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h
_SOCK_DIAG, _BY_FAMILY, _REQUEST_DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_CLOSE_STATE, _LISTEN_STATE = 7, 10  # of sockets that do not listen and are not connected, and of those that listen
_SHOW_NAME, _SHOW_UID, _NAME, _UID = 0x01, 0x40, 0, 7
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBHIIIII")  # family, protocol, pad, states, inode, show, cookie
_MESSAGE = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_NUMBER = struct.Struct("=I")
_ANSWER_BYTES = 1 << 18  # the kernel sends at most 32 KiB at a time
_ANSWER_S = 1.0


class Named(NamedTuple):
    """A socket's abstract name without the zero byte, whether it listens, and its user; None: the kernel does not tell."""

    name: bytes
    listens: bool
    user: int | None


def named(prefix: bytes) -> list[Named]:
    """The sockets whose abstract names begin with `prefix` and that are not known to be a stranger's. Raises OSError."""
    try:
        found = _diagnosed(prefix)
    except OSError:
        found = in_table(_TABLE.read_bytes(), prefix)
    return [each for each in found if each.user in (None, os.geteuid())]


def aliases(name: bytes) -> list[bytes]:
    """The names at which a process of this user listens because a stranger has `name`; `name` begins with a zero byte."""
    try:
        found = named(name[1:] + b"~")
    except OSError:
        return []
    return [b"\0" + each.name for each in found if each.listens and _is_alias(each.name, name[1:])]


def plain(name: bytes) -> bytes:
    """The name without the tail of an alias.

    >>> plain(b"fastps/mnist/3~0a1b2c3d"), plain(b"fastps/mnist/3")
    (b'fastps/mnist/3', b'fastps/mnist/3')
    """
    return name[:-TAIL_BYTES] if _TAIL.fullmatch(name[-TAIL_BYTES:]) else name


def take(name: bytes, bind: Callable[[bytes], object]) -> None:
    """Bind `name` by `bind(name)`, or an alias that nobody can foresee where a stranger has it.

    A name still has one process of this user: raises OSError (EADDRINUSE) if another one has the name or an alias of it. The
    caller then closes what it has bound. Where the kernel does not tell users, a stranger's name counts as this user's.
    """
    taken = name
    try:
        bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_strangers(name[1:]):
            raise
        taken = name + b"~" + secrets.token_hex(4).encode()
        bind(taken)
    try:
        rivals = [each.name for each in _diagnosed(name[1:]) if each.user == os.geteuid() and b"\0" + each.name != taken]
    except OSError:
        return  # without diagnostics nobody takes an alias
    if any(each == name[1:] or _is_alias(each, name[1:]) for each in rivals):
        raise OSError(errno.EADDRINUSE, f"another process of this user has {name[1:].decode(errors='replace')!r}")


def _is_strangers(name: bytes) -> bool:
    """Whether another user has the name. False if the kernel does not tell."""
    try:
        users = {each.user for each in _diagnosed(name) if each.name == name}
    except OSError:
        return False
    return bool(users) and not users & {None, os.geteuid()}


def _is_alias(name: bytes, of: bytes) -> bool:
    return len(name) == len(of) + TAIL_BYTES and plain(name) == of


def in_table(table: bytes, prefix: bytes = b"") -> list[Named]:
    """The sockets with such names in a text in the format of /proc/net/unix. What is not a line of the table is skipped.

    >>> in_table(b"00000: 00000002 00000000 00010000 0001 01 7 @fastps/mnist/host\\n")
    [Named(name=b'fastps/mnist/host', listens=True, user=None)]
    """
    found = ((flags, name) for flags, name in _LINE.findall(table) if name.startswith(prefix))
    return [Named(name, bool(int(flags, 16) & _LISTENS), None) for flags, name in found]


def _diagnosed(prefix: bytes) -> list[Named]:
    """The sockets whose abstract names begin with `prefix`. Raises OSError if the kernel has no diagnostics of Unix sockets."""
    states = 1 << _CLOSE_STATE | 1 << _LISTEN_STATE
    query = _QUERY.pack(socket.AF_UNIX, 0, 0, states, 0, _SHOW_NAME | _SHOW_UID, 0xFFFFFFFF, 0xFFFFFFFF)
    found: list[Named] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as asking:
        asking.settimeout(_ANSWER_S)
        asking.send(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + query)
        while True:
            for kind, content in messages_in(asking.recv(_ANSWER_BYTES)):
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    number = -int.from_bytes(content[:4], "little", signed=True)
                    raise OSError(number, os.strerror(number))
                if b"\0" + prefix in content and (each := _socket_in(content)) is not None and each.name.startswith(prefix):
                    found.append(each)


def messages_in(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The kinds and contents of netlink messages. Raises OSError for bytes that are none."""
    while data:
        length = _HEADER.unpack_from(data)[0] if len(data) >= _HEADER.size else 0
        if not _HEADER.size <= length <= len(data):
            raise OSError(errno.EPROTO, "expected netlink messages, found other bytes")
        yield _HEADER.unpack_from(data)[1], data[_HEADER.size : length]
        data = data[-(-length // 4) * 4 :]


def _socket_in(content: bytes) -> Named | None:
    """The socket that a message is about; None if it has no abstract name."""
    state = _MESSAGE.unpack_from(content)[2] if len(content) >= _MESSAGE.size else 0
    rest, found = content[_MESSAGE.size :], {}
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[-(-length // 4) * 4 :]
    name, user = found.get(_NAME, b""), found.get(_UID, b"")
    if not name.startswith(b"\0"):
        return None
    return Named(name[1:], state == _LISTEN_STATE, _NUMBER.unpack(user)[0] if len(user) == _NUMBER.size else None)
