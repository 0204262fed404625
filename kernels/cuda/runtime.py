"""fold.cu on a real GPU: compiled by NVRTC and started through CuPy, which the extras `cuda12` and `cuda13` install.

Refuses to be needed: nothing imports CuPy before a GPU is asked for, and then a missing GPU or package is one clear sentence.
Refuses to own memory or streams: fastps/device/cuda.py does.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastps.kernels.cuda.launch_args import DTYPES, RULE_NAMES, THREADS

SOURCE = Path(__file__).with_name("fold.cu")
# No contraction: a fused multiply-add happens only where the source writes one, so the bits are the CPU's.
OPTIONS = ("--std=c++17", "--fmad=false")
ADVICE = (
    "pip install '.[cuda12]' or '.[cuda13]' in the folder of fastps' source, whichever CUDA the driver supports"
    " (nvidia-smi shows it)"
)


class CudaUnavailableError(RuntimeError):
    """There is no GPU, no CuPy or no compiler here; the text says which, and what to do."""


def kernel_names() -> list[str]:
    """The names of all kernels: a rule and a gradient's dtype each.

    >>> kernel_names()[:2]
    ['fps_fold_sgd_float32', 'fps_fold_sgd_float16']
    """
    return [f"fps_fold_{rule}_{dtype}" for rule in RULE_NAMES.values() for dtype in DTYPES]


@functools.cache
def load_cupy() -> Any:
    """The module cupy, once it is known to see at least one GPU. Raises CudaUnavailableError."""
    if importlib.util.find_spec("cupy") is None:
        raise CudaUnavailableError(f"expected CuPy for work on a GPU, found no such package: {ADVICE}")
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # an ImportError of a library, or CuPy's own errors, which cannot be named without it
        raise CudaUnavailableError(
            f"expected a GPU that CuPy can use, found none ({type(error).__name__}: {error}): check that nvidia-smi shows one,"
            f" and {ADVICE}"
        ) from error
    if count < 1:
        raise CudaUnavailableError("expected at least one GPU, found none: check that nvidia-smi shows one")
    return cupy


@functools.cache
def fold_kernel(device: int, rule: int, dtype: str) -> Any:
    """A function (stream, order, tiles, blocks) that starts the kernel on a device. Raises CudaUnavailableError, ValueError.

    Order and tiles are addresses on the device; the stream is CuPy's own kind. Compiles at the first call for a device.
    """
    if rule not in RULE_NAMES or dtype not in DTYPES:
        raise ValueError(
            f"expected a rule of {sorted(RULE_NAMES)} and a dtype of {', '.join(DTYPES)}, found {rule} and {dtype}"
        )
    kernel = _module(device).get_function(f"fps_fold_{RULE_NAMES[rule]}_{dtype}")

    def start(stream: Any, order: int, tiles: int, blocks: int) -> None:
        # Both parameters are 64-bit integers: the kernel makes pointers of them itself.
        with stream:
            kernel((blocks,), (THREADS,), (np.uint64(order), np.uint64(tiles)))

    return start


@functools.cache
def _module(device: int) -> Any:
    cupy = load_cupy()
    with cupy.cuda.Device(device):
        return cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS, backend="nvrtc")


# -- NVRTC without a GPU -----------------------------------------------------------------------------------------------------


def compile_with_nvrtc(architecture: str) -> bytes:
    """Machine code of all kernels for an architecture such as "sm_90": shows that NVRTC takes the source, with no GPU at hand.

    Raises CudaUnavailableError where NVRTC is not installed, RuntimeError with its log where it refuses the source.
    """
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    source = SOURCE.read_bytes()
    _ask(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"fold.cu", 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in OPTIONS)]
        refused = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if refused:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC refused fold.cu: {log!r}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _ask(size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _ask(read(program, text))
    return text.raw


def _ask(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC failed with status {status}")


@functools.cache
def _load_nvrtc() -> Any:
    for name in _nvrtc_names():
        try:
            for part in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(part), ctypes.RTLD_GLOBAL)  # NVRTC opens it by its bare name
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaUnavailableError("NVRTC is not installed (the package nvidia-cuda-nvrtc or nvidia-cuda-nvrtc-cu12 brings it)")


def _nvrtc_names() -> Iterator[str]:
    """Where the library may be: the loader's path, and the folders of NVIDIA's Python packages."""
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package and package.submodule_search_locations else ():
        yield from (str(path) for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")))
