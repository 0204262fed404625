"""A side of `fastps bench nodes` as the benchmark sees it: processes on two nodes, which make steps when told.

They live until all turns are over, and between turns they wait. So turns may be short, and sides take turns often.
"""

import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from fastps.bench.measure import check
from fastps.bench.two_nodes.namespaces import ADDRESSES, Nodes
from fastps.bench.two_nodes.order import Order
from fastps.system.ports import free_port

NODES, LOCAL = 2, 2
PAIRS = ("sockets", "edge")  # programs of one process a node
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Side:
    """What a side runs.

    Attributes:
        program: its name in `bench/two_nodes`.
        variables: of the environment.
        rounds_of: steps come in rounds of so many, which differ. The figure is then their mean, else their median.
    """

    program: str
    variables: Mapping[str, str] = field(default_factory=dict)
    rounds_of: int = 1

    @property
    def local(self) -> int:
        """The processes on each node."""
        return 1 if self.program in PAIRS else LOCAL


@dataclass(frozen=True)
class Turn:
    """What a turn measured, for each step.

    Attributes:
        seconds: of a step, on the process that waits longest.
        sent: bytes that both nodes sent, as their interfaces count.
        packets: the same with the headers of each packet; 0 on a link without a token bucket.
        cpu_s: processor time of the agents, or of the processes of a pair.
    """

    seconds: float
    sent: float
    packets: float
    cpu_s: float


class Crew:
    """The processes of a side. Raises WrongResultError when one of them fails or does not answer in time."""

    def __init__(self, side: Side, nodes: Nodes, parameters: int, backward_s: float = 0.0) -> None:
        self._side = side
        self._processes: list[subprocess.Popen[str]] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - close() closes it
        self.steps = 0
        port = free_port()
        for rank in range(NODES * side.local):
            node = rank // side.local
            order = Order(side.program, parameters, nodes.interfaces[node], side.local, backward_s)
            module = "pair" if side.program in PAIRS else "member"
            command = [sys.executable, "-m", f"fastps.bench.two_nodes.{module}", *order.arguments()]
            environment = {**os.environ, **_variables(nodes, node, rank, side.local, port), **side.variables}
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
            self._processes.append(subprocess.Popen(nodes.command(node, command), env=environment, text=True, **pipes))

    def turn(self, steps: int) -> Turn:
        """Make a step that is not measured, so that caches and connections are warm, and then so many."""
        count = -(-steps // self._side.rounds_of) * self._side.rounds_of
        warm_up = 1 if self._side.rounds_of == 1 else 0
        for process in self._processes:
            self._tell(process, f"{warm_up} {count}\n")
        found = self._answers()
        self.steps += warm_up + count
        middle = statistics.median if self._side.rounds_of == 1 else statistics.fmean
        seconds = max(float(middle(each["seconds"])) for each in found)
        used = [each["used"] for each in found if each["used"] is not None]
        return Turn(seconds, *(sum(each[key] for each in used) / count for key in ("sent", "packets", "cpu_s")))

    def result(self) -> float:
        """End the processes. Returns their result, which is the same on all."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        results = {each["result"] for each in self._answers()}
        check(len(results) == 1, f"the same result on all workers of {self._side.program}", results)
        for process in self._processes:
            process.wait(_LIMIT_S)
        return float(results.pop())

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _answers(self) -> list[dict[str, Any]]:
        """One line of each process. An end of any process is noticed at once."""
        lines: dict[int, str] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while len(lines) < len(self._processes):
                ready = waiting.select(_LIMIT_S)
                for key, _ in ready:
                    lines[key.data] = key.fileobj.readline()  # type: ignore[union-attr]
                    waiting.unregister(key.fileobj)
                if not ready or "" in lines.values():
                    self._fail()
        return [json.loads(lines[rank]) for rank in range(len(self._processes))]

    def _fail(self) -> None:
        self._kill()
        self._errors.seek(0)
        check(False, f"an answer of each process of {self._side.program} within {_LIMIT_S:g} s", self._errors.read()[-500:])

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes. May be called twice."""
        self._kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._errors.close()


def _variables(nodes: Nodes, node: int, rank: int, local: int, port: int) -> dict[str, str]:
    """The variables of torchrun, and what else a process needs."""
    variables = {
        "RANK": rank, "WORLD_SIZE": NODES * local, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": node, "GROUP_WORLD_SIZE": NODES, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": nodes.interfaces[node], "FASTPS_INTERFACE": ADDRESSES[node],
        "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}
