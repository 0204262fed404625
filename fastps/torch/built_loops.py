"""Compiled loops over tensors for the torch of this machine, in a cache folder: a wheel cannot bring them.

They are C++ against torch's own headers, and fit one version of torch and of Python. A package has their C++ source; `build`
compiles it once, into $XDG_CACHE_HOME/fastps (~/.cache/fastps), and `load` finds it from then on. Nothing is built unless the
user asks (FASTPS_TENSOR_LOOPS=build).
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch

import fastps.kernels
from fastps.errors import UsageError
from fastps.system.cache import cache_folder

logger = logging.getLogger("fastps.torch")

KERNELS = Path(fastps.kernels.__file__).parent
NAME = "fastps.kernels.tensors.torch_tensors"
SOURCES = ("torch_tensors.cpp", "torch_tensors.hpp")
FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O2", "-g0", "-w")
COMPILERS = ("c++", "g++", "clang++")


def path_of_build() -> Path | None:
    """Where the build for this torch, this Python and this source lies or would lie; None if the package has no C++ source."""
    try:
        digest = hashlib.sha256(b"\0".join([(KERNELS / "tensors" / name).read_bytes() for name in SOURCES])).hexdigest()[:16]
    except FileNotFoundError:
        return None
    return cache_folder() / f"torch-{torch.__version__}" / f"torch_tensors-{digest}.{sysconfig.get_config_var('SOABI')}.so"


def load() -> ModuleType | None:
    """The module that was built for this torch, this Python and this source; None if there is none that loads."""
    path = path_of_build()
    if path is None or not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        logger.warning("%s does not load, and is not used: %s", path, error)
        return None
    return module


def build() -> ModuleType:
    """Compile the loops for this torch, unless another process has done so by now, and load them.

    Other processes that build at the same time wait. Raises UsageError if a compiler or a header is missing, or if it fails.
    """
    path = path_of_build()
    if path is None:
        _refuse(f"the C++ source of the loops in {KERNELS / 'tensors'}", "none", "install fastps again")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with the process
            if not path.is_file():
                _compile(path)
    except OSError as error:
        _refuse(f"a folder to write to at {path.parent}", str(error), "set XDG_CACHE_HOME to one")
    module = load()
    if module is None:
        _refuse(f"{path} to load", "that it does not", "remove it and build again, with the compiler that torch was built with")
    return module


def _compile(path: Path) -> None:
    """Compile into a new file and rename it, so that no process ever sees a part of it. Raises UsageError."""
    # Libraries follow the source: a linker that keeps needed ones only asks what precedes them. torch has loaded them by then.
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    command = [*_compiler(), *FLAGS, *_headers(), str(KERNELS / "tensors" / SOURCES[0]), *libraries]
    logger.warning("building the loops over tensors for torch %s, once, in about 15 seconds: %s", torch.__version__, path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        ended = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            lines = ended.stderr.strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[-1] if lines else "no output")
            log = path.with_suffix(".log")
            log.write_text(f"{shlex.join(command)}\n{ended.stderr}")
            _refuse(f"{command[0]} to compile the loops", f"exit code {ended.returncode} ({first.strip()})", f"see {log}")
        made.replace(path)


def _compiler() -> list[str]:
    """The command of the C++ compiler: the variable CXX, or the first that is installed. Raises UsageError."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        _refuse("the command of a C++ compiler in CXX", repr(os.environ["CXX"]), str(error))
    candidates = [given] if given else [[name] for name in COMPILERS]
    found = next((command for command in candidates if shutil.which(command[0])), None)
    if found is None:
        names = " or ".join(command[0] for command in candidates)
        _refuse(f"a C++ compiler ({names})", "none", "install one, or use FASTPS_TENSOR_LOOPS=auto")
    return found


def _headers() -> list[str]:
    """Where headers are. Raises UsageError if Python's or torch's are missing."""
    python = [Path(sysconfig.get_path(name)) for name in ("include", "platinclude")]
    torchs = Path(torch.__file__).parent / "include"
    needed = {python[0] / "Python.h": "Debian's package is python3-dev", torchs / "torch/csrc": "install torch again"}
    for path, advice in needed.items():
        if not path.exists():
            _refuse(f"the header {path}", "none", f"install it ({advice}), or use FASTPS_TENSOR_LOOPS=auto")
    folders = dict.fromkeys([KERNELS, torchs, *python])
    return [*(f"-I{path}" for path in folders), f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def _refuse(expected: str, found: str, advice: str) -> NoReturn:
    raise UsageError(f"FASTPS_TENSOR_LOOPS=build: expected {expected}, found {found}: {advice}")
