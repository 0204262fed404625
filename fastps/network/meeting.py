"""How the processes of a job of several nodes meet before it begins, at a store that node 0 keeps.

The launchers, `fastps run` on every node, agree on numbers for nodes and workers, and on a name for the job. Each runs this
module as a process, because the store is torch's and a launcher never imports torch. Where the launcher keeps no store (MPI,
SLURM), worker 0 runs it as a meeting of one node, and the workers learn which node they are on. MPI's launchers do not number
the nodes. Every worker then tells the store its rank and its number on its node. Where the ranks of each node follow each
other, this gives the nodes exactly, also if they have different numbers of workers.

Nodes introduce themselves: version, machine and address, and whether a firewall is between them. Every node opens a port at
its own address and connects to that of node 0; node 0 connects to those of all others. Agents choose their ports anew for each
edge, so a firewall that lets only the rendezvous through is found here and not in a timeout.
"""

import atexit
import contextlib
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastps.errors import TRY_AGAIN, AttachError, Error, NodeLostError, UsageError
from fastps.job.launchers import Launched
from fastps.job.nodes import Nodes
from fastps.network.addresses import is_here, is_loopback, own_address
from fastps.network.link import reason_of
from fastps.network.messages import WIRE_VERSION
from fastps.network.place import End, Meeting, Place, end_line
from fastps.network.presence import ENDED, Presence, beats_key, forget, holder_key, report, reported
from fastps.network.tcp_store import await_name, connect_store, host_store, limit_name_lookups
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.deadline import Deadline
from fastps.system.descriptors import reserve_all
from fastps.system.ports import free_port
from fastps.version import __version__

_REACH_S = 5.0  # a machine that answers does so within milliseconds, and others read why the job cannot begin
_PROGRESS_S = 10.0


@dataclass(frozen=True)
class Introduction:
    """What a node says of itself: its fastps, its machine's name, and the address and port at which it listens now."""

    number: int
    version: str
    machine: str
    address: str
    port: int

    @property
    def shown(self) -> str:
        """The node in an error."""
        return f"node {self.number} ({self.machine}, {self.address})"


def introduce(
    store: Store, number: int, count: int, address: str, timeout_s: float, reader: tuple[int, int] | None = None
) -> list[Introduction]:
    """Exchange introductions with all nodes, and check them, as `introductions` does; by default the nodes themselves read."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=count + 8) as listener:
        own = Introduction(number, f"{__version__} ({WIRE_VERSION})", platform.node(), address, listener.getsockname()[1])
        store.set(f"introduction/{number}", json.dumps(asdict(own)))
        met = range(count) if number == 0 else (0,)
        await_keys(store, [f"introduction/{node}" for node in met], timeout_s, number)
        others = [_of(store, node) for node in met if node != number]
        store.set(f"introduced/{number}", next((text for other in others if (text := _obstacle(own, other))), ""))
        return introductions(store, number, count, timeout_s, reader or (number, count))


def introductions(store: Store, number: int, count: int, timeout_s: float, reader: tuple[int, int]) -> list[Introduction]:
    """Wait until all nodes have introduced themselves. Returns their introductions, by number.

    `reader` is the caller's number among those that read the result, and how many they are. The store may end with reader 0,
    so that one leaves last if there is an error.

    Raises AttachError, on every node the same: another version, an address that others cannot reach, or a firewall.
    """
    await_keys(store, [f"introduced/{node}" for node in range(count)], timeout_s, number)
    reason = next((text for node in range(count) if (text := store.get(f"introduced/{node}").decode())), "")
    found = [_of(store, node) for node in range(count)]
    _agree(store, "has read", reader, reason)
    return found


def _agree(store: Store, key: str, reader: tuple[int, int], reason: str) -> None:
    """Raise AttachError for a reason that all readers have."""
    number, count = reader
    store.set(f"{key}/{number}", "")
    if reason:
        if number == 0:  # the store may end with this process
            with contextlib.suppress(RuntimeError):
                store.wait([f"{key}/{each}" for each in range(count)], timedelta(seconds=_REACH_S))
        raise AttachError(reason)


def await_keys(store: Store, keys: list[str], timeout_s: float, number: int) -> None:
    """Wait on node `number` for keys that the nodes set, and print now and then how many are missing. Raises NodeLostError."""
    left_s = timeout_s
    while True:
        try:
            store.wait(keys, timedelta(seconds=min(_PROGRESS_S, left_s)))
            return
        except RuntimeError:
            left_s -= _PROGRESS_S
        try:
            missing = sum(not store.check([key]) for key in keys)
        except RuntimeError as error:
            raise NodeLostError(
                f"node {number} lost the rendezvous while it waited for the other nodes: see the output of node 0", 0
            ) from error
        if left_s <= 0:
            raise NodeLostError(
                f"node {number} waited {timeout_s:g} s for {missing} of {len(keys)} nodes: start them, or give a smaller"
                " --nnodes; raise FASTPS_TIMEOUT if they are only slow"
            )
        print(f"fastps: node {number} waits for {missing} of {len(keys)} nodes", file=sys.stderr, flush=True)


def _of(store: Store, node: int) -> Introduction:
    """A node's introduction. That of another version may have other fields; its version is an obstacle by itself."""
    said = json.loads(store.get(f"introduction/{node}"))
    unsaid = asdict(Introduction(node, "another version", "", "", 0))
    return Introduction(**{name: said.get(name, value) for name, value in unsaid.items()})


