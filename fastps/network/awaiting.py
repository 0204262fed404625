"""Waits for node 0 to appear: for its name, which a pod of a Kubernetes job gets as it starts, and for its rendezvous.

Both print now and then what they wait for. Later on, a port of each agent tells the end of its process from a lost connection.
"""

import contextlib
import socket
import sys
import threading

from fastps.errors import AttachError
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline

_NAME_POLL_NS, _ANSWER_POLL_NS = 500_000_000, 50_000_000
_PROGRESS_NS = 10_000_000_000
_CONNECT_S = 5.0


def await_name(host: str, timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
    """Wait until a host's name has an address. Raises AttachError.

    >>> await_name("127.0.0.1", 1.0)
    """
    wait = _Wait(timeout_s, clock)
    while reason := _why_unknown(host):
        if wait.is_over(f"for an address of {host} ({reason})"):
            raise AttachError(
                f"no address was known for {host} within {timeout_s:g} s ({reason}): expected the name of node 0; check it, and"
                " in Kubernetes the headless service of the job and its subdomain"
            )
        clock.sleep_ns(_NAME_POLL_NS)


def await_answer(host: str, port: int, timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> str:
    """Wait until something accepts connections at a port. Returns "", or the reason of the last try after the timeout."""
    wait = _Wait(timeout_s, clock)
    while reason := _why_unreachable(host, port):
        if wait.is_over(f"for the rendezvous at {host}:{port} ({reason})"):
            return reason
        clock.sleep_ns(_ANSWER_POLL_NS)
    return ""


class OpenPort:
    """A port at which this process takes connections and closes them, until it ends.

    >>> port = OpenPort("127.0.0.1")
    >>> is_refused("127.0.0.1", port.number, 1.0)
    False
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.number = int(self._socket.getsockname()[1])
        threading.Thread(target=self._take, name="fastps-open-port", daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # the socket was closed
            while True:
                self._socket.accept()[0].close()


def is_refused(host: str, port: int, timeout_s: float) -> bool:
    """Whether a machine says that no process listens at a port. No answer is no refusal."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class _Wait:
    """A wait that prints its purpose now and then."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._clock = clock
        self._told_ns = clock.now_ns()
        self._deadline = Deadline(self._told_ns, int(timeout_s * 1e9))

    def is_over(self, purpose: str) -> bool:
        """Whether the timeout has passed."""
        now_ns = self._clock.now_ns()
        if now_ns - self._told_ns >= _PROGRESS_NS:
            self._told_ns = now_ns
            print(f"fastps: waiting {purpose}", file=sys.stderr, flush=True)
        return self._deadline.is_over(now_ns)


def _why_unknown(host: str) -> str:
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        return ""
    except socket.gaierror as error:
        return error.strerror or str(error)


def _why_unreachable(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
        return ""
    except OSError as error:
        return error.strerror or str(error)
