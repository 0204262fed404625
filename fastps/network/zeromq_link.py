"""Links over ZeroMQ, encrypted by CURVE: Curve25519, XSalsa20 and Poly1305, by libsodium.

Each link has a pair of sockets of its own and new keys. The sides exchange their public keys and the endpoint through the
store at the rendezvous; the job's secret authenticates them, so nobody else can put a key there. The listening side accepts
only the key that it expects. It must go on to listen, because libzmq ends a connection with the listener that accepted it.

ZeroMQ's own heartbeats stay off: libzmq 4.3.5 aborts the process when one is due on a connection that has ended while messages
of it wait to be read. Agents send beats of their own.

A ZeroMQ socket belongs to one thread. So each link has a thread, which takes sends and receives from queues.
"""

import contextlib
import json
import os
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from fastps.errors import UnsupportedError, UsageError
from fastps.job.secret import HOW_TO_GIVE, Secret
from fastps.network.link import LinkLostError, Memory, TimedOutError, reason_of
from fastps.network.secret import are_equal, mac
from fastps.system.extras import how_to_install

try:
    import zmq
    from zmq.utils import z85
    from zmq.utils.monitor import parse_monitor_message
except ImportError:
    zmq = None  # type: ignore[assignment]

QUEUED = 8  # messages at each side at the most
LINGER_MS = 500  # what an orderly end may take to send the last message
_CURVE_BYTES = 1024  # more than CURVE adds to a message
_GREETING = b"fastps"
_GRACE_MS = 50  # the last messages may be reported after the end of the connection
_JOIN_S = 2.0
_NEVER_MS = 3_600_000  # -1 would drop the messages that came just before the end of the connection
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"fastps"


