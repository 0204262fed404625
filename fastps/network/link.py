"""A link between two nodes: it carries bytes, in order and in both directions.

A transfer may fail at any time. The whole link is then lost, and neither side knows which bytes the other has received.
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


class TimedOutError(LinkLostError):
    """A transfer took too long."""


class RefusedError(LinkLostError):
    """The peer refuses this side, has failed or has ended: another try would end in the same way."""


class UnreachableError(LinkLostError):
    """Nothing answers at all: the network may be cut, and may come back."""


class Link(Protocol):
    """One link. Each side sends in one thread at a time and receives in one thread at a time."""

    def send(self, memory: Memory) -> Transfer:
        """Begin to send; the memory must not change until `wait` returns. Raises LinkLostError."""
        ...

    def receive(self, memory: Memory) -> Transfer:
        """Begin to receive exactly this many bytes. Raises LinkLostError.

        Receives that begin early let the peer send at once. The sizes of sends and receives must agree in their order.
        """
        ...

    def wait(self, transfer: Transfer, timeout_s: float) -> None:
        """Wait for the end of a transfer. After an error or the timeout the link is closed.

        Raises LinkLostError, and TimedOutError after the timeout.
        """
        ...

    def close(self) -> None:
        """Close the link. The peer's transfers then fail. May be called twice."""
        ...
