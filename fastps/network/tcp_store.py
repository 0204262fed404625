"""The store of torch.distributed at a rendezvous: kept by this process, or waited for and connected to.

A wait for node 0's name, which a pod of a Kubernetes job gets as it starts, or for its port prints now and then what it waits
for. Later on, a port of each agent tells the end of its process from a lost connection.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from fastps.errors import AttachError, UsageError
from fastps.network.link import LinkLostError, RefusedError, UnreachableError, reason_of
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.deadline import Deadline

_NAME_POLL_NS, _ANSWER_POLL_NS = 500_000_000, 50_000_000
_PROGRESS_NS = 10_000_000_000
_CONNECT_S = 5.0


def host_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Keep the store of a rendezvous for as long as the result lives; port 0: any. Raises UsageError if the port is taken."""
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise UsageError(
            f"node 0 cannot listen on port {port}: {reason_of(error)}; end what uses the port, or give another"
        ) from error


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """A connection to the store at the rendezvous. Raises AttachError if nothing answers within the timeout."""
    limit = timedelta(seconds=timeout_s)
    reason = await_answer(host, port, timeout_s)  # torch waits longer and longer between two tries
    if not reason:
        try:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            reason = reason_of(error)
    raise AttachError(
        f"no rendezvous answered at {host}:{port} within {timeout_s:g} s ({reason}): start node 0 there, and check the name,"
        " the port and the firewall"
    )


def check_answers(host: str, port: int, timeout_s: float) -> None:
    """Check that something listens. Raises UnreachableError if no answer comes, RefusedError if nothing listens."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError as error:
        raise RefusedError(f"nothing listens at {host}:{port} any more") from error
    except OSError as error:
        raise UnreachableError(f"{host}:{port} did not answer: {error}") from error


def limit_name_lookups() -> None:
    """Let this process wait for a name server for a second at most. Call it before the first lookup.

    torch's store looks up the name of every client, and answers nobody meanwhile. Under glibc's defaults a name server that
    does not answer would stop it for 10 s, longer than a lost edge may take to open again.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def await_name(host: str, timeout_s: float) -> None:
    """Wait until a host's name has an address. Raises AttachError.

    >>> await_name("127.0.0.1", 1.0)
    """
    if reason := _why_not(lambda: socket.getaddrinfo(host, 0), f"an address of {host}", timeout_s, _NAME_POLL_NS):
        raise AttachError(
            f"no address was known for {host} within {timeout_s:g} s ({reason}): expected the name of node 0; check it, and"
            " in Kubernetes the headless service of the job and its subdomain"
        )


def await_answer(host: str, port: int, timeout_s: float) -> str:
    """Wait until something accepts connections at a port. Returns "", or the reason of the last try after the timeout."""
    return _why_not(
        lambda: socket.create_connection((host, port), _CONNECT_S).close(),
        f"the rendezvous at {host}:{port}", timeout_s, _ANSWER_POLL_NS,
    )  # fmt: skip


def _why_not(call: Callable[[], object], what: str, timeout_s: float, poll_ns: int) -> str:
    """Call until that raises no OSError. Returns "", or the reason of the last try after the timeout."""
    clock = SYSTEM_CLOCK
    told_ns = clock.now_ns()
    deadline = Deadline(told_ns, int(timeout_s * 1e9))
    while True:
        try:
            call()
            return ""
        except OSError as error:
            reason = error.strerror or str(error)
        now_ns = clock.now_ns()
        if now_ns - told_ns >= _PROGRESS_NS:
            told_ns = now_ns
            print(f"fastps: waiting for {what} ({reason})", file=sys.stderr, flush=True)
        if deadline.is_over(now_ns):
            return reason
        clock.sleep_ns(poll_ns)


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
        check_answers(host, port, timeout_s)
    except LinkLostError as error:
        return isinstance(error, RefusedError)
    return False
