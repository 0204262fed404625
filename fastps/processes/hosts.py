"""`fastps run --hosts`: the same command on several machines, started over the system's ssh.

Each host runs `fastps run` as one node, in the same folder and with the same Python. Its output comes back with the host's name
before each line. The first line of standard input has the variables of fastps: every user of a machine can read a process's
arguments, and the job's secret is among the variables. Each other line is a signal's number. The input stays open for as long
as the job may run: its end tells a host to stop.
"""

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

from fastps.errors import TRY_AGAIN, UsageError
from fastps.processes.ending import Ending
from fastps.processes.options import GRACE_S
from fastps.processes.output_thread import StandardStreams
from fastps.processes.worker_output import Lines
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.processes import name_of_signal, start_child

SSH = "ssh -o BatchMode=yes"
DEFAULT_PORT = 29400
_TICK_S = 0.1
_PAUSE_NS = 1_000_000  # until the next try to pass on output, while this process's own reader is slow
_SURVIVORS_S = 5.0  # for the other nodes to notice the loss and to name it
_BEYOND_GRACE_S = 10.0  # for a host's launcher to end after its workers' grace
_SSH_FAILED = 255


@dataclass(frozen=True)
class HostsOptions:
    """Where and how to start nodes. Raises UsageError for fewer than two hosts, or an empty command."""

    hosts: tuple[str, ...]  # what ssh is given for each node, in the order of their numbers
    ssh: tuple[str, ...]  # the command that gets a host and a command line, as ssh does
    grace_s: float = GRACE_S  # how long workers may take to end

    def __post_init__(self) -> None:
        if len(self.hosts) < 2 or not all(self.hosts):
            raise UsageError(f"--hosts: expected two or more hosts such as node0,node1, found {','.join(self.hosts)!r}")
        if any(host.startswith("-") for host in self.hosts):
            raise UsageError(
                f"--hosts: expected names of hosts, found {','.join(self.hosts)!r}: ssh would take it as an option"
            )
        if not self.ssh:
            raise UsageError("--ssh-command (FASTPS_SSH): expected a command, found an empty one")

    @staticmethod
    def of(hosts: str, ssh: str, grace_s: float = GRACE_S) -> "HostsOptions":
        """The options from a list with commas, and a command line of the shell; "" for ssh's own."""
        try:
            command = tuple(shlex.split(ssh or SSH))
        except ValueError as error:
            raise UsageError(
                f"--ssh-command (FASTPS_SSH): expected a command line of the shell, found {ssh!r} ({error})"
            ) from None
        return HostsOptions(tuple(host.strip() for host in hosts.split(",")), command, grace_s)

    @property
    def rendezvous(self) -> str:
        """The rendezvous by default: the first host, without the user's name."""
        host = self.hosts[0].rpartition("@")[2]
        return f"[{host}]:{DEFAULT_PORT}" if ":" in host else f"{host}:{DEFAULT_PORT}"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """What starts a node: ssh, its host, and the command line for the host's shell.

        >>> HostsOptions(("a", "b"), ("ssh",)).command(1, ["train.py"])[:2]
        ['ssh', 'b']
        """
        nodes = ["--nnodes", str(len(self.hosts)), "--node-rank", str(node), "--rendezvous", self.rendezvous]
        run = [sys.executable, "-m", "fastps", "run", *nodes, *arguments]
        limit_s = str(self.grace_s + _BEYOND_GRACE_S)
        watched = [sys.executable, "-m", "fastps.processes.on_host", limit_s, *run]
        return [*self.ssh, self.hosts[node], f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(watched)}"]


def variables_line(variables: Mapping[str, str]) -> bytes:
    """The line that a host reads first: the variables of fastps, as JSON.

    >>> variables_line({"FASTPS_SYNC": "asp", "HOME": "/root"})
    b'{"FASTPS_SYNC": "asp"}\\n'
    """
    return json.dumps({name: value for name, value in variables.items() if name.startswith("FASTPS_")}).encode() + b"\n"


