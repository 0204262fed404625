"""Build of the compiled core: kernels/ROOM/NAME.pyx becomes the extension fastps.kernels.ROOM.NAME.

What it refuses to be: a place for metadata (pyproject.toml has it all) or for machine-specific flags. No -march=native: the
fold chooses its instruction set at run time, so that one wheel runs on any x86-64 or arm64.

A line on stderr for each compiled module says how far the build is; ccache is used where it is on the PATH (CCACHE_DISABLE=1:
is not). What Cython gives every module that has a memoryview is compiled once, into fastps.kernels.cython_shared.

FASTPS_DEBUG=1 builds with bounds checks and assertions; FASTPS_HOOKS=1 compiles the test hooks of atomics.h in, so that a
test can count, or die at, every access to shared memory. FASTPS_SANITIZE=thread or =address builds with that sanitizer, the
latter with UndefinedBehaviorSanitizer, too.
"""

import importlib.util
import itertools
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("FASTPS_DEBUG") == "1"
HOOKS = os.environ.get("FASTPS_HOOKS") == "1"
SANITIZER = {"": "", "thread": "thread", "address": "address,undefined"}[os.environ.get("FASTPS_SANITIZE", "")]
STAGE = Path("build/cimport")
JOBS = len(os.sched_getaffinity(0))  # compilers at a time
HOOKS_ONLY = ("chaos",)  # rooms that only the tests' build has
NOT_HOOKED = ("baseline", "simulation", "tensors")  # and those that have nothing to hook
SHARED = "fastps.kernels.cython_shared"
LEVEL = "-O2"
# Modules that another level makes faster. Times at LEVEL over times at -O3 (both builds took turns; gcc 12, x86-64), by `fastps
# bench kernels`: the fold 4.0, and the limit that it is compared with 3.1; by `fastps bench scheduler`, 16 and 1,000 workers:
# 1.07, or 1.01 with roster alone at -O3. Nothing else is faster: `fastps bench sim` 0.97 to 1.00, and by `fastps bench lane` a
# post takes 2.0 to 2.2 of its limits at either level.
LEVELS = {"update.fold": "-O3", "baseline.roofline": "-O3", "scheduling.state": "-O3"}


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
    """fastps.kernels.tensors.torch_tensors, in C++ against torch's headers; without them Python's attributes do
    (tensor_loops.py).
    """
    folder = torch_folder()
    if folder is None or HOOKS or SANITIZER:
        if folder is None:
            print("fastps: no torch to build against, so a step's loops over tensors will be slower", file=sys.stderr)
        return []
    return [
        Extension(
            "fastps.kernels.tensors.torch_tensors",
            ["kernels/tensors/torch_tensors.pyx"],
            include_dirs=["kernels", str(folder / "include")],
            depends=["kernels/tensors/torch_tensors.hpp"],
            extra_compile_args=["-std=c++20", *(["-O1"] if DEBUG else ["-O2", "-g0"]), "-Wall", "-Wno-unused-function"],
            # Without a path: torch is imported first, and these are what it has loaded.
            library_dirs=[str(folder / "lib")],
            libraries=["torch_python", "torch_cpu", "c10"],
            language="c++",
            optional=True,
        )
    ]


def level(module: str) -> str:
    """How far the compiler optimizes a module; with test hooks, where nothing is timed, little: it compiles sooner."""
    return "-O1" if HOOKS else LEVELS.get(module, LEVEL)


def extensions() -> list[Extension]:
    """One extension for each kernels/ROOM/NAME.pyx; all share the headers, so a changed header rebuilds all of them."""
    macros = [("FASTPS_DEBUG", "1")] if DEBUG else []
    macros += [("FASTPS_HOOKS", "1")] if HOOKS else []
    late = [f"-fsanitize={SANITIZER}", "-g", "-O1", "-fno-omit-frame-pointer"] if SANITIZER else []
    late += ["-U_FORTIFY_SOURCE"] if HOOKS else []  # coroutine.h changes stacks
    # -ffp-contract=off: the same bits on every machine; a fused multiply-add happens only where the source writes one.
    late += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-unused-function", "-pthread"]
    headers = [*sorted(str(path) for path in Path("kernels").rglob("*.h")), "kernels/cuda/fold.cu"]
    left_out = (*(() if HOOKS else HOOKS_ONLY), *(NOT_HOOKED if HOOKS or SANITIZER else ()))
    modules = {
        f"{source.parent.name}.{source.stem}": str(source)
        for source in sorted(Path("kernels").glob("*/*.pyx"))
        if source.parent.name not in left_out and source.stem != "torch_tensors"
    }
    modules[SHARED.removeprefix("fastps.kernels.")] = "kernels/cython_shared.c"  # which Cython writes under build/
    return [
        Extension(
            f"fastps.kernels.{module}",
            [source],
            include_dirs=["kernels"],
            depends=headers,
            define_macros=macros,
            # -g0: Python's own flags have -g, which costs a quarter of the compiler's time.
            extra_compile_args=["-std=gnu11", *(["-O1", "-g"] if DEBUG else [level(module), "-g0"]), *late],
            extra_link_args=["-pthread", *([f"-fsanitize={SANITIZER}"] if SANITIZER else [])],
        )
        for module, source in modules.items()
    ]


def behind_ccache(command: list[str]) -> list[str]:
    """The compiler's command, through ccache where there is one and CC does not name one (or sccache) already."""
    ccache = shutil.which("ccache")
    return [ccache, *command] if ccache and not any("ccache" in Path(word).name for word in command) else command


class Build(build_ext):
    """Compiles through ccache, and tells of every module on stderr, which `pip install -v` shows."""

    def build_extensions(self) -> None:
        """Compile all, several at a time."""
        self.counted = itertools.count(1)
        self.compiler.compiler_so = behind_ccache(self.compiler.compiler_so)
        self.compiler.compiler_so_cxx = behind_ccache(self.compiler.compiler_so_cxx)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Compile one, unless it is newer than its sources; called by several threads."""
        built = Path(self.get_ext_fullpath(ext.name))
        before = built.stat().st_mtime_ns if built.exists() else None
        super().build_extension(ext)
        count = next(self.counted)
        if built.stat().st_mtime_ns != before:
            # One write, so that no other thread's line comes between a line and its end.
            name = ext.name.removeprefix("fastps.kernels.")
            sys.stderr.write(f"fastps: compiled {name} ({count} of {len(self.extensions)})\n")
            sys.stderr.flush()


def packages() -> list[str]:
    """All packages: each folder with an __init__.py under fastps/, kernels/ and bench/."""
    roots = {"fastps": "fastps", "kernels": "fastps.kernels", "bench": "fastps.bench"}
    return [
        ".".join([name, *path.parent.relative_to(root).parts])
        for root, name in roots.items()
        for path in sorted(Path(root).rglob("__init__.py"))
    ]


if __name__ == "__main__":
    setup(
        packages=packages(),
        ext_modules=cythonize(
            [*torch_extension(), *extensions()],
            nthreads=JOBS,
            build_dir="build/c" + ("-debug" if DEBUG else "") + ("-hooks" if HOOKS else ""),
            include_path=[stage_cimports()],
            shared_utility_qualified_name=SHARED,
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
        cmdclass={"build_ext": Build},
        options={"build_ext": {"parallel": JOBS}},
    )
