"""The CUDA kernels on a GPU: compiled by NVRTC and launched through CuPy, which the extras `cuda12` and `cuda13` install.

CuPy is imported only when a GPU is requested; a missing GPU or package is then one clear sentence. Memory and streams belong to
the caller.
"""

import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastps.kernels.cuda import launch_args
from fastps.kernels.cuda.launch_args import COPY_KERNEL, DTYPES, RULE_NAMES, THREADS, Launch
from fastps.kernels.update.fold import RULE_USER

SOURCE = Path(__file__).with_name("fold.cu")
# No contraction: only the source's own fused multiply-adds are fused, so the bits are the CPU's.
OPTIONS = ("--std=c++17", "--fmad=false")
Compiler = Callable[[str, str], bytes]
"""Makes machine code of an architecture's name and a source."""
_ALL_FOLDS = "FPS_UPDATE_RULES(FPS_FOLD_KERNELS)\n"
ADVICE = (
    "pip install '.[cuda12]' or '.[cuda13]' in the folder of fastps' source, whichever CUDA the driver supports"
    " (nvidia-smi shows it)"
)


class CudaUnavailableError(RuntimeError):
    """The GPU, CuPy or the compiler is missing; the text says which, and what to do."""


_FOLDS = {launch_args.fold_kernel(rule, dtype): (rule, dtype) for rule in RULE_NAMES for dtype in DTYPES}
_OTHERS = (*(launch_args.check_kernel(dtype) for dtype in DTYPES), COPY_KERNEL)


def kernel_names() -> list[str]:
    """Return the names of all kernels: a fold for each rule and gradient dtype, a check for each dtype, and the copy.

    >>> kernel_names()[:2]
    ['fps_fold_sgd_float32', 'fps_fold_sgd_float16']
    """
    return [*_FOLDS, *_OTHERS]


def users_kernel_names() -> list[str]:
    """Return the names of the kernels in a user's rule's module.

    >>> users_kernel_names()[:2]
    ['fps_fold_users_float32', 'fps_fold_users_float16']
    """
    return [*(launch_args.fold_kernel(RULE_USER, dtype) for dtype in DTYPES), *_OTHERS]


def source(users: str = "", folds: str | None = None) -> str:
    """Return the source of all kernels, with the rules' table and bodies in the places of their includes: NVRTC has no headers.

    `users`: the text of a user's rule; the module then has its kernels alone. `folds`: what stands in the place of the folds of
    fastps' rules.

    >>> '#include "update' in source(), "FPS_RULE_BODY(adam)" in source()
    (False, True)
    """
    folder = SOURCE.parents[1]
    text = SOURCE.read_text().replace('#include "cuda/users_rule.h"\n', users)
    if folds is not None:
        text = text.replace(_ALL_FOLDS, folds + "\n")
    return re.sub(r'^#include "(update/.+)"$', lambda found: (folder / found[1]).read_text(), text, flags=re.M)


@functools.cache
def load_cupy() -> Any:
    """Return the module cupy after a check that it sees at least one GPU. Raises CudaUnavailableError."""
    if importlib.util.find_spec("cupy") is None:
        raise CudaUnavailableError(f"expected CuPy for work on a GPU, found no such package: {ADVICE}")
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a library's ImportError, or CuPy's own errors, which have no name without CuPy
        raise CudaUnavailableError(
            f"expected a GPU that CuPy can use, found none ({type(error).__name__}: {error}): check that nvidia-smi shows one,"
            f" and {ADVICE}"
        ) from error
    if count < 1:
        raise CudaUnavailableError("expected at least one GPU, found none: check that nvidia-smi shows one")
    return cupy


@functools.cache
def kernel(device: int, name: str, users: str = "", compiled: Compiler | None = None) -> Any:
    """Return a function (stream, launch) that launches a kernel of `kernel_names`. Raises CudaUnavailableError, ValueError.

    The stream is CUDA's. The first call for a device compiles this kernel alone; the checks and the copy are one module.
    `users`: the text of a user's rule, for the kernels of its folds. `compiled`: what to compile with, by default
    `compile_with_nvrtc`.
    """
    if name in _FOLDS:
        rule, dtype = _FOLDS[name]
        text = source(folds=f"FPS_FOLD_KERNEL({name.removeprefix('fps_fold_')}, {rule}, {DTYPES[dtype]})")
    elif name in _OTHERS:
        text = source(folds="")
    elif users and name in users_kernel_names():
        text = source(users)
    else:
        raise ValueError(f"expected a kernel of {', '.join(kernel_names())}, found {name}")
    function = _module(device, text, compiled).get_function(name)

    def start(stream: int, launch: Launch) -> None:
        # CuPy passes a NumPy array of size one by value. CUDA reads as many bytes as the parameter has (cuLaunchKernel).
        argument = np.frombuffer(launch.argument, f"V{launch.argument.nbytes}")
        # A stream, as CuPy's functions take one, has `ptr` (_get_stream in cupy/cuda/function.pyx).
        function((launch.blocks,), (THREADS,), (argument,), 0, SimpleNamespace(ptr=stream))

    return start


@functools.cache
def _module(device: int, text: str, compiled: Compiler | None) -> Any:
    """The loaded machine code of a source. CuPy does not compile it: it would add -ftz=true, and denormals would be zero."""
    cupy = load_cupy()
    with cupy.cuda.Device(device):
        module = cupy.cuda.function.Module()
        module.load((compiled or compile_with_nvrtc)(f"sm_{cupy.cuda.Device(device).compute_capability}", text))
    return module


# -- NVRTC without a GPU -----------------------------------------------------------------------------------------------------


def key_of(architecture: str, text: str) -> str:
    """A name for the machine code of a source: by its text, the options, the architecture, and the version of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _ask(_load_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    named = f"{architecture} {major.value}.{minor.value} {OPTIONS} {text}"
    return f"{architecture}-{hashlib.sha256(named.encode()).hexdigest()[:32]}"


def compile_with_nvrtc(architecture: str, text: str | None = None) -> bytes:
    """Compile all kernels without a GPU, and return the machine code for "sm_90", say, or PTX for "compute_90".

    `text`: another source. Raises CudaUnavailableError if NVRTC is not installed, and RuntimeError with its log if it rejects
    the source.
    """
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    _ask(nvrtc.nvrtcCreateProgram(ctypes.byref(program), (text or source()).encode(), b"fold.cu", 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in OPTIONS)]
        refused = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if refused:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC refused fold.cu: {log!r}")
        if architecture.startswith("compute_"):
            return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
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
                ctypes.CDLL(str(part), ctypes.RTLD_GLOBAL)  # NVRTC loads it by its bare name
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaUnavailableError("NVRTC is not installed (the package nvidia-cuda-nvrtc or nvidia-cuda-nvrtc-cu12 brings it)")


def _nvrtc_names() -> Iterator[str]:
    """Yield possible names of the library: in NVIDIA's Python packages, as torch's own, then on the loader's path."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package and package.submodule_search_locations else ():
        yield from (str(path) for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")))
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found
