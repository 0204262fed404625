"""Helpers for tests of several nodes: all on this machine, each with an agent of its own, over real links on loopback."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from fastps.store import jobs_of_process
from tests.support import processes
from tests.support.network import forked_agents
from tests.support.processes import Child


@contextmanager
def rendezvous() -> Iterator[int]:
    """A store for nodes to find each other, in a process of its own; gives its port.

    The store's thread looks up the name of every client. A worker that its process forks meanwhile finds glibc's lock of the
    resolver taken for ever, and hangs in its own first look-up.
    """
    mine, theirs = os.pipe()

    def keep() -> None:
        os.close(mine)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(theirs, str(store.port).encode())
        signal.pause()

    keeper = processes.start(keep)
    os.close(theirs)
    with os.fdopen(mine, "rb") as told:
        port = int(told.read1())
    try:
        yield port
    finally:
        processes.kill(keeper)


def start(
    counts: Sequence[int],
    port: int,
    work: Callable[[int], Any],
    variables: Mapping[str, str] | None = None,
    forks_agents: bool = True,
) -> list[Child]:
    """Start a process for each worker of nodes with so many workers; `work` gets the worker's rank in the whole job.

    An agent that is forked costs a tenth of the processor time of one that starts as users' agents do.
    """
    firsts = [0, *accumulate(counts)]
    children = []
    for node, count in enumerate(counts):
        for local in range(count):
            rank = firsts[node] + local
            own = {
                "FASTPS_NNODES": len(counts),
                "FASTPS_NODE_RANK": node,
                "FASTPS_RENDEZVOUS": f"127.0.0.1:{port}",
                "FASTPS_LOCAL_RANK": local,
                "FASTPS_LOCAL_WORKERS": count,
                "FASTPS_RANK": rank,
                "FASTPS_WORKERS": sum(counts),
                "FASTPS_JOB": f"nodes-{os.getpid()}-{port}",
                **(variables or {}),
            }

            def run(rank: int = rank, own: Mapping[str, Any] = own) -> Any:
                os.environ.update({name: str(value) for name, value in own.items()})
                torch.set_num_threads(1)
                jobs_of_process._next[0] = 0  # as in a new process: the optimizers of earlier tests are not this script's
                if forks_agents:
                    forked_agents.fork_agents()
                return work(rank)

            children.append(processes.start(run))
    return children


def train(
    counts: Sequence[int], work: Callable[[int], Any], timeout_s: float = 100, forks_agents: bool = True, **variables: str
) -> list[Any]:
    """Run the workers of nodes to their end; what each returned."""
    with rendezvous() as port:
        return processes.results(start(counts, port, work, variables, forks_agents), timeout_s)


def await_files(folder: Path, count: int, timeout_s: float = 100.0, pattern: str = "*") -> None:
    """Wait until a folder has so many files, which workers leave when they have come somewhere."""
    deadline = time.monotonic() + timeout_s
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, "the workers have not come so far"
        time.sleep(0.02)


def agents() -> dict[int, int]:
    """The process id of each node's agent, among the descendants of this process."""
    import psutil

    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if process.name().startswith(forked_agents.NAME):
                found[int(process.name().removeprefix(forked_agents.NAME))] = process.pid
            elif "fastps.network.agent" in process.cmdline():
                found[int(process.environ()["FASTPS_NODE_RANK"])] = process.pid
    return found


def connections() -> list[tuple[int, int]]:
    """The ports of every connection between two agents."""
    import psutil

    owners = {}
    for process_id in agents().values():
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(process_id).net_connections("inet"):
                if each.status == psutil.CONN_ESTABLISHED:
                    owners[each.laddr.port, each.raddr.port] = process_id
    return sorted(ports for ports in owners if ports[::-1] in owners and ports[0] < ports[1])


def missing_reset_reason() -> str:
    """Why connections cannot be reset here; empty if they can."""
    if shutil.which("ss") is None:
        return "the command ss is not installed (iproute2)"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        reset((client.getsockname()[1], listener.getsockname()[1]))
        accepted.settimeout(0.2)
        try:
            accepted.recv(1)
        except ConnectionError:
            return ""
        except TimeoutError:
            return "this kernel cannot reset the connections of others (CONFIG_INET_DIAG_DESTROY), or the user is not root"
        finally:
            accepted.close()
    return ""


def reset(ports: tuple[int, int]) -> None:
    """Reset one connection, as a firewall does that forgets it."""
    words = ["sport", "=", str(ports[0]), "dport", "=", str(ports[1])]
    subprocess.run(["ss", "-K", "-tn", *words], capture_output=True, check=False)
