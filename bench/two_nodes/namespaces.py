"""Two nodes on one machine: two network namespaces, joined by a virtual cable that may be as slow as a real one.

It needs the rights of root and the commands `ip` and `tc`. The namespaces have names drawn at random, and are removed
whatever happens.
"""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastps.lab.measuring.namespaces import missing_reason
from fastps.system.processes import start_child

__all__ = ["ADDRESSES", "Nodes", "missing_reason", "two_nodes"]
ADDRESSES = ("10.213.7.1", "10.213.7.2")


@dataclass(frozen=True)
class Link:
    """What the cable can do.

    Attributes:
        rate_mbit: the most bits in each direction, in Mbit/s; 0: as fast as the machine copies.
        round_trip_ms: how long a packet and its answer are on their way; 0: no time.
    """

    rate_mbit: int = 0
    round_trip_ms: float = 0.0

    @property
    def name(self) -> str:
        """How rows call it.

        >>> Link(1000, 1.0).name, Link().name
        ('1000 Mbit/s, 1 ms', 'veth')
        """
        rate = f"{self.rate_mbit} Mbit/s" if self.rate_mbit else "veth"
        return f"{rate}, {self.round_trip_ms:g} ms" if self.round_trip_ms else rate


@dataclass(frozen=True)
class Nodes:
    """The names of the two namespaces, and of the interface in each."""

    names: tuple[str, str]
    interfaces: tuple[str, str]

    def command(self, node: int, command: list[str]) -> list[str]:
        """The command that runs a program on a node."""
        return ["ip", "netns", "exec", self.names[node], *command]


@contextmanager
def two_nodes(link: Link) -> Iterator[Nodes]:
    """Make two nodes, and a link between them."""
    tail = secrets.token_hex(3)
    made = Nodes((f"fastps-{tail}-0", f"fastps-{tail}-1"), (f"fp{tail}a", f"fp{tail}b"))
    try:
        for name in made.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        with _cable(made, link.round_trip_ms):
            for name, interface, address in zip(made.names, made.interfaces, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
                _ip("-n", name, "link", "set", interface, "up")
                if link.rate_mbit:
                    shape = f"tbf rate {link.rate_mbit}mbit burst 256kb latency 20ms".split()
                    subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", interface, "root", *shape], check=True)
            yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def _cable(nodes: Nodes, round_trip_ms: float) -> Iterator[None]:
    """Join the nodes by a veth pair, or by a process that holds each packet."""
    if not round_trip_ms:
        (name, other), (first, second) = nodes.names, nodes.interfaces
        _ip("link", "add", first, "netns", name, "type", "veth", "peer", "name", second, "netns", other)
        yield
        return
    delay_ns = round(round_trip_ms * 1e6 / 2)
    command = [sys.executable, "-m", "fastps.bench.two_nodes.cable", *nodes.interfaces, str(delay_ns)]
    with start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cable:
        try:
            assert cable.stdout is not None
            if not cable.stdout.readline():
                raise OSError("the cable did not start: is /dev/net/tun there?")
            for name, interface in zip(nodes.names, nodes.interfaces, strict=True):
                _ip("link", "set", interface, "netns", name)
            yield
        finally:
            cable.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
