"""A process group of torch.distributed beside a job: Gloo's collectives, in which a waiting worker keeps the job going.

It carries what frameworks gather: metrics, losses, seeds. Gradients go through the store. A peer's death ends a wait with the
store's named error, not with Gloo's. The workers of a launch meet at a place of the job's name: no port is agreed on before,
and nothing stays in a file system.

The workers of several nodes meet at the rendezvous of their agents, and listen as agents do: at one address, which the user
trusts, and to nobody once all have met. Every node must be a replica, because frameworks load and save state on each.
"""

import logging
import os
import secrets
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOptions,
    ScatterOptions,
    Store,
    Work,
)

from fastps.errors import AttachError, Error, NodeLostError, TimeoutExceededError, UnsupportedError, UsageError, WorkerDiedError
from fastps.integrations import attendance
from fastps.job import environment, limits
from fastps.job.nodes import Nodes, are_replicas, nodes_of_environment
from fastps.job.policy import Policy
from fastps.job.secret import HOW_TO_GIVE, Secret, secret_of_environment
from fastps.job.specs import parse_policy
from fastps.membership import rendezvous
from fastps.network.addresses import own_address
from fastps.network.link import process_group as gloo_group
from fastps.network.link import reason_of
from fastps.network.meeting import join_meeting
from fastps.network.presence import of_launch, reported
from fastps.network.secret import NONCE_BYTES, are_equal, mac
from fastps.network.tcp_store import connect_store, host_store
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.deadline import Deadline

logger = logging.getLogger("fastps.integrations")

BACKEND = "fastps_job"  # "fastps" is the backend of fastps.collectives, whose waits keep no job going
_MORE_S = 30.0  # Gloo's own timeout comes after the store's, which names the workers
_NAMED_NS = 2_000_000_000  # how long after a lost connection the store may take to name the lost worker
_PAUSE_NS = 10_000_000
_FORMAT = 0x70670101  # of the offer: its place is the port; no number of an arena
_ANSWER_S = 1.0
_HOST = "127.0.0.1"


class JobGroup(ProcessGroup):
    """Gloo's collectives for the workers of one launch. Each returns when it is over; `send` and `recv` do not wait."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub has another constructor
        # A group that is made again may have the name, and the keys, of one that was destroyed.
        store = PrefixStore(str(size), store)  # each rank of a group counts as often as the others of its size
        store = PrefixStore(str(store.add(f"groups/{rank}", 1)), store)
        self._nodes, place = nodes_of_environment(), (rank, size, timeout)
        self._gloo: Any = ProcessGroupGloo(store, *place) if self._nodes is None else _over(self._nodes, store, *place)
        self._name: Any = ""
        self._store, self._number = PrefixStore("fastps", store), 0
        self.limit_s = timeout.total_seconds()

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """The name of this kind of group."""
        return BACKEND

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._name = name

    @property
    def group_name(self) -> Any:
        """The name that torch gave the group. Its base class keeps none for a group without torch's own backends."""
        return self._name

    def run(self, name: str, *arguments: Any, pushes: bool = True, **options: Any) -> Work:
        """Take part in a collective, wait for the others, and return its completed work.

        With `pushes` this worker pushes without a gradient where all others wait for it. Over several nodes it does not: it
        cannot see whether a worker of another node still computes.

        Raises WorkerDiedError if another worker ends before it comes, TimeoutExceededError if it does not come.
        """
        self._number += 1
        board = attendance.Board(self._store, self._number, self.rank())
        try:
            work: Work = getattr(self._gloo, name)(*arguments, **options)
            pushes = pushes and self._nodes is None
            attendance.wait(work.is_completed, f"in {name} of torch.distributed", board, self.limit_s, pushes=pushes)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, Error):
                raise
            raise self._lost(name, error) from error
        finally:
            board.leave()
        return work

    def _lost(self, name: str, error: RuntimeError) -> Exception:
        """The error of a collective that Gloo ended. Raises the store's own error if it can name the worker that is lost."""
        silence_s = 0.0 if self._nodes is None else self._nodes.policy.timeout_s  # after which a node is lost
        until_ns = SYSTEM_CLOCK.now_ns() + _NAMED_NS + int(silence_s * 1e9)
        while (workers := attendance.open_workers()) and SYSTEM_CLOCK.now_ns() < until_ns:
            for worker in workers:
                worker.check_peers()
            SYSTEM_CLOCK.sleep_ns(_PAUSE_NS)
        return WorkerDiedError(
            f"worker {self.rank()}: expected all {self.size()} workers in {name} of torch.distributed, found that one of them"
            f" has ended before ({reason_of(error)}): see what it wrote",
            -1,
        )

    def send(self, *arguments: Any) -> Work:
        """Gloo's send, which the caller waits for."""
        work: Work = self._gloo.send(*arguments)
        return work

    def recv(self, *arguments: Any) -> Work:
        """Gloo's receive, which the caller waits for."""
        work: Work = self._gloo.recv(*arguments)
        return work

    def alltoall(self, received: list[torch.Tensor], sent: list[torch.Tensor], *_: Any) -> Work:
        """Each worker's tensors to all workers, by scatters: Gloo has no other way for tensors of several sizes."""
        for root, tensor in enumerate(received):
            options = ScatterOptions()
            options.rootRank = root
            work = self.run("scatter", [tensor], [sent] if root == self.rank() else [], options)
        return work

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Work:  # type: ignore[override]
        """Each worker's part of the sums, by reduces: Gloo's own work does not say when it is over."""
        for output, parts in zip(outputs, inputs, strict=True):
            for root, part in enumerate(parts):
                to_root, reduced = ReduceOptions(), part.detach().clone()
                to_root.rootRank = root
                if options is not None:
                    to_root.reduceOp = options.reduceOp
                work = self.run("reduce", [reduced], to_root)
                if root == self.rank():
                    output.detach().copy_(reduced)
        return work

    def reduce_scatter_single(self, output: torch.Tensor, parts: torch.Tensor, options: Any = None) -> Work:
        """`reduce_scatter` of one tensor, which holds the parts of all workers."""
        return self.reduce_scatter([output], [list(parts.reshape(self.size(), *output.shape))], options)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # its name before torch 2.13


