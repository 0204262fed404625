"""A link between two nodes: bytes in order, in both directions. Gloo implements it (gloo.py); others can.

A link promises less than a connection that one would like to have. A transfer may fail at any time and the link is then gone as
a whole; nothing says which bytes the peer has received. The layers above number what they send, so that a new link goes on.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastps.errors import Error

Memory = npt.NDArray[np.uint8]

Transfer = Any
"""A send or a receive under way, of the link's own type."""


class LinkLostError(Error):
    """The peer is gone, a transfer took too long, or the link was closed."""


class Link(Protocol):
    """One link. Each side sends in one thread at a time and receives in one thread at a time."""

    def send(self, memory: Memory) -> Transfer:
        """Begin to send; the memory must stay as it is until `wait` returns. Raises LinkLostError."""
        ...

    def receive(self, memory: Memory) -> Transfer:
        """Begin to receive exactly this many bytes. Raises LinkLostError.

        Receives that are begun ahead let the peer send at once. The sizes of sends and receives must agree in their order.
        """
        ...

    def wait(self, transfer: Transfer, timeout_s: float) -> None:
        """Wait for the end of a transfer. Raises LinkLostError after the timeout, too, and the link is then closed."""
        ...

    def close(self) -> None:
        """Close the link. The peer's transfers then fail. May be called twice."""
        ...
