"""How the launchers of several nodes find each other before any worker runs: numbers for nodes and workers, and one job name.

A launcher runs this module as a process of its own, because the store is torch's and a launcher never imports torch. Node 0's
process keeps the store until its launcher ends. The result is one line of JSON on standard output.
"""

import argparse
import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastps.errors import AttachError, Error, UsageError
from fastps.network.gloo import reason_of
from fastps.network.rendezvous import connect_store, ended_key, holder_key
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.ports import free_port

_PROGRESS_S = 10.0
_LOOKS, _LOOK_NS = 25, 200_000_000


@dataclass(frozen=True)
class Place:
    """A node's place: its number, its first worker's rank, the workers of all nodes, the job's name, a free port of node 0."""

    number: int
    first_rank: int
    world: int
    job: str
    port: int


def main() -> int:
    """Meet the other nodes, print the place, and on node 0 keep the store until standard input ends."""
    given = _arguments()
    try:
        kept, number = _connect(given)
        store = PrefixStore("launch", kept)
        number, ended = _take(store, [number] if number >= 0 else range(1, given.nodes))
        place = _place(store, given, number)
    except (Error, RuntimeError) as error:
        text = (
            str(error) if isinstance(error, Error) else f"the rendezvous was lost ({reason_of(error)}): start this node again"
        )
        print(json.dumps({"error": text, "kind": type(error).__name__}), flush=True)
        return 1
    print(json.dumps(asdict(place)), flush=True)
    sys.stdin.read()
    with contextlib.suppress(RuntimeError):  # node 0 has ended
        store.set(ended, "")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    for name in ("--port", "--nodes", "--workers", "--number"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    return parser.parse_args()


def _connect(given: argparse.Namespace) -> tuple[Store, int]:
    """The store and this node's number, or -1. If none is given, the rendezvous' own host becomes node 0."""
    limit = timedelta(seconds=given.timeout)
    if given.number == 0 or (given.number < 0 and _is_here(given.host)):
        try:
            return TCPStore(given.host, given.port, is_master=True, wait_for_workers=False, timeout=limit), 0
        except RuntimeError as error:
            if given.number == 0:
                raise UsageError(
                    f"node 0 cannot listen on port {given.port}: {reason_of(error)}; end what uses the port, or give another"
                ) from error
    return connect_store(given.host, given.port, given.timeout), given.number


def _take(store: Store, numbers: Sequence[int]) -> tuple[int, str]:
    """Take the first number that is free: nobody has it, or its launcher has ended, or node 0 has lost the node.

    Returns the number and the key at which to say that this launcher has ended. Raises UsageError.
    """
    own = secrets.token_hex(8)
    for look in range(_LOOKS):  # for as long as a lost node may take to be missed
        if look:
            SYSTEM_CLOCK.sleep_ns(_LOOK_NS)
        for number in numbers:
            key = holder_key(number)
            holder = store.get(key).decode() if store.check([key]) else ""
            is_free = not holder or store.check([ended_key(number, holder)])
            if is_free and store.compare_set(key, holder, own).decode() == own:
                return number, ended_key(number, own)
    if len(numbers) > 1:
        raise UsageError(
            f"expected {len(numbers) + 1} nodes at the rendezvous, found another one: check --nnodes on every node"
        )
    raise UsageError(
        f"two nodes say that they are node {numbers[0]}: give each another --node-rank, or leave it to auto; a lost node can"
        " start again with --on-node-loss continue"
    )


def _place(store: Store, given: argparse.Namespace, number: int) -> Place:
    if number == 0:
        store.set("job", json.dumps([secrets.token_hex(8), free_port(""), given.nodes]))
    store.set(f"workers/{number}", str(given.workers))
    _await(store, ["job"], given, number)
    job, port, nodes = json.loads(store.get("job"))
    if nodes != given.nodes:
        raise UsageError(
            f"node {number} expects {given.nodes} nodes, node 0 expects {nodes}: give the same --nnodes everywhere"
        )
    _await(store, [f"workers/{each}" for each in range(given.nodes)], given, number)
    counts = [int(store.get(f"workers/{each}")) for each in range(given.nodes)]
    return Place(number, sum(counts[:number]), sum(counts), job, port)


def _await(store: Store, keys: list[str], given: argparse.Namespace, number: int) -> None:
    """Wait for keys, and print now and then how many are missing."""
    left_s = given.timeout
    while True:
        try:
            store.wait(keys, timedelta(seconds=min(_PROGRESS_S, left_s)))
            return
        except RuntimeError:
            left_s -= _PROGRESS_S
            missing = sum(not store.check([key]) for key in keys)
            if left_s <= 0:
                raise AttachError(
                    f"node {number} waited {given.timeout:g} s for {missing} of {given.nodes} nodes: start them, or give a"
                    " smaller --nnodes"
                ) from None
            print(f"fastps: node {number} waits for {missing} of {given.nodes} nodes", file=sys.stderr, flush=True)


def _is_here(host: str) -> bool:
    """Whether a host's name or address belongs to this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
        return True
    except OSError:
        return False


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skip the exit handlers of torch, because a launcher would wait for them
