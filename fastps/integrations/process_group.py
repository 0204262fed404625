"""A process group of torch.distributed beside a job: Gloo's collectives, in which a waiting worker keeps the job going.

It carries what frameworks gather: metrics, losses, seeds. Gradients go through the store. A peer's death ends a wait with the
store's named error, not with Gloo's.
"""

import os
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore, Work  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fastps.errors import Error, UnsupportedError, UsageError, WorkerDiedError
from fastps.integrations import meeting
from fastps.job import environment, limits
from fastps.job.nodes import nodes_of_environment
from fastps.network.gloo import reason_of
from fastps.system.clock import SYSTEM_CLOCK

BACKEND = "fastps_job"  # "fastps" is the backend of fastps.collectives, whose waits keep no job going
PORT_VARIABLE = "FASTPS_GROUP_PORT"
_MORE_S = 30.0  # Gloo's own timeout comes after the store's, which names the workers
_NAMED_NS = 1_000_000_000  # how long after a lost connection the store may take to name the lost worker
_PAUSE_NS = 10_000_000


def _collective(name: str) -> Callable[..., Work]:
    """The method of Gloo's group with this name, as one that returns when it is over."""

    def run(self: "JobGroup", *arguments: Any, **options: Any) -> Work:
        return self.run(name, *arguments, **options)

    return run


class JobGroup(ProcessGroup):
    """Gloo's collectives for the workers of one launch. Each returns when it is over; `send` and `recv` do not wait."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub has another constructor
        self._gloo: Any = ProcessGroupGloo(store, rank, size, timeout)
        self._store, self._number = PrefixStore("fastps", store), 0

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """The name of this kind of group."""
        return BACKEND

    def run(self, name: str, *arguments: Any, **options: Any) -> Work:
        """Take part in a collective, wait for the others, and return its completed work.

        Raises WorkerDiedError if another worker ends before it comes, TimeoutExceededError if it does not come.
        """
        self._number += 1
        board = _KeyBoard(self._store, self._number, self.rank())
        try:
            work: Work = getattr(self._gloo, name)(*arguments, **options)
            meeting.wait(work.is_completed, f"in {name} of torch.distributed", board)
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
        until_ns = SYSTEM_CLOCK.now_ns() + _NAMED_NS
        while (workers := meeting.open_workers()) and SYSTEM_CLOCK.now_ns() < until_ns:
            for worker in workers:
                worker.look_around()
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

    allgather = _collective("allgather")
    allgather_coalesced = _collective("allgather_coalesced")
    _allgather_base = _collective("_allgather_base")
    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    alltoall_base = _collective("alltoall_base")
    barrier = _collective("barrier")
    broadcast = _collective("broadcast")
    gather = _collective("gather")
    reduce = _collective("reduce")
    reduce_scatter = _collective("reduce_scatter")
    scatter = _collective("scatter")


class _KeyBoard:
    """The board of one collective, in the group's store. It has keys only while a wait is long."""

    def __init__(self, store: Store, number: int, rank: int) -> None:
        self._store, self._number, self._rank = store, number, rank
        self._has_come = False

    def come(self) -> None:
        """Say that this worker has come."""
        self._has_come = True
        self._store.set(self._key(self._rank), "1")

    def have_come(self, ranks: Collection[int]) -> bool:
        """Whether all of these workers have said so."""
        return bool(self._store.check([self._key(rank) for rank in ranks])) if ranks else True

    def leave(self) -> None:
        """Remove what `come` wrote: the collective is over, so nobody asks for it any more."""
        if self._has_come:
            self._store.delete_key(self._key(self._rank))

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> JobGroup:
    return JobGroup(store, rank, size, timeout)


def begin() -> bool:
    """Begin torch's default process group for the workers of this launch. Returns whether this process is one of several.

    A group that the script has begun is kept. The group's rank and size are the job's.

    Raises UnsupportedError on several nodes and in a worker that replaces a lost one, and UsageError where nothing says where
    the workers meet.
    """
    size = environment.world_size()
    if nodes_of_environment() is not None:
        raise UnsupportedError(
            "expected workers of one node, found a launch on several: frameworks that begin a process group train on one node"
            " with fastps; for several nodes write the loop with fastps.DistributedOptimizer (docs/how-to/several-nodes.md)"
        )
    if environment.joins():
        raise UnsupportedError(
            "this worker replaces a lost one, and a process group has a fixed set of members: start the job without --restarts,"
            " and resume from the framework's checkpoint"
        )
    if torch.distributed.is_initialized():
        return size > 1
    if size > 1:
        _register()
        timeout = timedelta(seconds=limits.timeout_s() + _MORE_S)
        torch.distributed.init_process_group(
            BACKEND, store=_store(size, timeout), rank=environment.rank(), world_size=size, timeout=timeout
        )
    return size > 1


def _register() -> None:
    if BACKEND.upper() not in vars(torch.distributed.Backend):
        torch.distributed.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])


def _store(size: int, timeout: timedelta) -> Store:
    """The store in which the workers of this launch meet: the launcher's of torchrun, else one that worker 0 keeps."""
    rank = environment.rank()
    port = os.environ.get(PORT_VARIABLE)
    if port is None and all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT")):
        store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
        return PrefixStore(environment.job_name(0), store)
    if port is None:
        raise UsageError(
            f"expected to know where the {size} workers meet for torch.distributed, found neither {PORT_VARIABLE} nor"
            " MASTER_ADDR and MASTER_PORT: start with `fastps run`, torchrun or `accelerate launch`"
        )
    return TCPStore("127.0.0.1", int(port), size, rank == 0, timeout)
