"""The server process, from the side of the process that creates the store and starts the server.

The server runs in its own session. It inherits the arena's memory and reads the rest from its standard input. It begins to
serve before any worker can join, and exits by itself when no worker is left; the process that started it reaps it. That process
does not kill the server while a worker is attached.
"""

import contextlib
import os
import pickle
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastps.errors import AttachError, Error, NodeLostError
from fastps.job.layout import Layout
from fastps.job.update_rules import Rule
from fastps.membership.job_memory import JobMemory
from fastps.membership.peers import WORKER_PRESENT
from fastps.system.processes import start_module
from fastps.tracing.recorder import folder_of_next

_POLL_NS = 1_000_000
_END_S = 5.0  # a server without workers exits within milliseconds; a stopped one would never exit
_START_S = 60.0  # importing numpy takes long on a busy machine; the timeout of waits may be shorter


@dataclass(frozen=True)
class ServerPlan:
    """A server that is told more: a node's agent, or one that runs an optimizer. `module` is run."""

    module: str
    order: Any  # its own part of the order, which must pickle
    inherited: tuple[int, ...] = ()  # descriptors that stay open for as long as the agent lives


@dataclass(frozen=True)
class DevicePlan:
    """What a server that owns memory on devices is told besides."""

    make: Callable[[], list[Any]]  # makes its devices, one for each GPU of the job; must pickle
    first: int  # the descriptor of the first version, which the server inherits
    is_resumed: bool  # whether that comes from a checkpoint


@dataclass(frozen=True)
class Order:
    """The message that starts a server."""

    job: str
    layout: Layout
    timeout_s: float
    memfd: int  # the arena, under the same descriptor number in the server
    rule: bytes  # a user rule, pickled by value; empty for a built-in rule
    devices: DevicePlan | None  # for a job whose shards lie on devices that the server owns
    more: Any = None  # the order of a ServerPlan; None for a plain server
    trace: str = ""  # the folder in which the job is recorded, or ""


# What an agent ends with that says all itself.
_OF_NODES: dict[str, type[Error]] = {kind.__name__: kind for kind in (NodeLostError, AttachError)}


class ServerProcess:
    """A server that this process started. In a forked child the object does nothing."""

    def __init__(self, store: JobMemory, devices: DevicePlan | None = None, plan: ServerPlan | None = None) -> None:
        """Start the server and wait until it serves. Call `begin` once the store answers.

        Raises AttachError, and NodeLostError where a node was lost before the agent served.

        An agent serves once the nodes have met, for which it has the job's timeout; it ends when all nodes have left.
        """
        self._parent = os.getpid()
        self._is_agent = store.layout.has_agent
        layout, rule = picklable(store.layout)
        module, inherited, start_s = "fastps.processes.server", [store.descriptor], _START_S
        if plan is not None:
            module, inherited, start_s = plan.module, [*inherited, *plan.inherited], _START_S + store.timeout_s
        if devices is not None:
            inherited.append(devices.first)
        trace = folder_of_next(store) if not self._is_agent else ""
        order = Order(store.job, layout, store.timeout_s, store.descriptor, rule, devices, plan and plan.order, trace)
        # In a session of its own: Ctrl-C and SIGHUP must reach only the workers.
        self._process = start_module(module, stdout=subprocess.DEVNULL, pass_fds=inherited, start_new_session=True)
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the server has exited; the wait below reports that
                pickle.dump(order, self._process.stdin)
                self._process.stdin.flush()
            self._await_serving(store, start_s)
        except BaseException:
            self._process.kill()
            self.begin()
            self._process.wait()
            raise

    def _await_serving(self, store: JobMemory, start_s: float) -> None:
        deadline_ns = store.clock.now_ns() + int(start_s * 1e9)
        while not store.arena.is_served():
            ended = self._process.poll()
            if ended is not None or store.clock.now_ns() >= deadline_ns:
                if reason := store.arena.failure(store.arena.server_lane):
                    kind, _, text = reason.partition(": ")
                    raise _OF_NODES[kind](text) if kind in _OF_NODES else AttachError(f"job {store.job}: {reason}")
                if self._is_agent and ended is not None and ended < 0:
                    raise NodeLostError(f"this node's agent (process {self._process.pid}) was killed before it served")
                found = "none" if ended is None else f"that it ended with exit code {ended}"
                raise AttachError(
                    f"job {store.job}: expected a server process within {start_s:g} s, found {found}: see its own output, or"
                    " use server='workers'"
                )
            store.clock.sleep_ns(_POLL_NS)

    @property
    def process_id(self) -> int:
        """The server's process id."""
        return self._process.pid

    def begin(self) -> None:
        """Allow the server to exit, from now on, when no worker is attached and the store no longer answers."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def let_go(self, lane_states: bytes) -> None:
        """Wait for the server's end after the store is closed; if workers are left, in a thread. May be called twice."""
        if os.getpid() != self._parent or self._process.returncode is not None:
            return
        self.begin()
        if any(state in WORKER_PRESENT for state in lane_states):
            threading.Thread(target=self._process.wait, name="fastps-reaper", daemon=True).start()
            return
        try:
            self._process.wait(None if self._is_agent else _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def picklable(layout: Layout) -> tuple[Layout, bytes]:
    """The layout with a rule that is plain data, and the pickled source of a user rule; b"" for a built-in rule."""
    rule = layout.rule
    if not rule.address:
        return layout, b""
    from numba import cloudpickle

    from fastps.job.user_rules import UserRule

    assert isinstance(rule, UserRule)
    plain = Rule(rule.name, rule.number, rule.planes, rule.initial, rule.digest)
    source = rule.function, len(rule.planes), len(rule.hyper_names), rule.takes_step, rule.terms, rule.sums
    return replace(layout, rule=plain), bytes(cloudpickle.dumps(source))  # type: ignore[no-untyped-call]
