"""Links over torch.distributed's Gloo: one process group of two ranks for each link, so that a fault ends only this link.

Two properties of Gloo shape this file. A wait that times out closes the pair, so the link cannot be used again. A transfer that
is in flight when the peer is killed does not fail; only its timeout ends it. This is the only file that uses the private
`ProcessGroupGloo._Options`, which is needed to choose the network address to listen on.
"""

import re
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from fastps.network.link import LinkLostError, Memory, TimedOutError

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
                f"link {name}: expected the other node at {address} within {timeout_s:g} s: {reason_of(error)}"
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
            raise LinkLostError(reason_of(error)) from error
        return begun

    def wait(self, transfer: Transfer, timeout_s: float) -> None:
        """See Link."""
        try:
            transfer[0].wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self.close()
            reason = reason_of(error)
            raise (TimedOutError if reason.startswith("Timed out") else LinkLostError)(reason) from error

    def close(self) -> None:
        """See Link. The group ends with its last reference, which a waiting thread keeps until its timeout."""
        self._group = None


def reason_of(error: BaseException) -> str:
    """The first line of a torch error, without its source file and its advice.

    >>> reason_of(RuntimeError("[gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:99. This is typically caused by ..."))
    'Connection closed by peer [10.0.0.2]:99'
    """
    text = str(error).partition("\n")[0] or type(error).__name__
    return re.sub(r"^\[[^\]]*:\d+\] ", "", text).partition(". This is typically")[0]
