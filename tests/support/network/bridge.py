"""Nodes on one machine: network namespaces on a bridge, each of which can be cut off without a sign, or slowed.

A node that is cut off keeps its carrier, and no connection is closed: packets are dropped at its port of the bridge. Names are
drawn at random, and everything is removed whatever happens. It needs root and the commands ip, bridge and tc; nft for packets
that get lost.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastps.lab.measuring.namespaces import Cluster, cluster


@dataclass(frozen=True)
class Bridge:
    """The nodes, numbered from 0."""

    cluster: Cluster
    address = staticmethod(Cluster.address)

    def command(self, node: int, command: list[str]) -> list[str]:
        """The command that runs a program on a node."""
        return self.cluster.command(node, command)

    def launch(self, node: int, *words: str, **how: Any) -> "subprocess.Popen[Any]":
        """Start `fastps run` with these words on one of three nodes, for one worker; `how` has other arguments of Popen."""
        command = [sys.executable, "-m", "fastps", "run", "--nnodes", "3", "--node-rank", str(node), "-n", "1"]
        return subprocess.Popen(self.command(node, [*command, "--rendezvous", f"{self.address(0)}:29400", *words]), **how)

    def cut(self, node: int, is_cut: bool) -> None:
        """Cut a node off from the others, or join it again."""
        # A port in the state "disabled" neither learns nor forwards, in both directions.
        state = "disabled" if is_cut else "forwarding"
        _run("bridge", "-n", self.cluster.middle, "link", "set", "dev", self.cluster.port(node), "state", state)

    def slow(self, node: int, rate_mbit: int) -> None:
        """Limit what a node receives and sends to a rate; 0: no limit."""
        self.cluster.limit(node, rate_mbit)

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
    with cluster(count) as made:
        yield Bridge(made)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
