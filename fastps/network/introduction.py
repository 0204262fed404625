"""How nodes introduce themselves before a job begins: version, machine and address, and whether a firewall is between them.

Every node opens a port at its own address and connects to that of node 0; node 0 connects to those of all others. Agents choose
their ports anew for each edge, so a firewall that lets only the rendezvous through is found here and not in a timeout.
"""

import contextlib
import json
import platform
import socket
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from fastps.errors import AttachError
from fastps.network.addresses import is_loopback
from fastps.network.messages import WIRE_VERSION
from fastps.version import __version__

_REACH_S = 5.0  # a machine that answers does so within milliseconds
_PROGRESS_S = 10.0


@dataclass(frozen=True)
class Introduction:
    """What a node says of itself: its fastps, its machine's name, and the address and port at which it listens now."""

    number: int
    version: str
    machine: str
    address: str
    port: int

    @property
    def shown(self) -> str:
        """The node in an error."""
        return f"node {self.number} ({self.machine}, {self.address})"


def introduce(
    store: Store, number: int, count: int, address: str, timeout_s: float, reader: tuple[int, int] | None = None
) -> list[Introduction]:
    """Exchange introductions with all nodes, and check them. Returns those of all nodes, by number.

    `reader` is as in `introductions`; by default the nodes themselves read.

    Raises AttachError, on every node the same: another version, an address that others cannot reach, or a firewall.
    """
    with socket.create_server((address, 0), family=_family(address), backlog=count + 8) as listener:
        own = Introduction(number, f"{__version__} ({WIRE_VERSION})", platform.node(), address, listener.getsockname()[1])
        store.set(f"introduction/{number}", json.dumps(asdict(own)))
        met = range(count) if number == 0 else (0,)
        await_keys(store, [f"introduction/{node}" for node in met], timeout_s, number)
        others = [_of(store, node) for node in met if node != number]
        store.set(f"introduced/{number}", next((text for other in others if (text := _obstacle(own, other))), ""))
        return introductions(store, number, count, timeout_s, reader or (number, count))


def has_introduced(store: Store, number: int) -> bool:
    """Whether a node, or its predecessor that was lost, has met the others."""
    return bool(store.check([f"introduced/{number}"]))


def introductions(store: Store, number: int, count: int, timeout_s: float, reader: tuple[int, int]) -> list[Introduction]:
    """Wait until all nodes have introduced themselves. Raises AttachError as `introduce` does.

    `reader` is the caller's number among those that read the result, and how many they are. The store may end with reader 0,
    so that one leaves last if there is an error.
    """
    await_keys(store, [f"introduced/{node}" for node in range(count)], timeout_s, number)
    reason = next((text for node in range(count) if (text := store.get(f"introduced/{node}").decode())), "")
    found = [_of(store, node) for node in range(count)]
    store.set(f"has read/{reader[0]}", "")
    if reason:
        if reader[0] == 0:
            with contextlib.suppress(RuntimeError):
                store.wait([f"has read/{each}" for each in range(reader[1])], timedelta(seconds=_REACH_S))
        raise AttachError(reason)
    return found


def await_keys(store: Store, keys: list[str], timeout_s: float, number: int) -> None:
    """Wait on node `number` for keys that the nodes set, and print now and then how many are missing. Raises AttachError."""
    left_s = timeout_s
    while True:
        try:
            store.wait(keys, timedelta(seconds=min(_PROGRESS_S, left_s)))
            return
        except RuntimeError:
            left_s -= _PROGRESS_S
            missing = _missing(store, keys, number)
            if left_s <= 0:
                raise AttachError(
                    f"node {number} waited {timeout_s:g} s for {missing} of {len(keys)} nodes: start them, or give a smaller"
                    " --nnodes; raise FASTPS_TIMEOUT if they are only slow"
                ) from None
            print(f"fastps: node {number} waits for {missing} of {len(keys)} nodes", file=sys.stderr, flush=True)


def _missing(store: Store, keys: list[str], number: int) -> int:
    try:
        return sum(not store.check([key]) for key in keys)
    except RuntimeError as error:
        raise AttachError(
            f"node {number} lost the rendezvous while it waited for the other nodes: see the output of node 0"
        ) from error


def _of(store: Store, node: int) -> Introduction:
    return Introduction(**json.loads(store.get(f"introduction/{node}")))


def _obstacle(own: Introduction, other: Introduction) -> str:
    """Why two nodes cannot work together; empty if they can."""
    if own.version != other.version:
        return (
            f"{own.shown} has fastps {own.version}, {other.shown} has {other.version}: expected one version; install the same"
            " on all nodes"
        )
    if is_loopback(own.address) != is_loopback(other.address):
        local = own if is_loopback(own.address) else other
        return (
            f"{local.shown} listens at a loopback address, which no other machine reaches: there the rendezvous' host means the"
            " machine itself; give --rendezvous an address of node 0, or --interface (FASTPS_INTERFACE) on that node"
        )
    try:
        socket.create_connection((other.address, other.port), _REACH_S, (own.address, 0)).close()
    except OSError as error:
        return (
            f"{own.shown} cannot reach port {other.port} of {other.shown} ({error}), although the rendezvous answers: a"
            " firewall is between them, or the address is of another network; allow all TCP ports between the nodes, or choose"
            " the interface with --interface (FASTPS_INTERFACE)"
        )
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
