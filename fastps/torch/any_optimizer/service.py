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
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(rendezvous.place_name(job, "optimizer"))
        except OSError as error:
            self._listener.close()
            raise AttachError(
                f"job {job}: expected to be the only process that runs its optimizer, found another ({error})"
            ) from None
        self._listener.listen()
        self._thread = threading.Thread(target=self._answer, name="fastps-optimizer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

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
        try:
            with self._fold.lock:
                if word == _READ:
                    sent = _packed(saved.saved(self._fold.optimizer))
                elif word == _LOAD and files:
                    saved.load(self._fold.optimizer, _unpacked(files[0]))
                    sent = -1
                elif word == _SET and files:
                    for group, changed in zip(
                        self._fold.optimizer.param_groups, saved.values_of(_unpacked(files[0])), strict=True
                    ):
                        group.update(changed)
                    sent = -1
                else:
                    return
        except Exception as error:  # of any kind: the optimizer is the script's
            connection.send(f"{type(error).__name__}: {error}".encode()[:_LONGEST])
            return
        finally:
            for file in files:
                os.close(file)
        if sent < 0:
            connection.send(_DONE)
            return
        try:
            socket.send_fds(connection, [_DONE], [sent])
        finally:
            os.close(sent)


def read(job: str, timeout_s: float) -> saved.Saved:
    """The state, from the process that runs the optimizer. Raises WorkerDiedError if it has ended; Error."""
    file = _asked(job, timeout_s, _READ)
    try:
        return _unpacked(file)
    finally:
        os.close(file)


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
            answer, files, _, _ = socket.recv_fds(connection, _LONGEST, 1)
        except (OSError, rendezvous.OtherUser) as error:
            raise WorkerDiedError(f"the process that runs the optimizer of job {job} does not answer: {error}", -1) from None
    if not answer:
        raise WorkerDiedError(f"the process that runs the optimizer of job {job} has ended while it answered", -1)
    if answer != _DONE:
        raise Error(f"the optimizer's state: {answer.decode(errors='replace')}")
    return files[0] if files else -1


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
