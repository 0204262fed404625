"""Build of the compiled core: every kernels/*.pyx becomes the extension fastps.kernels.*.

What it refuses to be: a place for metadata (pyproject.toml has it all) or for machine-specific flags. No -march=native: the
fold chooses its instruction set at run time, so that one wheel runs on any x86-64 or arm64.

FASTPS_DEBUG=1 builds with bounds checks and assertions; FASTPS_HOOKS=1 compiles the test hooks of atomics.h in, so that a
test can count, or die at, every access to shared memory. FASTPS_SANITIZE=thread or =address builds with that sanitizer, the
latter with UndefinedBehaviorSanitizer, too.
"""

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("FASTPS_DEBUG") == "1"
HOOKS = os.environ.get("FASTPS_HOOKS") == "1"
SANITIZER = {"": "", "thread": "thread", "address": "address,undefined"}[os.environ.get("FASTPS_SANITIZE", "")]
STAGE = Path("build/cimport")
JOBS = len(os.sched_getaffinity(0))  # compilers at a time
HOOKS_ONLY = ("chaos", "chaos_machine", "chaos_workers", "hooks", "witness")  # modules that only the tests' build has
# and those that have nothing to hook
NOT_HOOKED = ("arrivals", "compute_time", "limit", "network", "simulation_totals", "simulator", "virtual_shards")


def stage_cimports() -> str:
    """Show Cython the tree as it will be installed, so that `cimport fastps.kernels.x` finds kernels/x.pxd.

    Cython resolves a cimport by folders on disk and does not read setuptools' package_dir.
    """
    package = STAGE / "fastps"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.pxd").touch()
    link = package / "kernels"
    if not link.is_symlink():
        link.symlink_to(Path("kernels").resolve(), target_is_directory=True)
    return str(STAGE)


def torch_folder() -> Path | None:
    """Where torch is: to be imported from here, or in the environment that an isolated build is for; None: in neither."""
    found = importlib.util.find_spec("torch")
    folders = [Path(found.origin).parent] if found and found.origin else []
    folders += [Path(sysconfig.get_path("platlib")) / "torch"]
    return next((folder for folder in folders if (folder / "include/torch/csrc").is_dir()), None)


def torch_extension() -> list[Extension]:
    """fastps.kernels.torch_tensors, in C++ against torch's headers; without them Python's attributes do (tensor_loops.py)."""
    folder = torch_folder()
    if folder is None or HOOKS or SANITIZER:
        if folder is None:
            print("fastps: no torch to build against, so a step's loops over tensors will be slower", file=sys.stderr)
        return []
    return [
        Extension(
            "fastps.kernels.torch_tensors",
            ["kernels/torch_tensors.pyx"],
            include_dirs=["kernels", str(folder / "include")],
            depends=["kernels/torch_tensors.hpp"],
            extra_compile_args=["-std=c++20", "-O1" if DEBUG else "-O2", "-Wall", "-Wno-unused-function"],
            # Without a path: torch is imported first, and these are what it has loaded.
            library_dirs=[str(folder / "lib")],
            libraries=["torch_python", "torch_cpu", "c10"],
            language="c++",
            optional=True,
        )
    ]


def extensions() -> list[Extension]:
    """One extension for each kernels/*.pyx; all share the headers, so a changed header rebuilds all of them."""
    macros = [("FASTPS_DEBUG", "1")] if DEBUG else []
    macros += [("FASTPS_HOOKS", "1")] if HOOKS else []
    # -ffp-contract=off: the same bits on every machine; a fused multiply-add happens only where the source writes one.
    flags = ["-std=gnu11", "-O1", "-g"] if DEBUG else ["-std=gnu11", "-O2" if HOOKS else "-O3"]
    flags += [f"-fsanitize={SANITIZER}", "-g", "-O1", "-fno-omit-frame-pointer"] if SANITIZER else []
    flags += ["-U_FORTIFY_SOURCE"] if HOOKS else []  # coroutine.h changes stacks
    flags += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-unused-function", "-pthread"]
    headers = [*sorted(str(path) for path in Path("kernels").glob("*.h")), "kernels/fold.cu"]
    return [
        Extension(
            f"fastps.kernels.{source.stem}",
            [str(source)],
            include_dirs=["kernels"],
            depends=headers,
            define_macros=macros,
            extra_compile_args=flags,
            extra_link_args=["-pthread", *([f"-fsanitize={SANITIZER}"] if SANITIZER else [])],
        )
        for source in sorted(Path("kernels").glob("*.pyx"))
        if source.stem not in (*(() if HOOKS else HOOKS_ONLY), *(NOT_HOOKED if HOOKS or SANITIZER else ()), "torch_tensors")
    ]


setup(
    ext_modules=cythonize(
        [*torch_extension(), *extensions()],
        nthreads=JOBS,
        build_dir="build/c" + ("-debug" if DEBUG else "") + ("-hooks" if HOOKS else ""),
        include_path=[stage_cimports()],
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "embedsignature": True,
            "freethreading_compatible": False,
        },
    ),
    options={"build_ext": {"parallel": JOBS}},
)
