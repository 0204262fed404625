"""One turn of a side: the processes that it starts on two nodes, and what they have measured together."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastps.bench.measure import check
from fastps.bench.namespaces import ADDRESSES, Nodes
from fastps.bench.two_nodes.order import Order
from fastps.system.ports import free_port

NODES, LOCAL = 2, 2
_LIMIT_S = 600
_PAIRS = ("sockets", "edge")
_PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@dataclass(frozen=True)
class Turn:
    """What a turn measured, for each step.

    Attributes:
        seconds: the median of the steps, or with `Side.is_mean` their mean, on the worker that waits longest.
        result: a number that is the same on all workers.
        sent: bytes that both nodes sent, each with what its interface counts; None for a pair.
        packets: the same with the headers of each packet; 0 on a link without a token bucket.
        cpu_s: processor time of the agents, or of the processes of a pair.
    """

    seconds: float
    result: float
    sent: float | None
    packets: float
    cpu_s: float


@dataclass(frozen=True)
class Side:
    """A side of the benchmark.

    Attributes:
        program: what `bench/two_nodes` runs.
        variables: of the environment.
        warm_up: steps before those that are measured.
        is_mean: whether steps differ, so that their mean is the figure.
    """

    program: str
    variables: Mapping[str, str] = field(default_factory=dict)
    warm_up: int = 2
    is_mean: bool = False

    def turn(self, nodes: Nodes, parameters: int, steps: int, backward_s: float = 0.0) -> Turn:
        """Start the processes, and wait for their end. Raises WrongResultError if one fails or finds another result."""
        port, local = free_port(), 1 if self.program in _PAIRS else LOCAL
        processes = []
        try:
            for rank in range(NODES * local):
                node = rank // local
                order = Order(self.program, parameters, steps, self.warm_up, nodes.interfaces[node], local, backward_s)
                module = "pair" if self.program in _PAIRS else "member"
                command = [sys.executable, "-m", f"fastps.bench.two_nodes.{module}", *order.arguments()]
                environment = {**os.environ, **_variables(nodes, node, rank, local, port), **self.variables}
                processes.append(subprocess.Popen(nodes.command(node, command), env=environment, text=True, **_PIPES))
            found = [self._told(process) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = {each["result"] for each in found}
        check(len(results) == 1, "the same result on all workers", results)
        return self._turn(found, steps)

    def _told(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        out, errors = process.communicate(timeout=_LIMIT_S)
        check(process.returncode == 0, f"a process of {self.program} to end well", errors[-500:])
        told: dict[str, Any] = json.loads(out.splitlines()[-1])
        return told

    def _turn(self, found: list[dict[str, Any]], steps: int) -> Turn:
        middle = statistics.fmean if self.is_mean else statistics.median
        seconds, result = max(float(middle(each["seconds"])) for each in found), float(found[0]["result"])
        if self.program in _PAIRS:
            return Turn(seconds, result, None, 0, sum(each["cpu_s"] for each in found) / steps)
        used = [each["used"] for each in found if each["used"] is not None]
        sent, packets, cpu_s = (sum(each[key] for each in used) / steps for key in ("sent", "packets", "agent_cpu_s"))
        return Turn(seconds, result, sent, packets, cpu_s)


def _variables(nodes: Nodes, node: int, rank: int, local: int, port: int) -> dict[str, str]:
    """The variables of torchrun, and what else a process needs."""
    variables = {
        "RANK": rank, "WORLD_SIZE": NODES * local, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": node, "GROUP_WORLD_SIZE": NODES, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": nodes.interfaces[node], "FASTPS_INTERFACE": ADDRESSES[node],
        "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}
