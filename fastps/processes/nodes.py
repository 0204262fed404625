"""A launcher in a job of several nodes: it finds the other launchers and gives its workers their ranks."""

import os
import selectors
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastps.errors import Error, UsageError
from fastps.job import limits
from fastps.job.nodes import address, check_secret
from fastps.job.options import NodePolicy
from fastps.job.secret import VARIABLE as SECRET
from fastps.job.secret import Secret, secret_of_environment
from fastps.network.place import Meeting, Place
from fastps.processes.options import JobOptions
from fastps.processes.worker_environment import torchrun_variables
from fastps.system.processes import die_with_parent

_TICK_S = 0.1


@dataclass(frozen=True)
class NodeOptions:
    """The options of a job of several nodes, as every launcher of it is given them.

    Raises UsageError for values out of range.

    >>> NodeOptions(2, "10.0.0.1:29400").number
    -1
    """

    count: int  # of nodes
    rendezvous: str  # HOST:PORT of node 0, where the nodes find each other
    rank: str = "auto"  # this node's number, or "auto": node 0 on the rendezvous' host, and the others as they come
    policy: NodePolicy = field(default_factory=NodePolicy)
    interface: str = ""  # name or address of this node's to the others; "" for the one that leads to the rendezvous
    trusts_network: bool = False  # whether this node may listen at a public address
    secret: Secret | None = None  # what all nodes know; None: the environment's, if it has one

    def __post_init__(self) -> None:
        if self.count < 2:
            raise UsageError(f"--nnodes: expected 2 or more nodes, found {self.count}")
        if not self.rendezvous:
            raise UsageError("--nnodes: expected --rendezvous HOST:PORT beside it, the same on every node; HOST is node 0")
        address(self.rendezvous)
        check_secret(self.policy, self.secret or secret_of_environment())
        if self.rank != "auto" and not (self.rank.isdecimal() and int(self.rank) < self.count):
            raise UsageError(f"--node-rank: expected auto, or 0 to {self.count - 1}, found {self.rank!r}")

    def check_beside(self, options: JobOptions) -> None:
        """Raise UsageError for options that a job of several nodes does not have."""
        if options.restarts or options.injector is not None:
            raise UsageError(
                "a node ends with a lost worker: expected no --restarts and --inject-faults beside --nnodes; start a lost node"
                " again by the same command, with --on-node-loss continue on every node"
            )
        if self.policy.local_steps and (options.checkpoint or options.resume):
            raise UsageError(
                "with --local-steps each node has an optimizer's state of its own, which no checkpoint has: expected no"
                " --checkpoint and --resume beside it; save the model after wait_for_others()"
            )
        if self.policy.homes == "spread" and self.policy.within != "bsp" and options.checkpoint:
            raise UsageError(
                "with --homes spread the nodes save shares of the same versions, which only --within bsp makes sure of:"
                f" expected no --checkpoint beside --within {self.policy.within}"
            )

    @property
    def number(self) -> int:
        """The number that was asked for, or -1."""
        return -1 if self.rank == "auto" else int(self.rank)

    def meeting(self, workers: int) -> Meeting:
        """What a launcher of so many workers says to the others."""
        host, port = address(self.rendezvous)
        limit_s = limits.timeout_s(None)
        return Meeting(host, port, self.count, workers, self.number, limit_s, self.interface, self.trusts_network)


class LaunchRendezvous:
    """The process that finds the other launchers. On node 0 it keeps the rendezvous until `close`."""

    def __init__(self, options: NodeOptions, workers: int) -> None:
        self._options, self._workers = options, workers
        # Ctrl-C reaches only the launcher.
        self._process = options.meeting(workers).start(process_group=0, preexec_fn=die_with_parent(os.getpid()))
        self.process_id = self._process.pid
        self.place = Place(0, 0, workers, "", 0)

    def wait(self, is_over: Callable[[], bool], on_tick: Callable[[], None]) -> bool:
        """Wait until all nodes are there, and call `on_tick` meanwhile. Returns False if `is_over` becomes true first.

        Raises AttachError, UsageError.
        """
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(_TICK_S):
                on_tick()
                if is_over():
                    return False
        try:
            self.place = Place.told_by(self._process)
        except Error:
            if is_over():
                return False
            raise
        return not is_over()

    def variables(self, local_rank: int, style: str) -> Mapping[str, str]:
        """The variables of one worker of this node, besides those that a worker of one node has."""
        options, place = self._options, self.place
        rank, host = place.first_rank + local_rank, address(options.rendezvous)[0]
        values: dict[str, object] = {
            "FASTPS_RANK": rank,
            "FASTPS_WORKERS": place.world,
            "FASTPS_LOCAL_RANK": local_rank,
            "FASTPS_LOCAL_WORKERS": self._workers,
            "FASTPS_NNODES": options.count,
            "FASTPS_NODE_RANK": place.number,
            "FASTPS_RENDEZVOUS": options.rendezvous,
            "FASTPS_INTERFACE": options.interface,
            "FASTPS_TRUSTED_NETWORK": int(options.trusts_network),
            **options.policy.environment(),
        }
        if options.secret is not None:
            values[SECRET] = options.secret.key.decode()
        if style == "torchrun":
            local = local_rank, self._workers
            values |= torchrun_variables(rank, place.world, *local, place.number, options.count, host, place.port)
            del values["LOCAL_RANK"]  # which goes by the worker's GPU
        return {name: str(value) for name, value in values.items()}

    def close(self) -> None:
        """End the process, and with it the rendezvous."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.kill()
        self._process.wait()
