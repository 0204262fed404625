"""What a launcher gives the meeting of the nodes, and what it learns there. A launcher never imports torch, nor does this."""

import json
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from fastps.errors import AttachError, UsageError
from fastps.system.processes import start_module


@dataclass(frozen=True)
class Meeting:
    """What a launcher says of its node.

    Attributes:
        host, port: the rendezvous.
        nodes, workers: how many nodes the job has, and how many workers this one has.
        number: this node's number; -1: the rendezvous' own host becomes node 0, and the others are numbered as they come.
        timeout_s: how long to wait for the other nodes.
        interface, trusts_network: see own_address.
    """

    host: str
    port: int
    nodes: int
    workers: int
    number: int
    timeout_s: float
    interface: str = ""
    trusts_network: bool = False

    def start(self, **how: Any) -> "subprocess.Popen[bytes]":
        """Start the process that finds the other nodes, and tells this one its place. `how` has arguments of Popen."""
        return start_module("fastps.network.meeting", json.dumps(asdict(self)), stdout=subprocess.PIPE, **how)


@dataclass(frozen=True)
class Place:
    """A node's place: its number, its first worker's rank, the workers of all nodes, the job's name, a free port of node 0."""

    number: int
    first_rank: int
    world: int
    job: str
    port: int

    @staticmethod
    def told_by(process: "subprocess.Popen[bytes]") -> "Place":
        """Wait for what a process of `Meeting.start` has found. Raises AttachError, UsageError."""
        assert process.stdout is not None
        line = process.stdout.readline()
        found = json.loads(line) if line else {"error": "the process that finds the other nodes has ended: see its own output"}
        if "error" in found:
            raise (UsageError if found.get("kind") == "UsageError" else AttachError)(found["error"])
        return Place(**found)
