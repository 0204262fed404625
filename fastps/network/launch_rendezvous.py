"""How the launchers of several nodes find each other before any worker runs: numbers for nodes and workers, and one job name.

A launcher runs this module as a process of its own, because the store is torch's and a launcher never imports torch. Node 0's
process keeps the store until its launcher ends. The result is one line of JSON on standard output.
"""

import argparse
import json
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastps.errors import AttachError, Error, UsageError
from fastps.network.addresses import is_here, own_address
from fastps.network.awaiting import await_name
from fastps.network.gloo import reason_of
from fastps.network.introduction import Introduction, await_keys, has_introduced, introduce
from fastps.network.rendezvous import connect_store
from fastps.network.store_host import limit_name_lookups
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.ports import free_port

_LOOKS, _LOOK_NS = 25, 200_000_000
_BEAT_S = 1.0  # several while another launcher looks
_ENDED = 1 << 40  # more beats than any launcher makes


@dataclass(frozen=True)
class Place:
    """A node's place: its number, its first worker's rank, the workers of all nodes, the job's name, a free port of node 0."""

    number: int
    first_rank: int
    world: int
    job: str
    port: int


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


@dataclass(frozen=True)
class Met:
    """What the nodes have agreed on. On node 0 the rendezvous lasts as long as `store`.

    `nodes` is empty on a node that is started again while the others run.
    """

    store: Store
    place: Place
    nodes: list[Introduction]
    beats: "_Beats"


def meet(given: Meeting) -> Met:
    """Find the other nodes. Raises AttachError, UsageError."""
    await_name(given.host, given.timeout_s)
    address = own_address(given.host, given.port, given.interface, given.trusts_network)
    store, number = _connect(given)
    try:
        named = PrefixStore("launch", store)
        number = _take(named, [number] if number >= 0 else range(1, given.nodes))
        beats = _Beats(given, number)
        beats.start()
        try:
            place = _place(named, given, number)
            is_known = has_introduced(named, number)
            found = [] if is_known else introduce(named, number, given.nodes, address, given.timeout_s)
        except BaseException:
            beats.end()
            raise
        return Met(store, place, found, beats)
    except Error:
        raise
    except RuntimeError as error:
        raise AttachError(
            f"node {number} lost the rendezvous at {given.host}:{given.port} ({reason_of(error)}): see the output of node 0"
        ) from error


def main() -> int:
    """Meet the other nodes, print the place, and on node 0 keep the store until standard input ends."""
    limit_name_lookups()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("meeting", help="the Meeting, as JSON")
    try:
        met = meet(Meeting(**json.loads(parser.parse_args().meeting)))
    except Error as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
        return 1
    print(json.dumps(asdict(met.place)), flush=True)
    sys.stdin.read()
    met.beats.end()
    return 0


class _Beats(threading.Thread):
    """The thread that shows, from when a node has its number, that the node's launcher lives. At its end the number is free.

    A beat may fail, because the network is cut or node 0 has ended: the next one opens another connection.
    """

    def __init__(self, given: Meeting, number: int) -> None:
        super().__init__(name="fastps-beats", daemon=True)
        self._given, self._number = given, number
        self._ends = threading.Event()

    def run(self) -> None:
        """See threading.Thread."""
        store: Store | None = None
        while True:
            has_ended = self._ends.wait(_BEAT_S)
            try:
                store = store or connect_store(self._given.host, self._given.port, _BEAT_S)
                PrefixStore("launch", store).add(_beats_key(self._number), _ENDED if has_ended else 1)
            except (AttachError, RuntimeError):
                store = None
            if has_ended:
                return

    def end(self) -> None:
        """Make the number free."""
        self._ends.set()
        self.join(3 * _BEAT_S)


def _connect(given: Meeting) -> tuple[Store, int]:
    """The store and this node's number; -1 if it is to take one."""
    limit = timedelta(seconds=given.timeout_s)
    if given.number == 0 or (given.number < 0 and is_here(given.host)):
        try:
            return TCPStore(given.host, given.port, is_master=True, wait_for_workers=False, timeout=limit), 0
        except RuntimeError as error:
            if given.number == 0:
                raise UsageError(
                    f"node 0 cannot listen on port {given.port}: {reason_of(error)}; end what uses the port, or give another"
                ) from error
    return connect_store(given.host, given.port, given.timeout_s), given.number


def _take(store: Store, numbers: Sequence[int]) -> int:
    """Take the first number that is free: nobody has it, or its launcher has ended, is lost, or shows no sign of life.

    Raises UsageError.
    """
    own = secrets.token_hex(8)
    first: dict[int, int] = {}
    for look in range(_LOOKS):
        if look:
            SYSTEM_CLOCK.sleep_ns(_LOOK_NS)
        for number in numbers:
            key = f"holder/{number}"
            holder = store.get(key).decode() if store.check([key]) else ""
            beats = int(store.add(_beats_key(number), 0))
            is_silent = beats == first.setdefault(number, beats) and look == _LOOKS - 1
            if (not holder or beats >= _ENDED or is_silent) and store.compare_set(key, holder, own).decode() == own:
                store.add(_beats_key(number), -beats)
                return number
    if len(numbers) > 1:
        raise UsageError(
            f"expected {len(numbers) + 1} nodes at the rendezvous, found another one: check --nnodes on every node"
        )
    raise UsageError(
        f"two nodes say that they are node {numbers[0]}: give each another --node-rank, or leave it to auto; a lost node can"
        " start again with --on-node-loss continue"
    )


def _beats_key(number: int) -> str:
    """The key at which a node's launcher shows that it lives."""
    return f"beats/{number}"


def _place(store: Store, given: Meeting, number: int) -> Place:
    if number == 0:
        store.set("job", json.dumps([secrets.token_hex(8), free_port(""), given.nodes]))
    store.set(f"workers/{number}", str(given.workers))
    await_keys(store, ["job"], given.timeout_s, number)
    job, port, nodes = json.loads(store.get("job"))
    if nodes != given.nodes:
        raise UsageError(
            f"node {number} expects {given.nodes} nodes, node 0 expects {nodes}: give the same --nnodes everywhere"
        )
    await_keys(store, [f"workers/{each}" for each in range(given.nodes)], given.timeout_s, number)
    counts = [int(store.get(f"workers/{each}")) for each in range(given.nodes)]
    return Place(number, sum(counts[:number]), sum(counts), job, port)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skip the exit handlers of torch, because a launcher would wait for them
