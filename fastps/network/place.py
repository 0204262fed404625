"""What a launcher gives the meeting of the nodes, and what it learns there. A launcher never imports torch, nor does this."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastps.errors import TRY_AGAIN, AttachError, Error, NodeLostError, UsageError
from fastps.system.processes import name_of_signal, start_module

_KINDS: dict[str, type[Error]] = {kind.__name__: kind for kind in (NodeLostError, UsageError)}
# Ends of a launcher that starting all nodes again may heal: a node was lost, or its machine is taken away (SIGTERM).
_MAY_HEAL = (TRY_AGAIN, 143)


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
    goes_on: bool = False  # whether the job goes on without a lost node, which may then come again
    silence_s: float = 10.0  # a launcher that has shown no sign of life for so long is lost
    earlier: str = ""  # the job that this launcher met in before; "": none
    checkpoint: str = ""  # node 0's, from which the job goes on; "": it begins anew

    def start(self, **how: Any) -> "subprocess.Popen[bytes]":
        """Start the process that finds the other nodes, and tells this one its place. `how` has arguments of Popen."""
        return start_module("fastps.network.meeting", json.dumps(vars(self)), stdout=subprocess.PIPE, **how)


@dataclass(frozen=True)
class Place:
    """A node's place."""

    number: int
    first_rank: int  # of this node's workers
    world: int  # the workers of all nodes
    job: str  # its name
    port: int  # a free one of node 0
    checkpoint: str = ""  # from which node 0 goes on
    joins: bool = False  # whether the job runs, and this node was in it before

    @staticmethod
    def told_by(process: "subprocess.Popen[bytes]") -> "Place":
        """Wait for what a process of `Meeting.start` has found. Raises AttachError, NodeLostError, UsageError."""
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            kind = NodeLostError if (code := process.wait()) < 0 else AttachError
            ended = f"was ended by {name_of_signal(-code)}" if code < 0 else "has ended: see its own output"
            raise kind(f"the process that finds the other nodes {ended}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise _KINDS.get(str(found.get("kind")), AttachError)(found["error"])
        return Place(**found)


@dataclass(frozen=True)
class End:
    """How a node ended, or the job: its launcher's exit code, and the reason of one that is not 0.

    `order` is that of the reports.
    """

    code: int
    reason: str = ""
    order: int = 0


def end_line(end: End) -> dict[str, Any]:
    """What a launcher and its process at the rendezvous tell each other of an end."""
    return {"code": end.code, "reason": end.reason}


def end_of_job(ends: Mapping[int, End], goes_on: bool) -> End:
    """How a job ended, from how its nodes did: 0, 1 if the script of a node failed, or TRY_AGAIN if nodes were only lost.

    If the job `goes_on` without lost nodes, only node 0 counts, and nodes that end after the last one that ended well.

    >>> end_of_job({0: End(0, order=1), 1: End(75, "its agent was killed", 2)}, goes_on=False)
    End(code=75, reason='node 1: its agent was killed', order=2)
    """
    last = max((end.order for end in ends.values() if end.code == 0), default=-1)
    failed = [(node, end) for node, end in ends.items() if end.code and not (goes_on and node and end.order < last)]
    failed.sort(key=lambda each: (each[1].code in _MAY_HEAL, each[1].order))
    if not failed:
        return End(0)
    node, end = failed[0]
    return End(TRY_AGAIN if end.code in _MAY_HEAL else 1, f"node {node}: {end.reason}", end.order)
