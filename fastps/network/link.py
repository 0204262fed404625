"""Links between two nodes: they carry bytes, in order and in both directions. One kind is Gloo's of torch.distributed.

A transfer may fail at any time. The whole link is then lost, and neither side knows which bytes the other has received.

A link of Gloo is a process group of two ranks, so that a fault ends only this link. Three properties of Gloo shape it. A wait
that times out closes the pair, so the link cannot be used again. A transfer that is in flight when the peer is killed does not
fail; only its timeout ends it. Every connection to Gloo's port keeps its descriptor, also after a stranger has closed it, and
without a descriptor Gloo aborts the process. Nothing else uses the private `ProcessGroupGloo._Options`, which is needed to
choose the network address to listen on.
"""

import contextlib
import ctypes
import logging
import os
import re
import socket
import struct
import threading
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from fastps.errors import Error

Memory = npt.NDArray[np.uint8]

Transfer = Any
"""A send or a receive under way, of the link's own type."""


class LinkLostError(Error):
    """The peer is gone, a transfer took too long, or the link was closed."""


class TimedOutError(LinkLostError):
    """A transfer took too long."""


class RefusedError(LinkLostError):
    """The peer refuses this side, has failed or has ended: another try would end in the same way."""


class MismatchError(RefusedError):
    """The peer refuses this side for good: they have different secrets, layouts or versions."""


class UnreachableError(LinkLostError):
    """Nothing answers at all: the network may be cut, and may come back."""


class Link(Protocol):
    """One link. Each side sends in one thread at a time and receives in one thread at a time."""

    def send(self, memory: Memory) -> Transfer:
        """Begin to send; the memory must not change until `wait` returns. Raises LinkLostError."""

    def receive(self, memory: Memory) -> Transfer:
        """Begin to receive exactly this many bytes. Raises LinkLostError.

        Receives that begin early let the peer send at once. The sizes of sends and receives must agree in their order.
        """

    def wait(self, transfer: Transfer, timeout_s: float) -> None:
        """Wait for a transfer's end. Raises LinkLostError, TimedOutError after the timeout; either closes the link."""

    def close(self) -> None:
        """Close the link. The peer's transfers then fail. May be called twice."""


logger = logging.getLogger("fastps.network")

_Sent = tuple[Work, torch.Tensor]
_SO_ATTACH_FILTER = 26  # of Linux, which Python does not name
_DROP_ALL = struct.pack("@HBBI", 0x06, 0, 0, 0)  # a program for packets, of one instruction: return 0, the bytes to keep
_MOST_DESCRIPTORS = 2048  # the sockets of links are looked for among the lowest
_making = threading.Lock()
_libc = ctypes.PyDLL(None)  # its calls keep the GIL: to get it back beside busy threads would take longer than the call


class GlooLink:
    """A link whose sides, 0 and 1, meet under a name in a store. Raises LinkLostError if the other one comes too late."""

    def __init__(self, store: Store, name: str, side: int, address: str, timeout_s: float) -> None:
        self._peer = 1 - side
        try:
            self._group: ProcessGroupGloo | None = process_group(store, name, side, 2, address, timeout_s)
        except RuntimeError as error:
            raise LinkLostError(
                f"link {name}: expected the other node at {address} within {timeout_s:g} s: {reason_of(error)}"
            ) from error

    def send(self, memory: Memory) -> _Sent:
        tensor = torch.from_numpy(memory)
        return self._begin("send", tensor), tensor

    def receive(self, memory: Memory) -> _Sent:
        tensor = torch.from_numpy(memory)
        return self._begin("recv", tensor), tensor

    def _begin(self, what: str, tensor: torch.Tensor) -> Work:
        group = self._group
        if group is None:
            raise LinkLostError("the link is closed")
        try:
            begun: Work = getattr(group, what)([tensor], self._peer, 0)
        except RuntimeError as error:
            raise LinkLostError(reason_of(error)) from error
        return begun

    def wait(self, transfer: _Sent, timeout_s: float) -> None:
        try:
            transfer[0].wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self.close()
            reason = reason_of(error)
            raise (TimedOutError if reason.startswith("Timed out") else LinkLostError)(reason) from error

    def close(self) -> None:
        """See Link. The group ends with its last reference, which a waiting thread keeps until its timeout."""
        self._group = None


def process_group(store: Store, name: str, rank: int, size: int, address: str, timeout_s: float) -> ProcessGroupGloo:
    """A group of Gloo whose members meet under a name in a store, and listen at `address`. Raises RuntimeError.

    The timeout is that of the meeting and of each operation.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    device, listener = _device_at(address)
    options._devices = [device]
    with listener or contextlib.nullcontext():
        group = ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
        _close_port(listener, name)
    return group


def _listening() -> dict[bytes, int]:
    """The descriptors at which this process listens for TCP, by address and port, as the kernel writes them."""
    found, answer, length, place = {}, ctypes.c_int(), ctypes.c_uint(), ctypes.create_string_buffer(28)
    for descriptor in range(_MOST_DESCRIPTORS):
        length.value = ctypes.sizeof(answer)
        arguments = descriptor, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(answer), ctypes.byref(length)
        if _libc.getsockopt(*arguments) == 0 and answer.value:
            length.value = ctypes.sizeof(place)
            _libc.getsockname(descriptor, place, ctypes.byref(length))
            if struct.unpack_from("@H", place)[0] in (socket.AF_INET, socket.AF_INET6):
                found[place.raw[: length.value]] = descriptor
    return found


def _device_at(address: str) -> tuple[Any, socket.socket | None]:
    """A Gloo device that listens at an address, and its socket; None if it cannot be told from others."""
    with _making:
        before = _listening()
        device = ProcessGroupGloo.create_device(hostname=address)
        new = [descriptor for place, descriptor in _listening().items() if place not in before]
        with contextlib.suppress(OSError):  # no descriptor is left
            return device, socket.socket(fileno=os.dup(new[0])) if len(new) == 1 else None
    return device, None


def _close_port(listener: socket.socket | None, name: str) -> None:
    """Let the kernel drop all packets for a new connection to this port: the two sides have met, and nobody else may come.

    Closing the socket, which Gloo polls, would abort the process.
    """
    try:
        if listener is None:
            raise OSError("its socket was not found")
        program = ctypes.create_string_buffer(_DROP_ALL)
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))
    except OSError as error:
        logger.warning(
            "link %s: its port stays open to strangers, who may take all of this process's descriptors: %s", name, error
        )


def reason_of(error: BaseException) -> str:
    """The first line of a torch error, without its source file and its advice.

    >>> reason_of(RuntimeError("[gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:99. This is typically caused by ..."))
    'Connection closed by peer [10.0.0.2]:99'
    """
    text = str(error).partition("\n")[0] or type(error).__name__
    return re.sub(r"^\[[^\]]*:\d+\] ", "", text).partition(". This is typically")[0]