class Transfer:
    """A send or a receive under way."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.ended = threading.Event()
        self.tracker: Any = None  # of a send that reads the memory directly
        self.error = ""


class ZeromqLink:
    """A link whose two sides meet under a name in a store. `side` is 0 or 1; side 0 listens.

    A peer whose message has more than `largest` bytes is disconnected before this side has memory for it. Raises LinkLostError
    if the other side does not come within the timeout, or does not know the secret, UnsupportedError without pyzmq, and
    UsageError without a secret.
    """

    def __init__(
        self, store: Store, name: str, side: int, address: str, timeout_s: float, *, secret: Secret | None, largest: int
    ) -> None:
        check_installed()
        if secret is None:
            raise UsageError("expected a secret for encrypted links, found none: give FASTPS_SECRET or --secret-file")
        self._name = name
        self._sends: deque[Transfer] = deque()
        self._receives: deque[Transfer] = deque()
        self._lock = threading.Lock()
        self._closes = False
        self._loss = ""
        self._call = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = threading.Event()
        self._context = zmq.Context()
        try:
            self._open_sockets(address, largest, timeout_s)
            self._meet(store, side, address, timeout_s, secret)
        except BaseException as error:
            self._context.destroy(linger=0)
            os.close(self._call)
            if isinstance(error, zmq.ZMQError | RuntimeError):
                raise LinkLostError(f"link {name}: {reason_of(error)}") from error
            raise
        self._thread = threading.Thread(target=self._run, args=(side,), name="fastps-zeromq", daemon=True)
        self._thread.start()
        if not self._is_open.wait(timeout_s):
            self._lose(f"expected the other node at {address} within {timeout_s:g} s")
        if self._loss:
            self.close()
            raise LinkLostError(f"link {name}: {self._loss}")

    def _open_sockets(self, address: str, largest: int, timeout_s: float) -> None:
        self._socket: Any = self._context.socket(zmq.PAIR)
        for option, value in {
            zmq.SNDHWM: QUEUED, zmq.RCVHWM: QUEUED, zmq.LINGER: 0, zmq.IPV6: ":" in address, zmq.RECONNECT_IVL: _NEVER_MS,
            zmq.MAXMSGSIZE: largest + _CURVE_BYTES, zmq.HANDSHAKE_IVL: int(1000 * min(timeout_s, 10.0)),
        }.items():  # fmt: skip
            self._socket.setsockopt(option, value)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED
        self._monitor = self._socket.get_monitor_socket(events)
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP)

    def _meet(self, store: Store, side: int, address: str, timeout_s: float, secret: Secret) -> None:
        """Exchange keys and the endpoint with the other side, and listen or connect."""
        socket = self._socket
        public, own_secret = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey = public, own_secret
        endpoint = ""
        if side == 0:
            socket.curve_server = True
            socket.zap_domain = _DOMAIN
            socket.bind(f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0")
            endpoint = socket.last_endpoint.decode()
        keys = [f"{self._name}/{each}" for each in (side, 1 - side)]
        words = public.decode(), endpoint
        store.set(keys[0], json.dumps([*words, mac(secret, "key", keys[0], *words)]))
        store.wait([keys[1]], timedelta(seconds=timeout_s))
        key, there = _authentic(store.get(keys[1]), keys[1], secret)
        self._peer_key = z85.decode(key)
        if side == 1:
            socket.curve_serverkey = key
            socket.connect(there)

    def send(self, memory: Memory) -> Transfer:
        return self._begin(self._sends, memory)

    def receive(self, memory: Memory) -> Transfer:
        return self._begin(self._receives, memory)

    def _begin(self, queue: deque[Transfer], memory: Memory) -> Transfer:
        transfer = Transfer(memory)
        with self._lock:
            if self._closes:
                raise LinkLostError(self._loss or "the link is closed")
            queue.append(transfer)
            os.eventfd_write(self._call, 1)
        return transfer

    def wait(self, transfer: Transfer, timeout_s: float) -> None:
        if not transfer.ended.wait(timeout_s):
            self._fail(f"a transfer took longer than {timeout_s:g} s")
        if transfer.tracker is not None and not transfer.error:
            try:
                transfer.tracker.wait(timeout_s)
            except zmq.NotDone:
                self._fail(f"a transfer took longer than {timeout_s:g} s")
            if self._loss:  # the message may have been dropped
                transfer.error = self._loss
        if transfer.error:
            self.close()
            raise LinkLostError(transfer.error)

    def _fail(self, reason: str) -> None:
        self._lose(reason)
        self.close()
        raise TimedOutError(reason)

    def close(self) -> None:
        """See Link. What was sent before still leaves, unless the link is lost or a send is under way."""
        with self._lock:
            if not self._closes:
                self._closes = True
                os.eventfd_write(self._call, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._loss = self._loss or reason

    def _run(self, side: int) -> None:
        try:
            self._open(side)
            self._serve()
        except (zmq.ZMQError, LinkLostError) as error:
            self._lose(str(error))
        except Exception as error:  # a mistake in this program must not leave the other threads waiting
            self._lose(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._closes = True
                under_way = [*self._sends, *self._receives]
                is_orderly = not self._loss and not self._sends
                os.close(self._call)
            for transfer in under_way:
                transfer.error = self._loss or "the link is closed"
                transfer.ended.set()
            self._is_open.set()
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._context.destroy(linger=LINGER_MS if is_orderly else 0)

    def _open(self, side: int) -> None:
        poller = self._poller(zmq.POLLIN if side == 0 else 0)
        is_greeted = False
        while not is_greeted and not (self._closes or self._loss):
            ready = dict(poller.poll(100))
            if self._zap in ready:
                self._authenticate()
            if self._monitor in ready:
                event, _ = self._event()
                if side == 1:
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        self._socket.send(_GREETING)
                        is_greeted = True
                    elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                        raise LinkLostError("the other side refused the connection")
            if side == 0 and self._socket in ready:
                frame = self._socket.recv(copy=False)
                if bytes(frame.buffer) != _GREETING:
                    raise LinkLostError(f"expected a greeting, found {len(frame)} other bytes")
                self._descriptor = int(frame.get("__fd"))
                is_greeted = True
        if is_greeted:
            self._is_open.set()

    def _serve(self) -> None:
        wants, poller = -1, zmq.Poller()
        while not (self._closes or self._loss):
            now_wants = (zmq.POLLIN if self._receives else 0) | (zmq.POLLOUT if self._sends else 0)
            if now_wants != wants:
                wants, poller = now_wants, self._poller(now_wants)
            ready = dict(poller.poll())
            if self._call in ready:
                self._take_call()
            if self._zap in ready:
                self._authenticate()
            found = ready.get(self._socket, 0)
            if found & zmq.POLLOUT:
                self._send_queued()
            if found & zmq.POLLIN:
                self._receive_queued()
            if self._monitor in ready:
                event, descriptor = self._event()  # it may be that of a refused stranger
                if event == zmq.EVENT_DISCONNECTED and descriptor == getattr(self, "_descriptor", descriptor):
                    self._drain()

    def _drain(self) -> None:
        """Hand out what came before the end of the connection. Raises LinkLostError after that."""
        poller = zmq.Poller()
        poller.register(self._call, zmq.POLLIN)
        while not (self._closes or self._loss):
            if self._sends or not self._socket.poll(_GRACE_MS):
                raise LinkLostError("Connection closed by peer")
            if self._receives:
                self._receive_queued()
            else:
                poller.poll()
                self._take_call()

    def _take_call(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._call)

    def _poller(self, wants: int) -> Any:
        poller = zmq.Poller()
        for each in (self._call, self._monitor, self._zap):
            poller.register(each, zmq.POLLIN)
        if wants:
            poller.register(self._socket, wants)
        return poller

    def _event(self) -> tuple[int, int]:
        found = parse_monitor_message(self._monitor.recv_multipart())
        return found["event"], found["value"]

    def _authenticate(self) -> None:
        """Answer libzmq's question whether a client may come: only with the expected key."""
        version, request, _, _, _, mechanism, *keys = self._zap.recv_multipart()
        is_known = mechanism == b"CURVE" and keys == [self._peer_key]
        status = (b"200", b"OK") if is_known else (b"400", b"another key was expected")
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _send_queued(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._sends:
                transfer = self._sends[0]
                transfer.tracker = self._socket.send(transfer.memory, zmq.NOBLOCK, copy=False, track=True)
                self._sends.popleft()
                transfer.ended.set()

    def _receive_queued(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._receives:
                transfer, frame = self._receives[0], self._socket.recv(zmq.NOBLOCK, copy=False)
                expected = len(transfer.memory)
                if frame.more or len(frame) != expected:
                    more = " and more" if frame.more else ""
                    raise LinkLostError(f"expected a message of {expected} bytes, found {len(frame)}{more}: the nodes disagree")
                transfer.memory[:] = np.frombuffer(frame.buffer, np.uint8)
                self._receives.popleft()
                transfer.ended.set()


def _authentic(record: bytes, name: str, secret: Secret) -> tuple[bytes, str]:
    """The key and the endpoint that the other side has put into the store. Raises LinkLostError."""
    try:
        key, endpoint, code = (str(each) for each in json.loads(record))
    except (TypeError, ValueError):
        raise LinkLostError("expected a key of the other side, found other bytes in the store at the rendezvous") from None
    if not are_equal(code, mac(secret, "key", name, key, endpoint)):
        raise LinkLostError(f"the key of the other side was not made with this job's secret: {HOW_TO_GIVE}")
    return key.encode(), endpoint


def check_installed() -> None:
    """Raise UnsupportedError if pyzmq is missing, or was built without encryption."""
    if zmq is None or not zmq.has("curve"):
        found = "none" if zmq is None else "one without CURVE"
        raise UnsupportedError(f"--link zmq: expected pyzmq with CURVE, found {found}; {how_to_install('encrypted')}")