_COLLECTIVES = (
    *("allgather", "allgather_coalesced", "_allgather_base", "allreduce", "allreduce_coalesced", "alltoall_base"),
    *("barrier", "broadcast", "gather", "reduce", "scatter"),
)
_RENAMED = {"all_gather_single": "_allgather_base"}  # by torch 2.13; Gloo's group has the old name
for _name in (*_COLLECTIVES, *_RENAMED):  # the methods of Gloo's group, as methods that return when the collective is over
    setattr(JobGroup, _name, partialmethod(JobGroup.run, _RENAMED.get(_name, _name)))


def _over(nodes: Nodes, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Gloo's group of workers on several nodes, which have proved to each other that they know the job's secret.

    Frameworks send objects as pickles, which run code in the process that reads them. Raises UsageError.
    """
    address = own_address(nodes.host, nodes.port, nodes.interface, nodes.trusts_network)
    group: Any = gloo_group(store, "gloo", rank, size, address, timeout.total_seconds())

    def gathered(own: bytes) -> list[bytes]:
        found = [torch.empty(len(own), dtype=torch.uint8) for _ in range(size)]
        group.allgather([found], [torch.tensor(list(own), dtype=torch.uint8)]).wait()
        return [bytes(each.tolist()) for each in found]

    secret = secret_of_environment() or Secret(b"")
    nonces = gathered(secrets.token_bytes(NONCE_BYTES))
    expected = [mac(secret, "frameworks", other, *nonces) for other in range(size)]
    for other, proof in enumerate(gathered(bytes.fromhex(expected[rank]))):
        if not are_equal(proof.hex(), expected[other]):
            raise UsageError(f"workers {rank} and {other} of the process group have different secrets: {HOW_TO_GIVE}")
    return group  # type: ignore[no-any-return]


def barrier() -> None:
    """Wait until all workers have come. All of them then have the steps that they had when they came.

    In the first wait a worker pushes for those that still make steps. In the second none pushes: a worker that has left the
    first, and is waited for in the second, has begun no step.
    """
    torch.distributed.barrier()
    if isinstance(group := torch.distributed.group.WORLD, JobGroup):
        group.run("barrier", pushes=False)


def begin(
    rank: int | None = None,
    workers: int | None = None,
    *,
    sync: str | Policy | None = None,
    limit_s: float | None = None,
    look: Callable[[], None] = lambda: None,
) -> bool:
    """Begin torch's default process group for the workers of this launch. Returns whether this process is one of several.

    A group that the script has begun is kept, with a warning: its waits do not keep jobs going.

    Args:
        rank, workers: this worker's number and the number of workers; default: the environment.
        sync: the discipline of the jobs beside the group, by which several nodes can train or not; default: the environment.
        limit_s: the longest wait, also of the collectives; default: FASTPS_TIMEOUT.
        look: called while this worker waits for the others to begin; raises an error if they will not come.

    Raises:
        UnsupportedError: This worker replaces a lost one, or the launch has several nodes that are no replicas.
        UsageError: The script's own group has another size, or nothing says which job this is.
        TimeoutExceededError: A worker does not come.
        NodeLostError: Another node has ended before.
    """
    nodes = check_launch(sync)
    size = environment.world_size() if workers is None else workers
    number = environment.rank() if rank is None else rank
    if torch.distributed.is_initialized():
        _check_kept(number, size)
    elif size > 1:
        limit_s = limits.timeout_s() if limit_s is None else limit_s
        if BACKEND.upper() not in vars(torch.distributed.Backend):
            torch.distributed.Backend.register_backend(BACKEND, JobGroup, devices=["cpu", "cuda"])
        job = environment.job_name(0)
        if nodes is None:
            store = meet(job, number, size, limit_s, look)
        else:
            store = meet_nodes(job, join_meeting(nodes, limit_s), (number, size), limit_s, look)
        timeout = timedelta(seconds=limit_s + _MORE_S)
        torch.distributed.init_process_group(BACKEND, store=store, rank=number, world_size=size, timeout=timeout)
        group: Any = torch.distributed.group.WORLD
        group.limit_s = limit_s
    return size > 1


def check_launch(sync: str | Policy | None = None) -> Nodes | None:
    """The nodes of this launch; None for one. Raises UnsupportedError for a launch in which frameworks cannot train."""
    nodes = nodes_of_environment()
    if nodes is not None:
        _check_nodes(nodes, parse_policy(sync or os.environ.get("FASTPS_SYNC") or "bsp"))
    if environment.joins():
        raise UnsupportedError(
            "this worker replaces a lost one, and a process group has a fixed set of members: start the job without --restarts,"
            " and resume from the framework's checkpoint"
        )
    return nodes


def _check_nodes(nodes: Nodes, policy: Policy) -> None:
    """Raise UnsupportedError for several nodes of which one alone has the state, or whose workers may step unequally often."""
    if not are_replicas(policy, nodes.policy):
        raise UnsupportedError(
            "Trainer, Accelerate and Lightning over several nodes: expected every node to have the weights and the optimizer's"
            f" state, as under bsp and hardsync, found sync={policy.spec}, or one of --link-dtype, --link zmq and"
            " --local-steps, under which node 0 alone has them; give --sync bsp without these, train on one node, or write"
            " the loop with fastps.DistributedOptimizer (docs/how-to/several-nodes.md)"
        )
    if nodes.policy.within != "bsp":
        raise UnsupportedError(
            "Trainer, Accelerate and Lightning over several nodes: expected --within bsp, under which all workers make equally"
            f" many steps, found --within {nodes.policy.within}; leave it out"
        )
    if nodes.policy.on_node_loss == "continue":
        raise UnsupportedError(
            "Trainer, Accelerate and Lightning over several nodes: expected a job that stops with a lost node, found"
            " --on-node-loss continue: the others would wait for its workers in gathers of torch.distributed for ever; leave it"
            " out, give --retries, and resume from the framework's checkpoint"
        )


def _check_kept(rank: int, workers: int) -> None:
    """Check a group that has begun already. Raises UsageError if it has other members than the job."""
    found = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if found != (rank, workers):
        raise UsageError(
            f"the program's process group says worker {found[0]} of {found[1]}: expected {rank} of {workers}, as the launcher"
            " says; leave init_process_group out, because fastps calls it"
        )
    if workers > 1 and not isinstance(torch.distributed.group.WORLD, JobGroup):
        logger.warning(
            "the program has begun a process group of its own (%s): a worker that waits in it folds nothing for the others, so"
            " all have to make equally many steps between two collectives; leave init_process_group out, because fastps calls"
            " it",
            torch.distributed.get_backend(),
        )


def meet(job: str, rank: int, workers: int, limit_s: float, look: Callable[[], None] = lambda: None) -> Store:
    """Wait for the other workers of the launch `job`, `limit_s` at most, and return the store, which worker 0 keeps.

    `look` raises an error if the others need not be waited for any longer. Raises TimeoutExceededError if one does not come.
    """
    pause = _pauses(rank, limit_s, look)
    if rank:
        while (port := _told(job)) is None:
            pause(
                "worker 0 to begin the process group: see the output of worker 0, and raise FASTPS_TIMEOUT if it is only slow"
            )
        store = connect_store(_HOST, port, limit_s)
        store.set(_key(rank), "")
        return store
    kept = host_store(_HOST, 0, limit_s)
    pidfd = os.pidfd_open(os.getpid())  # in place of an arena, too
    try:
        listener = rendezvous.Listener(rendezvous.place_name(job, "group"), pidfd, pidfd, b"", kept.port, _FORMAT)
    finally:
        os.close(pidfd)
    with closing(listener):
        _await_workers(kept, range(1, workers), pause)
    return kept


def meet_nodes(
    job: str, nodes: Nodes, place: tuple[int, int], limit_s: float, look: Callable[[], None] = lambda: None
) -> Store:
    """Wait for the workers of all nodes, `limit_s` at most. Returns the store of their rendezvous.

    `place` is this worker's number and the number of workers. For `look` see `meet`.

    Raises TimeoutExceededError, and NodeLostError if the rendezvous is lost, or another node's launcher has reported its end.
    """
    rank, workers = place

    def look_at_nodes() -> None:
        look()
        for node in set(range(nodes.count)) - {nodes.number}:
            if (end := reported(launch, node)) is not None:
                reason = end.reason or "its script has no Trainer and no Accelerator"
                raise NodeLostError(f"node {node} ended before its workers began the process group: {reason}", node)

    try:
        connected = connect_store(nodes.host, nodes.port, limit_s)
        launch, store = of_launch(connected), PrefixStore(f"fastps/{job}/frameworks", connected)
        store.set(_key(rank), "")
        _await_workers(store, range(workers), _pauses(rank, limit_s, look_at_nodes))
    except (AttachError, RuntimeError) as error:
        if isinstance(error, UsageError):
            raise
        raise NodeLostError(
            f"worker {rank} lost the rendezvous at {nodes.host}:{nodes.port} before the process group had begun"
            f" ({reason_of(error)}): see the output of node 0",
            0,
        ) from error
    return store


def _pauses(rank: int, limit_s: float, look: Callable[[], None]) -> Callable[[str], None]:
    """What a worker calls between two looks, with what it waits for. It calls `look`; raises TimeoutExceededError."""
    clock = SYSTEM_CLOCK
    deadline = Deadline(clock.now_ns(), int(limit_s * 1e9))

    def pause(reason: str) -> None:
        look()
        if deadline.is_over(clock.now_ns()):
            raise TimeoutExceededError(f"worker {rank} waited {limit_s:g} s for {reason}")
        clock.sleep_ns(_PAUSE_NS)

    return pause


def _await_workers(store: Store, ranks: range, pause: Callable[[str], None]) -> None:
    """Wait until these workers have come to the store."""
    while missing := [f"worker {rank}" for rank in ranks if not store.check([_key(rank)])]:
        pause(
            f"{', '.join(missing)} to reach the place where the process group begins (a Trainer, an Accelerator); see their"
            " output, and raise FASTPS_TIMEOUT if they are only slow"
        )


def _told(job: str) -> int | None:
    """The port that worker 0 tells; None if it is not there yet."""
    try:
        with rendezvous.connect(job, "group", _ANSWER_S, abi=_FORMAT, observer=True) as offer:
            return offer.place
    except (rendezvous.Absent, rendezvous.Silent, rendezvous.AbiDiffers):
        return None


def _key(rank: int) -> str:
    return f"fastps-group/{rank}"
