"""Build wheels that need no compiler: one for each interpreter, from the source distribution, checked by auditwheel.

    python tools/wheels.py --out dist [python3.11 python3.12 ...]

The source distribution is built first, and each wheel from it alone, in a new environment. A wheel runs on glibc 2.28 and
later, as torch's own wheels do. It holds no binary that knows torch: that is checked here. Two builds with the same tools are
the same bytes: the time of their files is SOURCE_DATE_EPOCH, or else in 1980. Exit code 1 if an interpreter is missing, or if a
wheel is not what it should be. `pip install '.[wheels]'` brings what this needs.
"""

import argparse
import fcntl
import gzip
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
PLATFORM = f"manylinux_2_28_{platform.machine()}"
# Libraries that every Linux with that glibc has.
LIBRARIES = re.compile(r"(libc|libm|libpthread|libdl|librt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
TORCH_SYMBOL = re.compile(r"_ZNK?(2at|3c10|5torch)|THP")
EPOCH = os.environ.get("SOURCE_DATE_EPOCH", "315619200")  # or the first time that a zip file can tell in any time zone
LOOPS = "fastps/kernels/tensors/torch_tensors"


def interpreter(name: str) -> Path | None:
    """The interpreter of this name or path that runs, on the PATH or among pyenv's; None if there is none.

    A name on the PATH may be pyenv's stand-in for a version that is not active, which fails.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    number = name.removeprefix("python")
    found = shutil.which(name)
    for path in [*([Path(found)] if found else []), *sorted(pyenv.glob(f"versions/{number}.*/bin/{name}"))]:
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def run(*command: str | Path, **variables: str) -> None:
    """Run a command quietly with these variables. Print its output and raise SystemExit if it fails."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SOURCE_DATE_EPOCH": EPOCH}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ended.returncode != 0:
        print(ended.stdout[-20000:], file=sys.stderr)
        raise SystemExit(f"expected {' '.join(map(str, command))} to succeed, found exit code {ended.returncode}")


def source_distribution(folder: Path) -> Path:
    """Build the source distribution into a folder, with build isolation. Returns its path.

    One process after the other: setuptools gathers the files in a folder beside the source.
    """
    with (ROOT / "pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with the process
        run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT, FASTPS_WHEEL="1")
    made = only(folder.glob("fastps-*.tar.gz"))
    _settle(made)
    return made


def _settle(path: Path) -> None:
    """Write an archive again without what its build alone decides: the files' order, times, owners and permissions."""
    with tarfile.open(path) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = [archive.extractfile(member).read() if member.isfile() else b"" for member in members]  # type: ignore[union-attr]
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for member, content in zip(members, contents, strict=True):
                if not (member.isfile() or member.isdir()):
                    raise SystemExit(f"{path.name}: expected files and folders, found a link: {member.name}")
                plain = tarfile.TarInfo(member.name)
                plain.type, plain.size, plain.mtime = member.type, len(content), int(EPOCH)
                plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                archive.addfile(plain, io.BytesIO(content))


def wheel(python: Path, source: Path, out: Path) -> Path:
    """Build the wheel of an interpreter from the source distribution, check it, and put it into `out`. Returns its path."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run(python, "-m", "venv", folder / "venv")
        pip = (folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check")
        run(*pip, "wheel", "--no-deps", "--wheel-dir", folder / "raw", source, FASTPS_WHEEL="1")
        raw = only((folder / "raw").glob("*.whl"))
        faults = list(faults_of(raw))
        if faults:
            raise SystemExit("\n".join(faults))
        # It fails where a symbol is newer than the platform's glibc.
        run(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", folder / "fit", raw)
        made = only((folder / "fit").glob("*.whl"))
        return Path(shutil.move(made, out / made.name))


def faults_of(path: Path) -> Iterator[str]:
    """Whatever a wheel should not have: a binary that knows torch or needs other libraries, or missing C++ source."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for suffix in (".cpp", ".hpp"):
            if LOOPS + suffix not in names:
                yield f"{path.name}: expected {LOOPS + suffix}, which builds the loops over tensors later, found none"
        for name in names:
            if name.endswith(".so"):
                with archive.open(name) as file:
                    yield from (f"{path.name}: {name}: {fault}" for fault in _faults_of_binary(ELFFile(file)))


def _faults_of_binary(binary: ELFFile) -> Iterator[str]:
    for section in binary.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags("DT_NEEDED"):
                if not LIBRARIES.fullmatch(tag.needed):
                    yield f"expected libraries of glibc only, found {tag.needed}"
    symbols = binary.get_section_by_name(".dynsym")
    names = [symbol.name for symbol in symbols.iter_symbols()] if symbols is not None else []
    yield from (f"expected no symbol of torch, found {name}" for name in names if TORCH_SYMBOL.match(name))


def only(paths: Iterator[Path]) -> Path:
    """The one path that there is. Raises SystemExit if there are none or several."""
    found = list(paths)
    if len(found) != 1:
        raise SystemExit(f"expected one file, found {', '.join(map(str, found)) or 'none'}")
    return found[0]


def main() -> int:
    """Build what the command line asks for. Returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("pythons", nargs="*", default=PYTHONS, metavar="PYTHON", help="interpreters: names or paths")
    arguments.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the wheels and the source")
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    missing = []
    with tempfile.TemporaryDirectory() as place:
        source = source_distribution(Path(place))
        source = Path(shutil.copy(source, given.out))
        print(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB", flush=True)
        for name in given.pythons:
            python = interpreter(name)
            if python is None:
                missing.append(name)
                continue
            made = wheel(python, source.resolve(), given.out.resolve())
            print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB", flush=True)
    if missing:
        print(f"expected {', '.join(missing)}, found none: install it, or name those that you have", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
