"""Build of the compiled core: kernels/FOLDER/NAME.pyx becomes the extension fastps.kernels.FOLDER.NAME.

All metadata is in pyproject.toml, but for README's links, made absolute here. There are no machine-specific flags such
as -march=native: the fold chooses its instruction set at run time, so one wheel runs on any x86-64 or arm64 machine.

The build prints a line to stderr for each compiled module. It uses ccache if ccache is on the PATH (CCACHE_DISABLE=1 turns it
off). Cython's memoryview code, which many modules share, is compiled once, into fastps.kernels.cython_shared.

FASTPS_DEBUG=1 builds with bounds checks and assertions. FASTPS_HOOKS=1 compiles failpoints in, by which a test can count every
access to shared memory, or die at it. FASTPS_SANITIZE=thread builds with ThreadSanitizer, and FASTPS_SANITIZE=address with
AddressSanitizer and UndefinedBehaviorSanitizer. FASTPS_WHEEL=1 leaves out the one binary that depends on torch's version, whose
C++ source is in the wheel instead.
"""

import importlib.util
import itertools
import os
import re
import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("FASTPS_DEBUG") == "1"
WHEEL = os.environ.get("FASTPS_WHEEL") == "1"
HOOKS = os.environ.get("FASTPS_HOOKS") == "1"
SANITIZER = {"": "", "thread": "thread", "address": "address,undefined"}[os.environ.get("FASTPS_SANITIZE", "")]
STAGE = Path("build/cimport")
JOBS = len(os.sched_getaffinity(0))  # parallel compilers
HOOKS_ONLY = ("chaos",)  # folders that only the failpoint build compiles
NOT_HOOKED = ("baseline", "simulation", "tensors")  # folders without failpoints, which the test builds leave out
SHARED = "fastps.kernels.cython_shared"
BESIDE = {"update.fold": ["kernels/update/fold_double.c"]}  # a module's further sources
LEVEL = "-O2"
# Modules that -O3 makes faster. Times at LEVEL divided by times at -O3, measured alternately (gcc 12, x86-64): `fastps bench
# kernels` 4.0 for the fold and 3.1 for its roofline; `fastps bench scheduler` with 16 and 1,000 workers 1.07, or 1.01 if only
# the scheduler state is at -O3. Nothing else gains: `fastps bench sim` 0.97 to 1.00, and in `fastps bench lane` a post takes
# 2.0 to 2.2 times its roofline at either level.
LEVELS = {"update.fold": "-O3", "baseline.roofline": "-O3", "scheduling.state": "-O3", "collectives.exchange": "-O3"}


def stage_cimports() -> str:
    """Stage the tree as it will be installed, so that `cimport fastps.kernels.x` finds kernels/x.pxd. Returns its root.

    Cython resolves a cimport by folders on disk and does not read setuptools' package_dir.
    """
    package = STAGE / "fastps"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.pxd").touch()
    link, kernels = package / "kernels", Path("kernels").resolve()
    if link.is_symlink() and link.resolve() != kernels:
        link.unlink()  # this tree is a copy of another
    if not link.is_symlink():
        link.symlink_to(kernels, target_is_directory=True)
    return str(STAGE)


def torch_folder() -> Path | None:
    """torch's folder: importable here, or installed in the environment that an isolated build targets; None without torch."""
    found = importlib.util.find_spec("torch")
    folders = [Path(found.origin).parent] if found and found.origin else []
    folders += [Path(sysconfig.get_path("platlib")) / "torch"]
    return next((folder for folder in folders if (folder / "include/torch/csrc").is_dir()), None)


def torch_extension() -> list[Extension]:
    """The C++ extension fastps.kernels.tensors.torch_tensors, built against torch's headers; empty without torch.

    Its C++ source is written beside the Cython source in any case: a package that has the source can build it later, for the
    torch that it meets. Without the extension, loops over Python attributes replace it at run time.
    """
    folder = None if WHEEL else torch_folder()
    extension = Extension(
        "fastps.kernels.tensors.torch_tensors",
        ["kernels/tensors/torch_tensors.pyx"],
        depends=["kernels/tensors/torch_tensors.hpp"],
        extra_compile_args=["-std=c++20", *(["-O1"] if DEBUG else ["-O2", "-g0"]), "-Wall", "-Wno-unused-function"],
        libraries=["torch_python", "torch_cpu", "c10"],  # no rpath: fastps imports torch first, which loads them
        language="c++",
        optional=True,
    )
    [translated] = translate([extension], build_dir=None)
    if folder is None or HOOKS or SANITIZER:
        if folder is None and not WHEEL:
            print("fastps: no torch to build against, so a step's loops over tensors will be slower", file=sys.stderr)
        return []
    translated.optional = True  # cythonize() drops it
    translated.include_dirs = ["kernels", str(folder / "include")]  # not before, because Cython writes them into the C++ source
    translated.library_dirs = [str(folder / "lib")]
    return [translated]


