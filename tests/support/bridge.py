"""Nodes on one machine: network namespaces on a bridge, each of which can be cut off without a sign, or slowed.

A node that is cut off keeps its carrier, and no connection is closed: packets are dropped at its port of the bridge. Names are
drawn at random, and everything is removed whatever happens. It needs root and the commands ip, bridge and tc; nft for packets
that get lost.
"""

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Bridge:
    """Nodes 0 to `count` - 1, with addresses of one subnet."""

    tail: str
    count: int

    def namespace(self, node: int) -> str:
        """The name of a node's namespace."""
        return f"fastps-{self.tail}-{node}"

    @property
    def _middle(self) -> str:
        return f"fastps-{self.tail}-bridge"

    def _port(self, node: int) -> str:
        return f"fp{self.tail}p{node}"

    @staticmethod
    def address(node: int) -> str:
        """A node's address."""
        return f"10.214.9.{node + 1}"

    def command(self, node: int, command: list[str]) -> list[str]:
        """The command that runs a program on a node."""
        return ["ip", "netns", "exec", self.namespace(node), *command]

    def cut(self, node: int, is_cut: bool) -> None:
        """Cut a node off from the others, or join it again."""
        # A port in the state "disabled" neither learns nor forwards, in both directions.
        state = "disabled" if is_cut else "forwarding"
        _run("bridge", "-n", self._middle, "link", "set", "dev", self._port(node), "state", state)

    def slow(self, node: int, rate_mbit: int) -> None:
        """Limit what a node receives and sends to a rate; 0: no limit."""
        for place in (("-n", self._middle, self._port(node)), ("-n", self.namespace(node), f"fp{self.tail}n{node}")):
            flag, namespace, device = place
            subprocess.run(["tc", flag, namespace, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            if rate_mbit:
                shape = f"tbf rate {rate_mbit}mbit burst 64kb latency 50ms".split()
                _run("tc", flag, namespace, "qdisc", "replace", "dev", device, "root", *shape)

    @staticmethod
    def can_lose() -> bool:
        """Whether packets can be lost here."""
        return shutil.which("nft") is not None

    def lose(self, node: int, percent: int) -> None:
        """Drop so many of a hundred packets that a node receives, and as many of those that it sends; 0: none."""
        run = partial(subprocess.run, self.command(node, ["nft", "-f", "-"]), text=True, check=True)
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; numgen random mod 100 < {percent} drop; }}\n"
            for hook in ("input", "output")
        )
        run(input="table inet loss\ndelete table inet loss\n" + (f"table inet loss {{\n{chains}}}\n" if percent else ""))

    def reset(self, node: int) -> None:
        """Reset all connections of a node."""
        subprocess.run(self.command(node, ["ss", "-K", "-tn"]), capture_output=True, check=False)


@contextmanager
def bridge(count: int) -> Iterator[Bridge]:
    """Make the nodes."""
    made = Bridge(secrets.token_hex(3), count)
    middle = made._middle
    names = [middle, *(made.namespace(node) for node in range(count))]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", middle, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", middle, "link", "set", "br0", "up")
        for node in range(count):
            own, port, name = f"fp{made.tail}n{node}", made._port(node), made.namespace(node)
            _run("ip", "link", "add", own, "netns", name, "type", "veth", "peer", "name", port, "netns", middle)
            _run("ip", "-n", middle, "link", "set", port, "master", "br0")
            _run("ip", "-n", middle, "link", "set", port, "up")
            _run("ip", "-n", name, "addr", "add", f"{made.address(node)}/24", "dev", own)
            _run("ip", "-n", name, "link", "set", own, "up")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
