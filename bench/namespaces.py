"""Two nodes on one machine: two network namespaces, joined by a virtual cable that may be as slow as a real one.

It needs the rights of root and the commands `ip` and `tc`. The namespaces have names drawn at random, and are removed
whatever happens.
"""

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastps.system.namespaces import missing_reason

__all__ = ["ADDRESSES", "Nodes", "missing_reason", "two_nodes"]
ADDRESSES = ("10.213.7.1", "10.213.7.2")


@dataclass(frozen=True)
class Nodes:
    """The names of the two namespaces, and of the interface in each."""

    names: tuple[str, str]
    interfaces: tuple[str, str]

    def command(self, node: int, command: list[str]) -> list[str]:
        """The command that runs a program on a node."""
        return ["ip", "netns", "exec", self.names[node], *command]


@contextmanager
def two_nodes(rate_mbit: int = 0) -> Iterator[Nodes]:
    """Make two nodes. `rate_mbit` limits the cable in each direction; 0: as fast as the machine copies."""
    tail = secrets.token_hex(3)
    names = f"fastps-{tail}-0", f"fastps-{tail}-1"
    made = Nodes(names, (f"fp{tail}a", f"fp{tail}b"))
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = made.interfaces
        _ip("link", "add", first, "netns", names[0], "type", "veth", "peer", "name", second, "netns", names[1])
        for name, interface, address in zip(names, made.interfaces, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")
            if rate_mbit:
                shape = f"tbf rate {rate_mbit}mbit burst 256kb latency 20ms".split()
                subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", interface, "root", *shape], check=True)
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
