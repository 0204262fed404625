"""One synchronization step of two nodes with two workers each, without compute: fastps, and Gloo's all-reduce over four ranks.

The nodes are network namespaces of this machine. Sides take turns, each time with new processes; a turn's figure is the median
of its steps. The all-reduce is alone: what applies its result is not counted.
"""

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from fastps.bench.measure import BenchOptions, Row, Spread, check, interleaved
from fastps.bench.namespaces import ADDRESSES, Nodes, missing_reason, two_nodes
from fastps.system.ports import free_port

NODES, LOCAL = 2, 2
RATES_MBIT = (0, 1000)
SIDES = ("fastps", "gloo")
ROUNDED = ("fastps bfloat16", "fastps int8")  # on the slow link
_PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each link, size and side; where namespaces are not allowed, one that says so."""
    reason = missing_reason()
    if reason:
        return [{"bench": "nodes", "name": name, "missing": reason} for name in SIDES]
    rows = []
    for rate in RATES_MBIT:
        with two_nodes(rate) as nodes:
            for parameters in options.parameters:
                steps = 3 if options.smoke else 300 if parameters < 1e6 else 7 if rate else 20
                rows += _rows(nodes, rate, parameters, steps, options.repeats)
    return rows


def _rows(nodes: Nodes, rate: int, parameters: int, steps: int, repeats: int) -> list[Row]:
    names = (*SIDES, *ROUNDED) if rate else SIDES
    sides = {name: (lambda name=name: _turn(nodes, name, parameters, steps)) for name in names}
    spreads = interleaved(sides, repeats)
    own = spreads["fastps"].median
    link = f"{rate} Mbit/s" if rate else "veth"
    return [_row(name, link, parameters, spread, spread.median / own) for name, spread in spreads.items()]


def _row(name: str, link: str, parameters: int, spread: Spread, ratio: float) -> Row:
    workers = NODES * LOCAL
    return {
        "bench": "nodes", "name": name, "backend": link, "sync": "bsp", "nodes": NODES, "workers": workers,
        "parameters": parameters, **spread.row(), "ratio": ratio,
    }  # fmt: skip


def _turn(nodes: Nodes, side: str, parameters: int, steps: int) -> float:
    """One turn of a side: the median seconds of its steps, on the worker that waits longest."""
    port = free_port()
    program, _, link_dtype = side.partition(" ")
    processes = []
    for rank in range(NODES * LOCAL):
        node, local = divmod(rank, LOCAL)
        variables = {
            "RANK": rank, "WORLD_SIZE": NODES * LOCAL, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": LOCAL,
            "GROUP_RANK": node, "GROUP_WORLD_SIZE": NODES, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": nodes.interfaces[node], "FASTPS_LINK_DTYPE": link_dtype or "float32",
            "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        command = [sys.executable, "-m", "fastps.bench.nodes_member", program, str(parameters), str(steps)]
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        processes.append(subprocess.Popen(nodes.command(node, command), env=environment, text=True, **_PIPES))
    found = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=300)
            check(process.returncode == 0, f"a worker of {side} to end well", errors[-500:])
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    check(len({each["result"] for each in found}) == 1, "the same result on all workers", [each["result"] for each in found])
    return max(float(statistics.median(each["seconds"])) for each in found)