@dataclass
class _Host:
    host: str
    process: "subprocess.Popen[bytes]"
    last: str = ""
    exit_code: int | None = None
    replaced_ns: int = 0

    @property
    def name(self) -> str:
        return f"host {self.host}"

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on to the host. The first SIGKILL tells it to stop at once, and the next ends ssh."""
        if number != signal.SIGKILL:
            self.tell(b"%d\n" % number)
        elif not self.tell_end():
            self.process.kill()

    def tell(self, line: bytes) -> int:
        """Write a line to standard input. Returns how much of it the pipe took: ssh may read it much later."""
        if self.process.stdin is None or self.process.stdin.closed:
            return 0
        os.set_blocking(self.process.stdin.fileno(), False)
        try:
            return os.write(self.process.stdin.fileno(), line)
        except BlockingIOError:
            return 0
        except BrokenPipeError:  # ssh has ended, which its exit code tells
            return len(line)

    def tell_variables(self) -> None:
        """Write the first line. Raises UsageError if the pipe does not hold it."""
        line = variables_line(os.environ)
        written = self.tell(line)
        if written < len(line):
            raise UsageError(
                f"--hosts: expected the variables that begin with FASTPS_ to take at most {written} bytes, found {len(line)}:"
                " unset what the job does not need"
            )

    def tell_end(self) -> bool:
        """End standard input, which tells the host to stop. Returns False if it has ended already."""
        if self.process.stdin is None or self.process.stdin.closed:
            return False
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return True


class HostsLauncher:
    """Runs one node on each host. When `run` returns, every ssh has ended."""

    def __init__(self, options: HostsOptions, arguments: Sequence[str], clock: Clock = SYSTEM_CLOCK) -> None:
        """`arguments` are those of `fastps run`."""
        self._options, self._arguments = options, list(arguments)
        self._clock = clock
        self._hosts: list[_Host] = []
        self._selector = selectors.DefaultSelector()
        self._streams: StandardStreams  # of the time when `run` is called
        self._ending = Ending(self._hosts, options.grace_s + 2 * _BEYOND_GRACE_S, clock, _SURVIVORS_S)
        self.failure = ""

    def run(self) -> int:
        """Start all nodes and wait for them. Returns the exit code: 0, 1, 2 for wrong usage, or 128 + a signal's number."""
        code = 0
        self._streams = StandardStreams()
        with self._ending.listening(), self._streams.carrying_logs(lambda: self._ending.interrupts > 0):
            try:
                for node in range(len(self._options.hosts)):
                    self._start(node)
                while any(host.exit_code is None for host in self._hosts):
                    for key, _ in self._selector.select(_TICK_S):
                        self._pass_on(key)
                    found = self._look()
                    code = code or found
            finally:
                self._kill_all()
                self._selector.close()
        return 128 + self._ending.number if self._ending.number else code

    def _start(self, node: int) -> None:
        command = self._options.command(node, self._arguments)
        name = self._options.hosts[node]
        try:
            process = start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            raise UsageError(
                f"--hosts: expected the command {command[0]!r} to run ({error.strerror}): install OpenSSH's client, or give"
                " another with --ssh-command (FASTPS_SSH)"
            ) from error
        host = _Host(name, process)
        self._hosts.append(host)
        host.tell_variables()
        for stream, sink in ((process.stdout, self._streams.out), (process.stderr, self._streams.err)):
            pipe = cast("IO[bytes]", stream)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (host, sink, Lines()))

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        host, sink, cut = key.data
        if self._streams.thread_of(sink).is_slow and not self._ending.interrupts:
            self._clock.sleep_ns(_PAUSE_NS)
            return
        data = os.read(key.fd, 65536)
        for line in cut.feed(data) if data else cut.rest():
            text = line.decode("utf-8", "surrogateescape").rstrip("\r\n")
            if text.strip():
                host.last = line.decode("utf-8", "replace").strip() if sink is self._streams.err else host.last
                self._streams.thread_of(sink).put(partial(sink.write, f"{host.host} {text}\n"), sink, len(line))
        if not data:
            self._selector.unregister(key.fileobj)
            cast("IO[bytes]", key.fileobj).close()

    def _look(self) -> int:
        """Notice hosts that have ended, and end the others after a failure. Returns the code of the first failure, or 0."""
        code = 0
        still_read = [key.data[0] for key in self._selector.get_map().values()]
        for host in self._hosts:
            if host.exit_code is None and host.process.poll() is not None and host not in still_read:
                host.exit_code = host.process.wait()
                if host.exit_code and not self.failure:
                    self.failure = self._described(host)
                    code = host.exit_code if host.exit_code in (1, 2, TRY_AGAIN) else 1
                    self._ending.begin()
        self._ending.obey()
        return code

    def _described(self, host: _Host) -> str:
        code = host.exit_code or 0
        if code == _SSH_FAILED:
            tried = shlex.join([*self._options.ssh, host.host, "true"])
            return (
                f"{host.host}: ssh could not run the command there ({host.last or 'it gave no reason'}): expected `{tried}` to"
                " work without a question; check the host's name and the keys"
            )
        ending = f"exit code {code}" if code > 0 else f"its ssh ended by {name_of_signal(-code)}"
        return f"{host.host}: {ending}: see its output above"

    def _kill_all(self) -> None:
        for host in self._hosts:
            host.tell_end()
            if host.exit_code is None:
                host.process.kill()
                host.exit_code = host.process.wait()
        for key in self._selector.get_map().values():
            cast("IO[bytes]", key.fileobj).close()
