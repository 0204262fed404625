"""Links over torch.distributed's Gloo: one process group of two ranks a link, so that a fault ends this link and no other.

Two properties of Gloo shape this file. A wait that times out closes the pair, so a link is of no use after it. And a transfer
that is in flight when the peer is killed does not fail by itself: only its timeout ends it. This is the only file that uses the
private `ProcessGroupGloo._Options`, which alone can name the network address to listen on.
"""

import re
import socket
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from fastps.errors import AttachError
from fastps.network.link import LinkLostError, Memory

Transfer = tuple[Work, torch.Tensor]


class GlooLink:
    """A link whose two sides meet under a name in a store. `side` is 0 or 1.

    Raises LinkLostError if the other side does not come within the timeout.
    """

    def __init__(self, store: Store, name: str, side: int, address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        self._peer = 1 - side
        try:
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(PrefixStore(name, store), side, 2, options)
        except RuntimeError as error:
            raise LinkLostError(
                f"link {name}: expected the other node at {address} within {timeout_s:g} s: {_reason(error)}"
            ) from error

    def send(self, memory: Memory) -> Transfer:
        """See Link."""
        tensor = torch.from_numpy(memory)
        return self._begin("send", tensor), tensor

    def receive(self, memory: Memory) -> Transfer:
        """See Link."""
        tensor = torch.from_numpy(memory)
        return self._begin("recv", tensor), tensor

    def _begin(self, what: str, tensor: torch.Tensor) -> Work:
        group = self._group
        if group is None:
            raise LinkLostError("the link is closed")
        try:
            begun: Work = getattr(group, what)([tensor], self._peer, 0)
        except RuntimeError as error:
            raise LinkLostError(_reason(error)) from error
        return begun

    def wait(self, transfer: Transfer, timeout_s: float) -> None:
        """See Link."""
        try:
            transfer[0].wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self.close()
            raise LinkLostError(_reason(error)) from error

    def close(self) -> None:
        """See Link. The group ends with its last reference: a thread that still waits in it keeps it until its timeout."""
        self._group = None


def address_towards(host: str, port: int) -> str:
    """The address of this machine's interface that leads to a host. Nothing is sent. Raises AttachError.

    >>> address_towards("127.0.0.1", 29400)
    '127.0.0.1'
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AttachError(
            f"expected a network interface that leads to {host}, found none ({error}); check the host's name and the network,"
            " or give --interface"
        ) from error


def _reason(error: BaseException) -> str:
    """What Gloo says, without its source file and its advice.

    >>> _reason(RuntimeError("[gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:99. This is typically caused by ..."))
    'Connection closed by peer [10.0.0.2]:99'
    """
    text = str(error).partition("\n")[0] or type(error).__name__
    return re.sub(r"^\[[^\]]*:\d+\] ", "", text).partition(". This is typically")[0]
