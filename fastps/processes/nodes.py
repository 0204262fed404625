"""A launcher in a job of several nodes: it finds the other launchers and gives its workers their ranks."""

import contextlib
import json
import os
import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastps.errors import TRY_AGAIN, AttachError, Error, UsageError
from fastps.job import limits
from fastps.job.nodes import address, check_secret
from fastps.job.options import NodePolicy
from fastps.job.secret import VARIABLE as SECRET
from fastps.job.secret import Secret, secret_of_environment
from fastps.network.place import End, Meeting, Place, end_line
from fastps.processes.ending import Ending
from fastps.processes.options import JobOptions
from fastps.processes.outcome import how_it_ended
from fastps.processes.worker_environment import torchrun_variables
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.deadline import Deadline
from fastps.system.processes import die_with_parent

_TICK_S = 0.1
_LEAST_SILENCE_S = 10.0
_SEEN_NS, _LOOK_NS = 10_000_000_000, 200_000_000  # for a checkpoint of node 0 to be seen here, and between two looks
_MOST_RETRIES = 1_000_000


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
    retries: int = 0  # how often the nodes meet again after a loss
    earlier: str = ""  # the job of this launcher's last meeting; "": none

    def __post_init__(self) -> None:
        if self.count < 2:
            raise UsageError(f"--nnodes: expected 2 or more nodes, found {self.count}")
        if not self.rendezvous:
            raise UsageError("--nnodes: expected --rendezvous HOST:PORT beside it, the same on every node; HOST is node 0")
        address(self.rendezvous)
        check_secret(self.policy, self.secret or secret_of_environment())
        if self.rank != "auto" and not (self.rank.isdecimal() and int(self.rank) < self.count):
            raise UsageError(f"--node-rank: expected auto, or 0 to {self.count - 1}, found {self.rank!r}")
        if not 0 <= self.retries <= _MOST_RETRIES:
            raise UsageError(f"--retries: expected 0 to {_MOST_RETRIES:,}, found {self.retries}")

    def check_beside(self, options: JobOptions) -> None:
        """Raise UsageError for options that a job of several nodes does not have."""
        if options.restarts or options.injector is not None:
            raise UsageError(
                "a node ends with a lost worker: expected no --restarts and --inject-faults beside --nnodes; --retries lets all"
                " nodes meet again, or start a lost node by the same command, with --on-node-loss continue on every node"
            )
        if self.retries and options.overwrite:
            raise UsageError(
                "with --retries nodes go on from the newest checkpoint in --checkpoint, which must be their own: expected no"
                " --overwrite beside it; give an empty folder"
            )
        if self.policy.local_steps and (options.checkpoint or options.resume):
            raise UsageError(
                "with --local-steps each node has an optimizer's state of its own, which no checkpoint has: expected no"
                " --checkpoint and --resume beside it; save the model after wait_for_others()"
            )

    @property
    def number(self) -> int:
        """The number that was asked for, or -1."""
        return -1 if self.rank == "auto" else int(self.rank)

    def meeting(self, workers: int, checkpoint: str = "") -> Meeting:
        """What a launcher of so many workers says to the others. `checkpoint` is the one that node 0 resumes."""
        host, port = address(self.rendezvous)
        place = host, port, self.count, workers, self.number
        silence_s = max(_LEAST_SILENCE_S, 2 * self.policy.timeout_s)
        goes_on = self.policy.on_node_loss == "continue"
        return Meeting(
            *place, limits.timeout_s(None), self.interface, self.trusts_network, goes_on, silence_s, self.earlier,
            Path(checkpoint).name,
        )  # fmt: skip


class LaunchRendezvous:
    """The process that finds the other launchers. On node 0 it keeps the rendezvous until `close`."""

    def __init__(self, options: NodeOptions, workers: int, checkpoint: str = "") -> None:
        self.options, self._workers = options, workers
        # Ctrl-C reaches only the launcher.
        how = {"process_group": 0, "preexec_fn": die_with_parent(os.getpid()), "bufsize": 0}  # `_says` sees what is not read
        self._process = options.meeting(workers, checkpoint).start(**how)
        self.process_id = self._process.pid
        self.place = Place(0, 0, workers, "", 0)
        self.has_met = False
        self.loss = ""  # why the job has ended although this node has not, as far as the rendezvous tells

    def wait(self, is_over: Callable[[], bool], on_tick: Callable[[], None]) -> bool:
        """Wait until all nodes are there, and call `on_tick` meanwhile. Returns False if `is_over` becomes true first.

        Raises AttachError, UsageError.
        """
        while not self._says(_TICK_S):
            on_tick()
            if is_over():
                return False
        try:
            self.place, self.has_met = Place.told_by(self._process), True
        except Error:
            if is_over():
                return False
            raise
        return not is_over()

    def _says(self, limit_s: float) -> bool:
        """Whether the process has written something, or has ended."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], limit_s)[0])

    def adopted(self, options: JobOptions) -> JobOptions:
        """With retries, the options with node 0's choice of a checkpoint, which may be newer than this launcher's command.

        Raises AttachError if this node does not see it.
        """
        if not (self.options.retries and self.place.number):
            return options
        if self.place.joins or not self.place.checkpoint:
            return replace(options, resume="")
        folders = [Path(options.checkpoint or "."), Path(options.resume or ".").parent]
        deadline = Deadline(SYSTEM_CLOCK.now_ns(), _SEEN_NS)
        while not deadline.is_over(SYSTEM_CLOCK.now_ns()):
            for folder in folders:
                if (found := folder / self.place.checkpoint).is_dir():
                    return replace(options, resume=str(found))
            SYSTEM_CLOCK.sleep_ns(_LOOK_NS)
        reason = (
            f"node {self.place.number} does not see {self.place.checkpoint}, from which node 0 goes on, in {folders[0]}: give"
            " --checkpoint a folder of a file system that all nodes share"
        )
        self._tell(End(1, reason))
        raise AttachError(reason)

    def has_lost(self) -> bool:
        """Look for a loss: whether there is one that was not there at the last look."""
        if self.loss or not self.has_met:
            return False
        if (code := self._process.poll()) is not None:
            self.loss = f"the rendezvous process of node {self.place.number} (process {self.process_id}) {how_it_ended(code)}"
        elif self._says(0):
            self.loss = str(json.loads(self._read_line()).get("lost", ""))
        return bool(self.loss)

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline() or b"{}"

    def part(self, own: End, ending: Ending, on_tick: Callable[[], None]) -> End:
        """Tell the others how this node ended, and wait for how the job did; call `on_tick` meanwhile.

        Returns this node's own end if nothing that others say changes it, or at a signal of `ending`.
        """
        interrupts = ending.interrupts
        unknown = own if own.code else End(TRY_AGAIN, f"{self.loss or 'the rendezvous was lost'}, before all nodes had ended")
        if not (self.has_met and self._tell(own)):
            return unknown
        while True:
            while not self._says(_TICK_S):
                on_tick()
                if ending.interrupts > interrupts:
                    return own
            told = json.loads(self._read_line())
            if "code" in told:
                return End(told["code"], told["reason"]) if own.code in (0, TRY_AGAIN) else own
            if "lost" not in told:  # the process was killed
                return unknown

    def _tell(self, own: End) -> bool:
        """Tell the process how this node ended. Returns False if the process has ended, too."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(end_line(own)).encode() + b"\n")
            return True
        return False

    def variables(self, local_rank: int, style: str) -> Mapping[str, str]:
        """The variables of one worker of this node, besides those that a worker of one node has."""
        options, place = self.options, self.place
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
