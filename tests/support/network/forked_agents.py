"""Agents of nodes without the seconds in which Python imports torch: a worker of a test forks the agent of its node.

The agent has the descriptors, session, signals and output of one that runs as `python -m fastps.network.agent`. Jobs that
`fastps run` launches have such agents.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from fastps.network import agent
from fastps.store import server_process
from fastps.system.processes import AdoptedProcess, start_module

NAME = "fastps-agent-"  # with the node's number, the name that the kernel has for the process
_PR_SET_NAME = 15


class ForkedAgent(AdoptedProcess):
    """A forked agent, with the methods that a store calls of `subprocess.Popen`."""

    def __init__(self, process_id: int, stdin: IO[bytes]) -> None:
        super().__init__(process_id)
        self.stdin = stdin

    def poll(self) -> int | None:
        """The exit code, or None while the agent runs."""
        if self.returncode is None:
            process_id, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if process_id else None
        return self.returncode

    def wait(self, timeout: None = None) -> int:
        """Wait until it ends."""
        return super().wait()

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_agents() -> None:
    """Let this process fork the agents that it starts."""
    server_process.start_module = _start  # type: ignore[assignment]


def _start(module: str, *arguments: str, pass_fds: Sequence[int] = (), **how: Any) -> Any:
    if module != agent.__name__:
        return start_module(module, *arguments, pass_fds=pass_fds, **how)
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id:
        os.close(reader)
        return ForkedAgent(process_id, os.fdopen(writer, "wb"))
    code = 1
    try:
        _become_agent(reader, pass_fds)
        code = agent.main()
        logging.shutdown()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _become_agent(stdin: int, inherited: Sequence[int]) -> None:
    """Keep of the worker what a new process would have of it."""
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in inherited:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(descriptor)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    logging.root.handlers.clear()
    name = NAME + os.environ["FASTPS_NODE_RANK"]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
