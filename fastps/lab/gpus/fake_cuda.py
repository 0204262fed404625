"""What each simulated CUDA has: devices by number, and the work of copies and kernels.

The kernels are those of fold.cu, compiled by the host's compiler, with the bits of a GPU.
"""

import ctypes
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy.typing as npt

from fastps.device.interface import DeviceError
from fastps.kernels.cuda import host_fold, launch_args
from fastps.kernels.cuda.launch_args import Launch, Span
from fastps.kernels.cuda.runtime import source

UsersKernels = Callable[[str, Launch], None]
"""Launches the kernels of a user's rule, by their names."""

Work = Callable[[Any], object]
"""A piece of work; it is given the stream on which it runs."""


class CupyArray(npt.NDArray[Any]):
    """An array with no attribute that CuPy's arrays lack (the class ndarray of cupy/_core/core.pyx).

    >>> import numpy as np
    >>> array = np.zeros(2).view(CupyArray)
    >>> hasattr(array, "ctypes"), array.tolist()
    (False, [0.0, 0.0])
    """

    def _is_missing(self) -> NoReturn:
        raise AttributeError("CuPy's arrays do not have this attribute of NumPy's")

    ctypes = property(_is_missing)
    __array_interface__ = __array_struct__ = getfield = setfield = resize = setflags = ctypes


class FakeCuda(ABC):
    """In the place of fastps.device.cuda.CupyCuda; also its runtime, with the functions of cupy.cuda.runtime.

    `gpus`: the bus ids of the GPUs that this process sees, its own first. `numbers`: of streams and events.
    """

    def __init__(self, gpus: Sequence[str], numbers: Iterator[int] | None = None) -> None:
        self.gpus = list(gpus)
        self._numbers = numbers or itertools.count(1)
        self._compile_rule: Callable[[str], UsersKernels] | None = None
        self._users: UsersKernels | None = None
        self._thread = threading.local()
        self._computing: list[int] = []  # by device: its compute stream

    @property
    def runtime(self) -> Any:
        """The functions of the CUDA runtime."""
        return self

    @property
    def _device(self) -> int:
        return getattr(self._thread, "device", 0)

    @property
    def _gpu(self) -> str:
        """The bus id of the thread's device."""
        return self.gpus[self._device]

    def _keep(self, things: dict[int, Any], thing: Any) -> int:
        number = next(self._numbers)
        things[number] = thing
        return number

    @abstractmethod
    def reaches(self, gpu: str, other: str) -> bool:
        """Whether there is peer access. A device reaches itself."""

    @abstractmethod
    def queue(self, stream: int, text: str, work: Work) -> None:
        """Queue a piece of work, named `text` in errors."""

    @abstractmethod
    def touch(self, on: Any, text: str, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        """Check the accesses of a piece of work that runs on a stream. Raises DeviceError."""

    def getDeviceCount(self) -> int:
        return len(self.gpus)

    def setDevice(self, device: int) -> None:
        self._thread.device = device

    def deviceGetPCIBusId(self, device: int) -> str:
        return self.gpus[device]

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return int(self.reaches(self.gpus[device], self.gpus[peer]))

    def compute_stream(self, device: int) -> int:
        return self._computing[device]

    def identity(self, device: int) -> str:
        return self.gpus[device]

    def prepare(self, device: int, kernels: Sequence[str], users: str) -> None:
        if users and self._compile_rule is None:
            raise DeviceError("expected a compiler of users' rules for a simulated device, found none")
        if users and self._compile_rule is not None:
            self._users = self._compile_rule(source(users))

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        text = f"copy of {size} bytes"

        def work(on: Any) -> None:
            self.touch(on, text, [(source, size)], [(to, size)])
            ctypes.memmove(to, source, size)

        self.queue(stream, text, work)

    def launch(self, device: int, kernel: str, launch: Launch, stream: int) -> None:
        """Queue a kernel. CUDA copies the argument before cuLaunchKernel returns, and refuses a grid without blocks."""
        if launch.blocks < 1 or launch.argument.nbytes > host_fold.ARGUMENT_BYTES:
            raise DeviceError(f"{kernel}: expected blocks, and an argument that CUDA takes, found an invalid value (error 1)")
        launch = Launch(launch.argument.copy(), launch.blocks)

        def work(on: Any) -> None:
            self.touch(on, kernel.split("_")[1], *launch_args.accessed(kernel, launch))
            if "_users_" in kernel and self._users is not None:
                self._users(kernel, launch)
            else:
                host_fold.launch(kernel, launch.argument, launch.blocks, launch_args.THREADS)

        self.queue(stream, kernel.split("_")[1], work)
