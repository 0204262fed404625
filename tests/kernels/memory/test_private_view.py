"""A private view keeps what its process writes, says so, and leaves every other fault to the handler that was there before."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.dlpack

from fastps.errors import ArenaError
from fastps.kernels.memory.mapping import SharedMapping
from fastps.system import shared_memory
from tests.support import processes

FLOATS = 64 * 1024


@contextlib.contextmanager
def _mapped() -> Iterator[tuple[np.ndarray, SharedMapping, torch.Tensor]]:
    """The floats of a memfd, all ones; a private view of them; and a tensor over it."""
    descriptor = os.memfd_create("view")
    os.truncate(descriptor, 4 * FLOATS)
    shared = np.frombuffer(SharedMapping(descriptor), np.float32)
    shared[:] = 1
    view = SharedMapping(descriptor, private=True)
    yield shared, view, torch.utils.dlpack.from_dlpack(view.tensor(0, (FLOATS,), (1,), "float32"))
    os.close(descriptor)


def test_a_write_is_noted_and_stays_in_its_process_until_the_view_is_renewed() -> None:
    with _mapped() as (shared, view, tensor):
        shared[3] = 2
        assert tensor[3] == 2 and not view.is_written()
        tensor[5] = 9
        shared[6], shared[-1] = 7, 8
        assert view.is_written() and (shared[5], tensor[5]) == (1, 9)
        assert (tensor[6], tensor[-1]) == (1, 8), "a written page is a copy, and the others are shared"
        view.renew()
        assert not view.is_written() and tensor[5:7].tolist() == [1, 7]
        tensor.mul_(2)
        assert view.is_written() and shared.max() == 8 and tensor[6] == 14


def test_writes_of_many_threads_are_all_there() -> None:
    with _mapped() as (shared, _, tensor):
        parts = tensor.view(16, -1)
        threads = [threading.Thread(target=parts[number].fill_, args=(float(number),)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (parts == torch.arange(16.0)[:, None]).all() and (shared == 1).all()


def test_a_view_beyond_those_with_a_handler_is_taken_for_written() -> None:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_mapped()) for _ in range(257)]
        assert not opened[0][1].is_written()
        shared, view, tensor = opened[-1]
        tensor[0] = 5
        assert view.is_written() and shared[0] == 1
        view.renew()
        assert tensor[0] == 1


def test_a_forked_child_writes_without_a_handler() -> None:
    with _mapped() as (shared, view, tensor):

        def child() -> float:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            tensor[0] = 4
            return float(tensor[0])

        assert processes.ended(child).outcome == 4
        assert (shared[0], tensor[0]) == (1, 1) and not view.is_written()


def test_a_system_call_that_writes_there_fails_and_writes_nothing() -> None:
    with _mapped() as (shared, _, tensor):
        with pytest.raises(OSError, match="Bad address"), Path("/dev/zero").open("rb", buffering=0) as file:
            file.readinto(memoryview(tensor.numpy()).cast("B"))
        assert (shared == 1).all()


def test_a_limit_of_data_is_told_of_before_the_first_write() -> None:
    def child() -> str:
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, 1 << 20))
        descriptor = os.memfd_create("view")
        os.truncate(descriptor, 64 << 20)
        try:
            shared_memory.map_private(descriptor)
        except ArenaError as error:
            return str(error)
        return ""

    assert "ulimit -d" in processes.ended(child).outcome


# How a program ends, or what it prints, whose handlers of SIGSEGV come and go.
_BEGIN = """
import ctypes, faulthandler, os, signal
import numpy as np
from fastps.kernels.memory.mapping import SharedMapping
descriptor = os.memfd_create("view"); os.truncate(descriptor, 8192)
def view():
    global own, numbers
    own = SharedMapping(descriptor, private=True)
    address = np.frombuffer(own, np.uint8).ctypes.data
    numbers = (ctypes.c_float * 2048).from_address(address)
"""
_TRACE = "Fatal Python error: Segmentation fault"
_ENDINGS: dict[str, tuple[str, int, str]] = {
    "a write": ("view(); numbers[0] = 1; print('ok')", 0, "ok"),
    "a write after faulthandler": ("faulthandler.enable(); view(); numbers[0] = 1; print('ok')", 0, "ok"),
    "faulthandler after the view": ("view(); faulthandler.enable(); own.is_written(); numbers[0] = 1; print('ok')", 0, "ok"),
    "a null pointer": ("view(); ctypes.string_at(0)", -signal.SIGSEGV, ""),
    "a null pointer, faulthandler before": ("faulthandler.enable(); view(); ctypes.string_at(0)", -signal.SIGSEGV, _TRACE),
    "a null pointer, faulthandler after": (
        *("view(); faulthandler.enable(); own.is_written(); numbers[0] = 1; ctypes.string_at(0)", -signal.SIGSEGV, _TRACE),
    ),
    "a jump into the view": (
        "view(); numbers[0] = 1; ctypes.CFUNCTYPE(None)(ctypes.addressof(numbers))()", -signal.SIGSEGV, "",
    ),
    "a signal from elsewhere": ("view(); os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
    "a handler in Python": (
        "signal.signal(signal.SIGSEGV, lambda *_: print('told')); view(); numbers[0] = 1; os.kill(os.getpid(), signal.SIGSEGV)",
        *(0, "told"),
    ),
    "a signal that is ignored": (
        "signal.signal(signal.SIGSEGV, signal.SIG_IGN); view(); os.kill(os.getpid(), signal.SIGSEGV); print('ok')", 0, "ok",
    ),
    "a handler set after the view was opened for good": (
        "view(); own.let_write(); signal.signal(signal.SIGSEGV, signal.SIG_DFL); numbers[0] = 1; print('ok')", 0, "ok",
    ),
    "memory that is locked": (
        "print(ctypes.CDLL(None).mlockall(1)); view(); numbers[0] = 1; own.renew(); numbers[0] = 2; print('ok')", 0, "ok",
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", _ENDINGS)
@pytest.mark.sampled(3)
def test_other_faults_and_handlers_stay_what_they_were(program: str) -> None:
    text, code, printed = _ENDINGS[program]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    ended = subprocess.run(
        [sys.executable, "-c", _BEGIN + text], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert printed in ended.stdout + ended.stderr
