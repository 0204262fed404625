"""The Gloo group of a Trainer's workers, beside the store: metrics, barriers and broadcasts go through it, gradients do not.

The workers meet at an abstract socket that the job names, where worker 0 tells the port of the group's store: no port is agreed
on before, and nothing stays in a file system. A wait for a collective is sliced: between slices the worker tends its jobs, so
it folds for the others, notices a death, and lets Python run signal handlers.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from fastps.errors import TimeoutExceededError, UsageError, WorkerDiedError
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline

_NUMBER = struct.Struct("=I")
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group
_POLL_S = 0.05
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 20_000, 2_000_000


def join(job: str, rank: int, workers: int, limit_s: float, look: Callable[[], None], clock: Clock = SYSTEM_CLOCK) -> None:
    """Make torch's default process group of all workers, over Gloo, unless the program has made one. One worker needs none.

    `limit_s` is the longest wait, also of the group's collectives. `look` raises an error if worker 0 need not wait any longer.

    Raises UsageError for a group of another size,
    TimeoutExceededError if a worker does not come.
    """
    if dist.is_initialized():
        found = dist.get_rank(), dist.get_world_size()
        if found != (rank, workers):
            raise UsageError(
                f"the program's process group says worker {found[0]} of {found[1]}: expected {rank} of {workers}, as the"
                " launcher says; leave init_process_group out, because the strategy calls it"
            )
        return
    if workers == 1:
        return
    store = _meet(job, rank, workers, look, clock, limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=limit_s))


def _meet(job: str, rank: int, workers: int, look: Callable[[], None], clock: Clock, limit_s: float) -> Store:
    """The store in which the workers' group begins; worker 0 keeps it."""
    deadline = Deadline(clock.now_ns(), int(limit_s * 1e9))
    name = f"\0fastps-trainer/{job}"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
        _tell(name, store.port, workers, look, clock, deadline, limit_s)
        return store
    port = None
    while port is None:
        port = _ask(name, rank)
        if port is None:
            if deadline.is_over(clock.now_ns()):
                raise TimeoutExceededError(f"worker {rank} waited {limit_s:g} s for worker 0 to begin; see its output")
            clock.sleep_ns(int(_POLL_S * 1e9))
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=limit_s))


def _tell(
    name: str, port: int, workers: int, look: Callable[[], None], clock: Clock, deadline: Deadline, limit_s: float
) -> None:
    """Tell every other worker the port, once it asks."""
    missing = set(range(1, workers))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(name)
        listening.listen(workers)
        listening.settimeout(_POLL_S)
        while missing:
            look()
            with contextlib.suppress(TimeoutError, ConnectionError, struct.error):
                asking = listening.accept()[0]
                with asking:
                    if not _is_own_users(asking):
                        continue
                    asking.settimeout(1.0)
                    number = _NUMBER.unpack(asking.recv(_NUMBER.size))[0]
                    asking.sendall(_NUMBER.pack(port))
                    missing.discard(number)
            if missing and deadline.is_over(clock.now_ns()):
                names = ", ".join(f"worker {number}" for number in sorted(missing))
                raise TimeoutExceededError(
                    f"worker 0 waited {limit_s:g} s for {names} to reach the Trainer's fit, validate, test or predict;"
                    " raise FASTPS_TIMEOUT if they are only slow"
                )


def _is_own_users(connected: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user: the names of abstract sockets are open to all."""
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _ask(name: str, rank: int) -> int | None:
    """The port that worker 0 tells; None if it is not there yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(name)
            if not _is_own_users(asking):
                return None
            asking.sendall(_NUMBER.pack(rank))
            return int(_NUMBER.unpack(asking.recv(_NUMBER.size))[0])
        except (OSError, struct.error):
            return None


def finish(work: Any, what: str, limit_s: float, tend: Callable[[], None], clock: Clock = SYSTEM_CLOCK) -> None:
    """Wait until a collective is done, and call `tend` meanwhile. `what` names it in errors.

    Raises TimeoutExceededError; WorkerDiedError, with -1 for the worker, if another process has gone; and what `tend` raises.
    """
    pause_ns = _FIRST_PAUSE_NS
    deadline = Deadline(clock.now_ns(), int(limit_s * 1e9))
    while not work.is_completed():
        tend()
        if deadline.is_over(clock.now_ns()):
            raise TimeoutExceededError(
                f"worker {dist.get_rank()} waited {limit_s:g} s in {what}: expected every worker to come here, found that one"
                " has not; call it in all workers alike, or raise FASTPS_TIMEOUT if one is only slow"
            )
        clock.sleep_ns(pause_ns)
        pause_ns = min(2 * pause_ns, _LONGEST_PAUSE_NS)
    try:
        work.wait()
    except RuntimeError as error:
        raise lost(what) from error


def lost(what: str) -> WorkerDiedError:
    """The error for a process that has gone while this one waited for it in a collective."""
    return WorkerDiedError(
        f"another worker ended while worker {dist.get_rank()} waited in {what}: expected all {dist.get_world_size()} workers,"
        " found a closed connection; see the other workers' output for the reason",
        -1,
    )


def is_from_gloo(error: BaseException) -> bool:
    """Whether an error says that a collective of torch failed."""
    return isinstance(error, RuntimeError) and ("gloo" in str(error).lower() or isinstance(error, dist.DistError))


def reduced(tensor: torch.Tensor, group: Any, operation: Any, wait: Callable[[Any, str], None]) -> torch.Tensor:
    """Reduce a tensor in place over the group. `operation` is a ReduceOp, or its name; "mean" and "avg" are the mean."""
    is_mean = isinstance(operation, str) and operation.lower() in ("mean", "avg")
    if isinstance(operation, str):
        operation = dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, operation.upper())
    wait(dist.all_reduce(tensor, op=operation or dist.ReduceOp.SUM, group=group, async_op=True), "a reduction")
    if not is_mean:
        return tensor
    count = dist.get_world_size(group)
    return tensor.div_(count) if tensor.is_floating_point() else tensor.copy_(tensor / count)


def gathered(tensor: torch.Tensor, group: Any, wait: Callable[[Any, str], None]) -> torch.Tensor:
    """The tensors of all workers, stacked in the order of their ranks."""
    own = tensor.detach().contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    wait(dist.all_gather(found, own, group=group, async_op=True), "all_gather")
    return torch.stack(found)
