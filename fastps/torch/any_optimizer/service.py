"""The state of an optimizer that another process of the job runs: read on demand, and loaded, over a socket.

The process that runs the optimizer answers in a thread, between two folds. The state travels as checkpoints have it: what is
received is unpickled as tensors, numbers and text alone.
"""

import contextlib
import io
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastps.errors import AttachError, Error, WorkerDiedError
from fastps.membership import rendezvous
from fastps.torch.any_optimizer import saved
from fastps.torch.any_optimizer.fold import TorchFold

logger = logging.getLogger("fastps.torch")
_READ, _LOAD, _SET, _DONE = b"read", b"load", b"set", b"done"
_LONGEST = 4096  # bytes of a message: a word, or the text of an error


class StateService:
    """Answers those that ask for the state of the optimizer that `fold` runs, until `close`."""

    def __init__(self, job: str, fold: TorchFold) -> None:
        self._fold = fold
        self._listener = _listening(rendezvous.place_name(job, "optimizer"), job)
        self._job = job
        self._thread = threading.Thread(target=self._answer, name="fastps-optimizer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def leave(self, ranks: Sequence[int]) -> None:
        """Leave the last state with these workers, which read it once nobody answers. One that has closed gets none."""
        word, file = self._state() if ranks else (b"", -1)
        for rank in ranks:
            with (
                contextlib.suppress(OSError, rendezvous.OtherUser),
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
            ):
                connection.settimeout(1.0)
                connection.connect(_inbox(self._job, rank))
                rendezvous.check_user(connection)  # any user may take a name
                _send(connection, word, file)
        if file >= 0:
            os.close(file)

    def _state(self) -> tuple[bytes, int]:
        """The answer to a request to read: a word and a descriptor, or the text of an error and -1."""
        try:
            return _DONE, _packed(saved.saved(self._fold.optimizer))
        except Exception as error:  # of any kind: the optimizer is the script's
            return f"{type(error).__name__}: {error}".encode()[:_LONGEST], -1

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection:
                connection.settimeout(10.0)
                try:
                    rendezvous.check_user(connection)
                    self._serve(connection)
                except (OSError, rendezvous.OtherUser) as error:
                    logger.debug("a request for the optimizer's state: %s", error)

    def _serve(self, connection: socket.socket) -> None:
        word, files, _, _ = socket.recv_fds(connection, _LONGEST, 1)
        answer, sent = _DONE, -1
        try:
            with self._fold.lock:
                if word == _READ:
                    answer, sent = self._state()
                elif word == _LOAD and files:
                    saved.load(self._fold.optimizer, _unpacked(files[0]))
                elif word == _SET and files:
                    groups, changed = self._fold.optimizer.param_groups, saved.values_of(_unpacked(files[0]))
                    for group, options in zip(groups, changed, strict=True):
                        group.update(options)
                else:
                    return
        except Exception as error:  # of any kind: the optimizer is the script's
            answer = f"{type(error).__name__}: {error}".encode()[:_LONGEST]
        finally:
            for file in files:
                os.close(file)
        try:
            _send(connection, answer, sent)
        finally:
            if sent >= 0:
                os.close(sent)


class Inbox:
    """Where the process that runs the optimizer leaves the last state for a worker that closes after it."""

    def __init__(self, job: str, rank: int) -> None:
        self._listener = _listening(_inbox(job, rank), job)
        self._listener.setblocking(False)
        self._last: saved.Saved | None = None

    def state(self) -> saved.Saved | None:
        """That state, or None. Raises Error if it could not be left, with the reason."""
        while self._last is None:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return None
            with connection:
                connection.settimeout(1.0)
                try:
                    rendezvous.check_user(connection)
                    file = _answer_of(connection)
                except (OSError, rendezvous.OtherUser):
                    continue
            if file >= 0:
                self._last = _taken(file)
        return self._last

    def close(self) -> None:
        """Take no more."""
        self._listener.close()


def _inbox(job: str, rank: int) -> bytes:
    return rendezvous.place_name(job, "optimizer") + b"/%d" % rank


def _listening(name: bytes, job: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.bind(name)
    except OSError as error:
        made.close()
        text = f"job {job}: expected to be the only process that runs its optimizer, or waits for its state, found another"
        raise AttachError(f"{text} ({error})") from None
    made.listen()
    return made


def _send(connection: socket.socket, word: bytes, file: int) -> None:
    socket.send_fds(connection, [word], [file] if file >= 0 else [])


def read(job: str, timeout_s: float) -> saved.Saved:
    """The state, from the process that runs the optimizer. Raises WorkerDiedError if it has ended; Error."""
    return _taken(_asked(job, timeout_s, _READ))


def load(job: str, state: saved.Saved, timeout_s: float) -> None:
    """Load a state there. Raises WorkerDiedError; Error with the reason of the optimizer's own load_state_dict()."""
    file = _packed(state)
    try:
        _asked(job, timeout_s, _LOAD, file)
    finally:
        os.close(file)


def set_options(job: str, changed: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
    """Set these options of the param_groups there. Raises as `load`; CheckpointError for a value that cannot travel."""
    file = _packed(saved.of_values(list(changed)))
    try:
        _asked(job, timeout_s, _SET, file)
    finally:
        os.close(file)


def _asked(job: str, timeout_s: float, word: bytes, *sent: int) -> int:
    """Ask, and return the descriptor of the answer, or -1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(rendezvous.place_name(job, "optimizer"))
            rendezvous.check_user(connection)
            socket.send_fds(connection, [word], list(sent))
            return _answer_of(connection)
        except (OSError, rendezvous.OtherUser) as error:
            raise WorkerDiedError(f"the process that runs the optimizer of job {job} does not answer: {error}", -1) from None


def _answer_of(connection: socket.socket) -> int:
    """The descriptor that comes with an answer, or -1. Raises ConnectionError at its end; Error with the text of an error."""
    answer, files, _, _ = socket.recv_fds(connection, _LONGEST, 1)
    if not answer:
        raise ConnectionError("it has ended while it answered")
    if answer != _DONE:
        raise Error(f"the optimizer's state: {answer.decode(errors='replace')}")
    return files[0] if files else -1


def _taken(descriptor: int) -> saved.Saved:
    try:
        return _unpacked(descriptor)
    finally:
        os.close(descriptor)


def _packed(state: saved.Saved) -> int:
    """A descriptor of memory that has the state."""
    described, arrays = state
    with io.BytesIO() as out:
        torch.save((described, {name: torch.from_numpy(array) for name, array in arrays.items()}), out)
        descriptor = os.memfd_create("fastps-optimizer")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(out.getbuffer())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _unpacked(descriptor: int) -> saved.Saved:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        found: Any = torch.load(file, weights_only=True)
    described, tensors = found
    return described, {name: tensor.numpy() for name, tensor in tensors.items()}