def _obstacle(own: Introduction, other: Introduction) -> str:
    """Why two nodes cannot work together; empty if they can."""
    if own.version != other.version:
        return (
            f"{own.shown} has fastps {own.version}, {other.shown} has {other.version}: expected one version; install the same"
            " on all nodes"
        )
    if is_loopback(own.address) != is_loopback(other.address):
        local = own if is_loopback(own.address) else other
        return (
            f"{local.shown} listens at a loopback address, which no other machine reaches: there the rendezvous' host means the"
            " machine itself; give --rendezvous an address of node 0, or --interface (FASTPS_INTERFACE) on that node"
        )
    try:
        socket.create_connection((other.address, other.port), _REACH_S, (own.address, 0)).close()
    except OSError as error:
        return (
            f"{own.shown} cannot reach port {other.port} of {other.shown} ({error}), although the rendezvous answers: a"
            " firewall is between them, or the address is of another network; allow all TCP ports between the nodes, or choose"
            " the interface with --interface (FASTPS_INTERFACE)"
        )
    return ""


_LOOKS, _LOOK_NS = 25, 200_000_000
_NEXT_NS = 500_000_000  # between two looks for the next meeting
_known: dict[tuple[int, Nodes], Nodes] = {}  # by process: a forked child meets anew
_hosts: dict[int, "subprocess.Popen[bytes]"] = {}


@dataclass(frozen=True)
class Met:
    """What the nodes have agreed on. On node 0 the rendezvous lasts as long as `store`.

    `nodes` is empty on a node that is started again while the others run.
    """

    store: Store
    place: Place
    nodes: list[Introduction]
    presence: Presence


def meet(given: Meeting, on_loss: Callable[[str], None] = lambda reason: None) -> Met:
    """Find the other nodes. `on_loss` is that of Presence. Raises AttachError, NodeLostError, UsageError."""
    await_name(given.host, given.timeout_s)
    address = own_address(given.host, given.port, given.interface, given.trusts_network)
    number = given.number
    try:
        store, number = _connect(given)
        while (taken := _take(store, given, number)) is None:
            store = _await_next(given, number, _job_at(store))
        named, (number, holder) = PrefixStore("launch", store), taken
        presence = Presence(given, number, holder, on_loss)
        presence.start()
        try:
            place = _place(named, given, number)
            found = [] if place.joins else introduce(named, number, given.nodes, address, given.timeout_s)
        except BaseException:
            presence.end()
            raise
        return Met(store, place, found, presence)
    except Error:
        raise
    except RuntimeError as error:
        raise NodeLostError(
            f"node {number} lost the rendezvous at {given.host}:{given.port} ({reason_of(error)}): see the output of node 0", 0
        ) from error


