"""What a launcher gives the meeting of the nodes, and what it learns there. A launcher never imports torch, nor does this."""

import json
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from fastps.errors import AttachError, UsageError
from fastps.system.processes import start_module


@dataclass(frozen=True)
class Meeting:
    """What a launcher says of its node."""

    host: str  # of the rendezvous
    port: int
    nodes: int  # of the job
    workers: int  # of this node
    number: int  # this node's; -1: the rendezvous' own host becomes node 0, and the others are numbered as they come
    timeout_s: float  # of the wait for the other nodes
    interface: str = ""  # see own_address
    trusts_network: bool = False

    def start(self, **how: Any) -> "subprocess.Popen[bytes]":
        """Start the process that finds the other nodes, and tells this one its place. `how` has arguments of Popen."""
        return start_module("fastps.network.meeting", json.dumps(asdict(self)), stdout=subprocess.PIPE, **how)


@dataclass(frozen=True)
class Place:
    """A node's place."""

    number: int
    first_rank: int  # of this node's workers
    world: int  # the workers of all nodes
    job: str  # its name
    port: int  # a free one of node 0

    @staticmethod
    def told_by(process: "subprocess.Popen[bytes]") -> "Place":
        """Wait for what a process of `Meeting.start` has found. Raises AttachError, UsageError."""
        assert process.stdout is not None
        line = process.stdout.readline()
        found = json.loads(line) if line else {"error": "the process that finds the other nodes has ended: see its own output"}
        if "error" in found:
            raise (UsageError if found.get("kind") == "UsageError" else AttachError)(found["error"])
        return Place(**found)
