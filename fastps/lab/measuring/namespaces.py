"""Machines within this one: network namespaces around a bridge, each with a port that may be as slow as a real one.

It needs the rights of root and the commands `ip` and `tc`. The namespaces have names drawn at random, and are removed
whatever happens.
"""

import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """So many machines, each with an address of one subnet.

    >>> Cluster("a1b2c3", 2).command(1, ["true"])
    ['ip', 'netns', 'exec', 'fastps-a1b2c3-1', 'true']
    """

    tail: str
    count: int

    def namespace(self, number: int) -> str:
        """The name of a machine's namespace."""
        return f"fastps-{self.tail}-{number}"

    @property
    def middle(self) -> str:
        """The name of the namespace of the bridge."""
        return self.namespace(self.count)

    def port(self, number: int) -> str:
        """The name of a machine's port at the bridge."""
        return f"fp{self.tail}p{number}"

    def interface(self, number: int) -> str:
        """The name of a machine's interface."""
        return f"fp{self.tail}n{number}"

    @staticmethod
    def address(number: int) -> str:
        """A machine's address."""
        return f"10.215.9.{number + 1}"

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """The command that runs a program on a machine."""
        return ["ip", "netns", "exec", self.namespace(number), *command]

    def limit(self, number: int, rate_mbit: int) -> None:
        """Limit what a machine receives and sends to a rate; 0: as fast as the machine copies."""
        for namespace, device in ((self.middle, self.port(number)), (self.namespace(number), self.interface(number))):
            at = "-n", namespace, "qdisc"
            subprocess.run(["tc", *at, "del", "dev", device, "root"], capture_output=True, check=False)
            if rate_mbit:
                _run("tc", *at, "replace", "dev", device, "root", *f"tbf rate {rate_mbit}mbit burst 64kb latency 50ms".split())


def missing_reason() -> str:
    """Return why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "the commands ip and tc are not installed (iproute2)"
    name = f"fastps-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here ({made.stderr.strip() or 'ip netns add failed'}); run as root"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@contextmanager
def cluster(count: int, rate_mbit: int = 0) -> Iterator[Cluster]:
    """Make the machines. `rate_mbit` limits each one's port in each direction; 0: as fast as the machine copies."""
    made = Cluster(secrets.token_hex(3), count)
    middle = made.middle
    try:
        for number in range(count + 1):
            _run("ip", "netns", "add", made.namespace(number))
            _run("ip", "-n", made.namespace(number), "link", "set", "lo", "up")
        _run("ip", "-n", middle, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", middle, "link", "set", "br0", "up")
        for number in range(count):
            _join(made, number)
            if rate_mbit:
                made.limit(number, rate_mbit)
        yield made
    finally:
        for number in range(count + 1):
            subprocess.run(["ip", "netns", "del", made.namespace(number)], capture_output=True, check=False)


def _join(made: Cluster, number: int) -> None:
    """Join a machine to the bridge."""
    own, port, name, middle = made.interface(number), made.port(number), made.namespace(number), made.middle
    _run("ip", "link", "add", own, "netns", name, "type", "veth", "peer", "name", port, "netns", middle)
    _run("ip", "-n", middle, "link", "set", port, "master", "br0")
    _run("ip", "-n", middle, "link", "set", port, "up")
    _run("ip", "-n", name, "addr", "add", f"{made.address(number)}/24", "dev", own)
    _run("ip", "-n", name, "link", "set", own, "up")


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