def main() -> int:
    """Meet the other nodes, print the place as a line of JSON, and on node 0 keep the store until standard input ends.

    A line of standard input says how this node has ended; the answer says how the job has. A line before says a loss.
    """
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # SLURM's scancel sends it to every process: the launcher says when it is over
    limit_name_lookups()
    reserve_all()  # torch's store takes a connection of anybody
    try:
        found = meet(Meeting(**json.loads(sys.argv[1])), lambda reason: _say({"lost": reason}))
    except Error as error:
        _say({"error": str(error), "kind": type(error).__name__})
        return 1
    _say(asdict(found.place))
    if line := sys.stdin.readline():
        of_job = found.presence.part(End(**json.loads(line)))
        if found.place.number and not found.presence.loss:
            found.presence.end()
        _say(end_line(of_job))
        sys.stdin.read()
    return 0


def _say(line: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")  # in one call: two threads write
    sys.stdout.flush()


def _connect(given: Meeting) -> tuple[Store, int]:
    """The store and this node's number; -1 if it is to take one."""
    if given.number == 0 or (given.number < 0 and is_here(given.host)):
        try:
            return host_store(given.host, given.port, given.timeout_s), 0
        except UsageError:
            if given.number == 0:
                raise
    try:
        return connect_store(given.host, given.port, given.timeout_s), given.number
    except AttachError as error:
        raise NodeLostError(str(error), 0) from error


def _take(store: Store, given: Meeting, number: int) -> tuple[int, str] | None:
    """Take this number, or the first free one for -1: nobody has it, or its launcher has ended or shows no sign of life.

    Returns it and a token that no other launcher has; None if the job of this meeting has begun, and goes on without no node:
    then this one is let in at the next meeting. Raises UsageError.
    """
    named, own = PrefixStore("launch", store), secrets.token_hex(8)
    if not given.goes_on and given.earlier and _job_at(store) == given.earlier:
        return None
    numbers = [number] if number >= 0 else range(1, given.nodes)
    first: dict[int, int] = {}
    for look in range(_LOOKS):
        if look:
            SYSTEM_CLOCK.sleep_ns(_LOOK_NS)
        for each in numbers:
            key = holder_key(each)
            holder = named.get(key).decode() if named.check([key]) else ""
            beats = int(named.add(beats_key(each), 0))
            is_silent = beats == first.setdefault(each, beats) and look == _LOOKS - 1
            if holder and not (beats >= ENDED or is_silent):
                continue
            if holder and not given.goes_on and named.check([f"introduced/{each}"]):
                if reported(named, each) is None:
                    report(named, each, TRY_AGAIN, "its launcher was started again")
                return None
            if named.compare_set(key, holder, own).decode() == own:
                named.add(beats_key(each), -beats)
                forget(named, each)
                return each, own
    if len(numbers) > 1:
        raise UsageError(
            f"expected {len(numbers) + 1} nodes at the rendezvous, found another one: check --nnodes on every node"
        )
    raise UsageError(
        f"two nodes say that they are node {numbers[0]}: give each another --node-rank, or leave it to auto; a lost node can"
        " start again with --on-node-loss continue or --retries"
    )


def _job_at(store: Store) -> str:
    """The name of the job whose nodes meet at a store; "" before node 0 has given one."""
    named = PrefixStore("launch", store)
    return str(json.loads(named.get("job"))[0]) if named.check(["job"]) else ""


def _await_next(given: Meeting, number: int, job: str) -> Store:
    """Wait until another job meets at the rendezvous. Raises NodeLostError if none does in time."""
    print(f"fastps: waiting for the next meeting at {given.host}:{given.port}: the job there ends", file=sys.stderr, flush=True)
    clock = SYSTEM_CLOCK
    deadline = Deadline(clock.now_ns(), int(given.timeout_s * 1e9))
    while not deadline.is_over(clock.now_ns()):
        with contextlib.suppress(RuntimeError, AttachError):
            store = connect_store(given.host, given.port, given.timeout_s)
            if _job_at(store) != job:
                return store
        clock.sleep_ns(_NEXT_NS)
    raise NodeLostError(
        f"node {number} waited {given.timeout_s:g} s for the next meeting at {given.host}:{given.port}, and the job that it was"
        " lost from has not ended: end it on the other nodes", 0,
    )  # fmt: skip


def _place(store: Store, given: Meeting, number: int) -> Place:
    joins = store.check([f"introduced/{number}"])  # a node of this number was here before, and was lost
    if number == 0:
        store.set("job", json.dumps([secrets.token_hex(8), free_port(""), given.nodes, given.checkpoint]))
    store.set(f"workers/{number}", str(given.workers))
    await_keys(store, ["job"], given.timeout_s, number)
    job, port, nodes, checkpoint = json.loads(store.get("job"))
    if nodes != given.nodes:
        raise UsageError(
            f"node {number} expects {given.nodes} nodes, node 0 expects {nodes}: give the same --nnodes everywhere"
        )
    await_keys(store, [f"workers/{each}" for each in range(given.nodes)], given.timeout_s, number)
    counts = [int(store.get(f"workers/{each}")) for each in range(given.nodes)]
    return Place(number, sum(counts[:number]), sum(counts), job, port, checkpoint, joins)


def join_meeting(nodes: Nodes, timeout_s: float) -> Nodes:
    """The nodes with this node's number, once all have come. Nodes whose launcher keeps a store are returned at once.

    Raises AttachError, UsageError.
    """
    if nodes.launched is None:
        return nodes
    key = os.getpid(), nodes
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
            number, count = _place_of_worker(store, launched, timeout_s)
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
    if not is_here(nodes.host):
        raise AttachError(
            f"worker 0 keeps the rendezvous of all nodes, and {nodes.host} is not an address of its machine: expected the host"
            " of worker 0 in FASTPS_RENDEZVOUS=HOST:PORT"
        )
    given = Meeting(nodes.host, nodes.port, 1, 1, 0, timeout_s, nodes.interface, nodes.trusts_network)
    process = given.start(start_new_session=True)  # Ctrl-C must reach only the workers
    assert process.stdout is not None
    with process.stdout:
        try:
            Place.told_by(process)
        except Error:
            process.wait()
            raise
    _hosts[os.getpid()] = process
    atexit.register(_end_store, os.getpid())


def _end_store(owner: int) -> None:
    """Close this process's end. The store ends with the last agent that has it open, too, and is not waited for."""
    host = _hosts.pop(owner, None)
    if host is not None and os.getpid() == owner and host.stdin is not None:
        host.stdin.close()


def _place_of_worker(store: Store, launched: Launched, timeout_s: float) -> tuple[int, int]:
    """This worker's node, and the number of nodes: worker 0 finds them for all. Raises AttachError."""
    keys = [f"worker/{rank}" for rank in range(launched.workers)]
    store.set(keys[launched.rank], json.dumps([launched.local_rank, launched.local_workers]))
    if launched.rank == 0:
        await_keys(store, keys, timeout_s, 0)
        places = {rank: tuple(json.loads(store.get(key))) for rank, key in enumerate(keys)}
        store.set("firsts", json.dumps(first_ranks(places) or []))
    await_keys(store, ["firsts"], timeout_s, -1)
    firsts: list[int] = json.loads(store.get("firsts"))
    reason = (
        f"{launched.launcher} does not number the nodes, and the ranks of a node do not follow each other: expected ranks that"
        " fill one node after the other; give mpirun --map-by slot, or start `fastps run` once on each node"
    )
    _agree(store, "has read firsts", (launched.rank, launched.workers), "" if firsts else reason)
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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skip the exit handlers of torch, because a launcher would wait for them