def level(module: str) -> str:
    """A module's optimization level. The failpoint build, which is not timed, uses -O1, since it compiles sooner."""
    return "-O1" if HOOKS else LEVELS.get(module, LEVEL)


def extensions() -> list[Extension]:
    """One extension per kernels/FOLDER/NAME.pyx. All depend on all headers, so a changed header rebuilds every extension."""
    macros = [("FASTPS_DEBUG", "1")] if DEBUG else []
    macros += [("FASTPS_HOOKS", "1")] if HOOKS else []
    late = [f"-fsanitize={SANITIZER}", "-g", "-O1", "-fno-omit-frame-pointer"] if SANITIZER else []
    late += ["-U_FORTIFY_SOURCE"] if HOOKS else []  # the simulated world's coroutines switch stacks
    # -ffp-contract=off: the same bits on every machine; only an explicit fma in the source is a fused multiply-add.
    late += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-unused-function", "-pthread"]
    headers = [*sorted(str(path) for path in Path("kernels").rglob("*.h")), "kernels/cuda/fold.cu"]
    left_out = (*(() if HOOKS else HOOKS_ONLY), *(NOT_HOOKED if HOOKS or SANITIZER else ()))
    modules = {
        f"{source.parent.name}.{source.stem}": str(source)
        for source in sorted(Path("kernels").glob("*/*.pyx"))
        if source.parent.name not in left_out and source.stem != "torch_tensors"
    }
    modules[SHARED.removeprefix("fastps.kernels.")] = "kernels/cython_shared.c"  # Cython writes it under build/
    return [
        Extension(
            f"fastps.kernels.{module}",
            [source, *BESIDE.get(module, [])],
            include_dirs=["kernels"],
            depends=headers,
            define_macros=macros,
            # -g0 overrides the -g in Python's own flags, which costs a quarter of the compile time.
            extra_compile_args=["-std=gnu11", *(["-O1", "-g"] if DEBUG else [level(module), "-g0"]), *late],
            extra_link_args=["-pthread", *([f"-fsanitize={SANITIZER}"] if SANITIZER else [])],
        )
        for module, source in modules.items()
    ]


def behind_ccache(command: list[str]) -> list[str]:
    """The compiler command, prefixed with ccache if it is installed and CC does not name ccache or sccache already."""
    ccache = shutil.which("ccache")
    return [ccache, *command] if ccache and not any("ccache" in Path(word).name for word in command) else command


class Build(build_ext):
    """Compile through ccache, and report every module on stderr, which `pip install -v` shows."""

    def build_extensions(self) -> None:
        """Compile all extensions, several in parallel."""
        self.counted = itertools.count(1)
        self.compiler.compiler_so = behind_ccache(self.compiler.compiler_so)
        self.compiler.compiler_so_cxx = behind_ccache(self.compiler.compiler_so_cxx)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension unless it is newer than its sources. Several threads call it."""
        built = Path(self.get_ext_fullpath(ext.name))
        before = built.stat().st_mtime_ns if built.exists() else None
        super().build_extension(ext)
        count = next(self.counted)
        if built.stat().st_mtime_ns != before:
            # A single write keeps lines of other threads from interleaving.
            name = ext.name.removeprefix("fastps.kernels.")
            sys.stderr.write(f"fastps: compiled {name} ({count} of {len(self.extensions)})\n")
            sys.stderr.flush()


def translate(modules: list[Extension], build_dir: str | None) -> list[Extension]:
    """Translate Cython into C or C++ under `build_dir`, or beside the source if that is None. Returns what to compile."""
    translated: list[Extension] = cythonize(
        modules,
        nthreads=JOBS if len(modules) > 1 else 0,
        build_dir=build_dir,
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
    )
    return translated


def packages() -> list[str]:
    """The names of all packages: each folder with an __init__.py under fastps/, kernels/ and bench/."""
    roots = {"fastps": "fastps", "kernels": "fastps.kernels", "bench": "fastps.bench"}
    return [
        ".".join([name, *path.parent.relative_to(root).parts])
        for root, name in roots.items()
        for path in sorted(Path(root).rglob("__init__.py"))
    ]


def long_description() -> str:
    """README.md with the addresses of its images and links, which an index shows outside of the source tree."""
    source = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Source"]
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({source}/\1)", Path("README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        packages=packages(),
        py_modules=["fastps_backend"],
        ext_modules=[
            *torch_extension(),
            *translate(extensions(), "build/c" + ("-debug" if DEBUG else "") + ("-hooks" if HOOKS else "")),
        ],
        cmdclass={"build_ext": Build},
        options={"build_ext": {"parallel": JOBS}},
    )
