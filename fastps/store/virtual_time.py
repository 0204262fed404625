"""A worker's side of virtual time: its pushes go to the job's driver, and its weights come from there.

In such a job (`fastps simulate --script`, `fastps replay`) the driver is the only combiner. It decides when a push counts and
which version a worker reads next. The worker computes for real, and every wait of its own is one for the driver's word.
"""

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

from fastps.errors import UsageError, WorkerDiedError
from fastps.job import environment
from fastps.membership import rendezvous
from fastps.membership.job_memory import JobMemory
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining, Push
from fastps.store.elsewhere import Elsewhere
from fastps.store.server_process import Order, picklable

RANK = struct.Struct("=i")
"""A worker's first message."""
PUSH = struct.Struct("=iqiqddq")
"""What a worker hands over: a Push."""
READ = struct.Struct("=qqq")
"""What a step reads anew, after the byte BEGINS, for each shard: its number, the buffer, and the version."""
BEGINS, STOPS = b">", b"."
"""The other word: the program ends here, as if the script had called sys.exit(0)."""
STORE, SERVED = b"store", b"served"
"""The message that brings a new store, and the answer of a driver that takes it; any other answer is why it does not."""
_LONGEST = 1 << 16
_ENDED = "the driver of virtual time has ended: see the error of the command"


class Virtual(Combining):
    """The job's driver folds. The connection is made once all workers are there, and takes the first version."""

    is_direct = False

    def __init__(self, worker: AttachedLane) -> None:
        super().__init__(worker)
        self._driver = worker.store.arena.server_lane
        self._socket = _connected(worker.store.job)
        self._socket.send(RANK.pack(worker.rank))
        self._has_said_leave = False
        self.is_driven = True
        self._take_word()

    def begin(self) -> None:
        """The first step begins."""
        self._pause_if_wanted()

    def _pause_if_wanted(self) -> None:
        """Run the step that begins under pdb, if the command says so."""
        if environment.pauses(self._lane.index, self._lane.steps):
            from fastps.store.pausing import pause  # pdb takes 25 ms to import

            pause(self._lane.index, self._lane.steps)

    def send(self, push: Push) -> bool:
        """Deliver the push. A discipline with overlap has no threads: the driver makes its transfers."""
        self._deliver(push)
        return False

    def post(self, push: Push) -> None:
        """Hand over what the worker would post. Raises WorkerDiedError if the driver has ended."""
        try:
            self._socket.send(PUSH.pack(*push))
        except OSError:
            raise WorkerDiedError(_ENDED, self._driver) from None

    def advance(self) -> None:
        """Wait until the worker's next step begins in virtual time, and take the weights that it reads."""
        if self._lane.awaits:
            self._lane.granted_ns = self._clock.now_ns()
            self._take_word()
            self._lane.advance_late(self._clock.now_ns())
            self._pause_if_wanted()

    def pull(self, buffers: list[int]) -> None:
        """The driver's last word has named the buffers, until it lets the worker go."""
        if not self.is_driven:
            super().pull(buffers)

    def leave(self) -> None:
        """Leave, at the time at which the next push would count, and wait until all others have left. May be called twice."""
        if not self._has_said_leave:
            self._has_said_leave = True
            super().leave()
        if self.is_driven:
            self._take_word()
            self.is_driven = False

    def leave_virtual_time(self) -> None:
        """Leave: the driver then lets this worker go on once all have left."""
        self.leave()

    def wait_for_others(self, elsewhere: Sequence[Elsewhere] = ()) -> None:
        """All have left by then, or this worker has stopped the job."""

    def _take_word(self) -> None:
        """Wait for the driver's word, and read the buffers that it names, which the driver has pinned."""
        try:
            word = self._socket.recv(_LONGEST)
        except ConnectionError:
            word = b""
        if not word:
            raise WorkerDiedError(_ENDED, self._driver)
        if word == STOPS:
            self._has_said_leave, self.is_driven = True, False
            raise SystemExit(0)
        for shard, buffer, version in READ.iter_unpack(word[len(BEGINS) :]):
            self._lane.take_prefetched(buffer, version, shard)
            self._worker.buffers[shard] = buffer


def offer(store: JobMemory, *, on_devices: bool, more: Any = None) -> None:
    """Let the driver serve a new store; `more`: the order of a ServerPlan. Raises UsageError with the reason if it does not."""
    if not store.layout.has_server:
        raise UsageError("virtual time: the driver folds, expected no server= in the script, found 'workers'")
    if on_devices:
        raise UsageError("virtual time: expected a model on the CPU, found one on a GPU; set CUDA_VISIBLE_DEVICES=")
    layout, rule = picklable(store.layout)
    message = pickle.dumps(Order(store.job, layout, store.timeout_s, -1, rule, None, more))
    descriptor = os.memfd_create("fastps-order")
    try:
        os.truncate(descriptor, len(message))
        os.pwrite(descriptor, message, 0)
        with _connected(store.job) as connection:
            socket.send_fds(connection, [STORE], [store.descriptor, descriptor])
            answer = connection.recv(_LONGEST)
    finally:
        os.close(descriptor)
    if answer != SERVED:
        raise UsageError(answer.decode() or _ENDED)


def _connected(job: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(rendezvous.place_name(job, "driver"))
        rendezvous.check_user(connection)
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        raise UsageError(
            "virtual time: expected a script that wraps one optimizer, once, without job=, found a second wrap or a"
            " job of its own"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection
