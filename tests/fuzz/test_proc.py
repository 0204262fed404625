"""The kernel's lists of sockets and processes hold names that anybody chose: they are read without an exception."""

import contextlib
import os
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fastps.cli import top
from fastps.membership import discovery
from fastps.system import memory_limits, proc, unix_sockets
from tests.fuzz.amount import fuzz

_NAMES = [b"@fastps/", b"/host", b"/0", b"~0a1b2c3d", b"00010000", b"0: 2 0 00010000 0001 01 7 "]
_PIECES = st.sampled_from([b"\n", b" ", b")", *_NAMES, b"\xff", b"\0", b"9" * 50])
_BYTES = st.lists(st.one_of(_PIECES, st.binary(max_size=12)), max_size=12).map(b"".join)
_LINE = b"0000000000000000: 00000002 00000000 00010000 0001 01 12345 @fastps/real/host\n"


@st.composite
def _messages(draw: st.DrawFn) -> bytes:
    """A netlink answer about sockets with such names, or nearly one."""
    data = b""
    for _ in range(draw(st.integers(0, 3))):
        name, user = b"\0" + draw(_BYTES), draw(st.binary(max_size=6))
        pad = lambda text: text + bytes(-len(text) % 4)  # noqa: E731
        content = struct.pack("=BBBBIII", 1, 1, draw(st.sampled_from([7, 10, 1])), 0, 5, 0, 0)
        content += pad(struct.pack("=HH", 4 + len(name) + draw(st.sampled_from([0, 0, -4, 4, 60000])), 0) + name)
        content += pad(struct.pack("=HH", 4 + len(user), 7) + user)
        length = 16 + len(content) + draw(st.sampled_from([0, 0, 0, -1, -20, 1, 1 << 20]))
        data += struct.pack("=IHHII", length, draw(st.sampled_from([20, 20, 3, 2])), 0, 1, 0) + content
    return data + draw(st.binary(max_size=20))


def test_any_list_of_sockets_is_read() -> None:
    def check(data: st.DataObject) -> None:
        table = data.draw(_BYTES) + b"\n" + _LINE + data.draw(_BYTES)
        names = [each.name for each in unix_sockets.in_table(table) if each.listens]
        found = discovery.places_in(names)
        assert found["real"] == {"host"}
        assert all(job.isprintable() and job for job in found)
        discovery.places_in([data.draw(_BYTES)])
        with contextlib.suppress(OSError):  # the list is then read from /proc/net/unix
            for _, content in unix_sockets.messages_in(data.draw(_messages())):
                unix_sockets._socket_in(content)

    fuzz("lists of sockets", check)


def test_any_name_is_listed_by_the_kernel_as_it_was_bound() -> None:
    def check(data: st.DataObject) -> None:
        name = b"fastps/" + data.draw(_BYTES)[:90]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
            bound.bind(b"\0" + name)
            bound.listen()
            assert unix_sockets.Named(name, True, os.geteuid()) in unix_sockets.named(b"fastps/")
            assert all(job.isprintable() for job in discovery.listening())

    fuzz("names of sockets", check)


def test_any_file_of_a_process_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "group"
    group.mkdir()
    monkeypatch.setattr(memory_limits, "_own_groups", lambda: [group])

    def check(data: st.DataObject) -> None:
        found = proc.processor_time_in(data.draw(_BYTES))
        assert found == "" or found == "stopped" or " " in found
        assert isinstance(proc.column_in(data.draw(_BYTES), 1), int | None)
        command = [os.fsdecode(word) for word in data.draw(_BYTES).split(b"\0")]
        assert top.command_text(command).isprintable() and len(top.command_text(command)) <= 83
        stat = b"7 (" + data.draw(_BYTES) + b") T 1 7 7 0 -1 4194304 1 0 0 0 12 3 0 0"
        assert proc.processor_time_in(stat) == "stopped"
        assert proc.column_in(stat, 1) == 1
        assert proc.processor_time_in(stat.replace(b") T 1 7", b") R 1 7")) == "12 3"
        for name in ("memory.max", "memory.current", "memory.events"):
            (group / name).write_bytes(data.draw(st.one_of(_BYTES, st.sampled_from([b"max\n", b"123\n", b"oom_kill 3\n"]))))
        free, _ = memory_limits.available_bytes()
        assert free >= 0
        assert memory_limits.oom_kills() >= 0

    fuzz("files of processes", check)
