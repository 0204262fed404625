"""How workers meet whose launcher keeps no store: worker 0 starts one, and all learn which node they are on.

MPI's launchers do not number the nodes. Every worker then tells the store its rank and its number on its node. Where the ranks
of each node follow each other, this gives the nodes exactly, also if they have different numbers of workers.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastps.errors import AttachError, Error, UsageError
from fastps.job.launchers import Launched
from fastps.job.nodes import Nodes
from fastps.network.addresses import own_address
from fastps.network.awaiting import await_name
from fastps.network.gloo import reason_of
from fastps.network.introduction import await_keys, introduce, introductions
from fastps.network.rendezvous import connect_store

_READ_S = 5.0  # for the other workers to read why the job cannot begin
_known: dict[tuple[int, Nodes], Nodes] = {}  # by process: a forked child meets anew
_hosts: dict[int, "subprocess.Popen[bytes]"] = {}


def met(nodes: Nodes, timeout_s: float) -> Nodes:
    """The nodes with this node's number, once all have come. Nodes whose launcher keeps a store are returned at once.

    Raises AttachError, UsageError.
    """
    key = os.getpid(), nodes
    if nodes.launched is None:
        return nodes
    if key not in _known:
        _known[key] = _meet(nodes, nodes.launched, timeout_s)
    return _known[key]


def kept_descriptors() -> tuple[int, ...]:
    """Descriptors that keep this process's store alive while they are open in any process."""
    host = _hosts.get(os.getpid())
    return () if host is None or host.stdin is None else (host.stdin.fileno(),)


def _meet(nodes: Nodes, launched: Launched, timeout_s: float) -> Nodes:
    await_name(nodes.host, timeout_s)
    address = own_address(nodes.host, nodes.port, nodes.interface, nodes.trusts_network)
    if launched.rank == 0:
        _start_store(nodes, timeout_s)
    try:
        store = PrefixStore("meeting", connect_store(nodes.host, nodes.port, timeout_s))
        if not nodes.count:
            number, count = _place(store, launched, timeout_s)
            nodes = replace(nodes, number=number, count=count)
        reader = launched.rank, launched.workers
        if nodes.local_rank == 0:
            introduce(store, nodes.number, nodes.count, address, timeout_s, reader)
        else:
            introductions(store, nodes.number, nodes.count, timeout_s, reader)
    except Error:
        raise
    except RuntimeError as error:
        raise AttachError(
            f"worker {launched.rank} lost the rendezvous at {nodes.host}:{nodes.port} ({reason_of(error)}): see the output of"
            " worker 0"
        ) from error
    return nodes


def _start_store(nodes: Nodes, timeout_s: float) -> None:
    """Start the process that keeps the store. It ends when this process and its agents have ended."""
    if os.getpid() in _hosts:
        return
    arguments = [f"--host={nodes.host}", f"--port={nodes.port}", f"--timeout={timeout_s}"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "fastps.network.store_host", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        start_new_session=True,  # Ctrl-C must reach only the workers
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        line = stdout.readline()
    found = json.loads(line) if line else {"error": "the process that keeps the rendezvous has ended: see its own output"}
    if "error" in found:
        process.wait()
        raise (UsageError if found.get("kind") == "UsageError" else AttachError)(found["error"])
    _hosts[os.getpid()] = process
    atexit.register(_end_store, os.getpid())


def _end_store(owner: int) -> None:
    """Close this process's end. The store ends with the last agent that has it open, too, and is not waited for."""
    host = _hosts.pop(owner, None)
    if host is not None and os.getpid() == owner and host.stdin is not None:
        host.stdin.close()


def _place(store: Store, launched: Launched, timeout_s: float) -> tuple[int, int]:
    """This worker's node, and the number of nodes: worker 0 finds them for all. Raises AttachError."""
    keys = [f"worker/{rank}" for rank in range(launched.workers)]
    store.set(keys[launched.rank], json.dumps([launched.local_rank, launched.local_workers]))
    if launched.rank == 0:
        await_keys(store, keys, timeout_s, 0)
        places = {rank: tuple(json.loads(store.get(key))) for rank, key in enumerate(keys)}
        store.set("firsts", json.dumps(first_ranks(places) or []))
    await_keys(store, ["firsts"], timeout_s, -1)
    firsts: list[int] = json.loads(store.get("firsts"))
    store.set(f"has read firsts/{launched.rank}", "")
    if not firsts:
        if launched.rank == 0:  # the store ends with this process
            with contextlib.suppress(RuntimeError):
                store.wait([f"has read firsts/{rank}" for rank in range(launched.workers)], timedelta(seconds=_READ_S))
        raise AttachError(
            f"{launched.launcher} does not number the nodes, and the ranks of a node do not follow each other: expected ranks"
            " that fill one node after the other; give mpirun --map-by slot, or start `fastps run` once on each node"
        )
    first = launched.rank - launched.local_rank
    return firsts.index(first), len(firsts)


def first_ranks(places: Mapping[int, tuple[int, ...]]) -> list[int] | None:
    """The first rank of each node, from the number on its node and the workers of its node of each rank.

    None if the ranks of some node do not follow each other.

    >>> first_ranks({0: (0, 1), 1: (0, 2), 2: (1, 2)})
    [0, 1]
    >>> first_ranks({0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (1, 2)})
    """
    firsts, rank = [], 0
    while rank < len(places):
        workers = places[rank][1]
        firsts.append(rank)
        if any(places.get(rank + local) != (local, workers) for local in range(workers)):
            return None
        rank += max(1, workers)
    return firsts
