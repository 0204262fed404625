"""A machine without compiler and without fastps' source, for one command: a mount namespace in which both are covered.

Compilers, assemblers and linkers are covered by a file that cannot be run, and the checkout by an empty folder. Everything
else is this machine. The installed packages of this environment, fastps aside, stay readable under another path.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = re.compile(
    r"([\w.]+-)*(cc|gcc|g\+\+|c\+\+|cpp|c89|c99|clang|clang\+\+|tcc|icx|icpx|as|ld|ld\.(bfd|gold|lld|mold)|zig|nvcc|ccache)(-[\d.]+)?"
)
UNSHARE = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))


def compilers() -> dict[str, Path]:
    """Whatever on the PATH compiles, assembles or links, by name, with the file behind it; and gcc's own passes."""
    found = {}
    for folder in os.get_exec_path():
        for path in sorted(Path(folder).glob("*")) if Path(folder).is_dir() else ():
            if COMPILER.fullmatch(path.name) and path.is_file():
                found.setdefault(path.name, path.resolve())
    for path in [*Path("/usr/lib/gcc").rglob("cc1*"), *Path("/usr/libexec/gcc").rglob("cc1*")]:
        found.setdefault(path.name, path.resolve())
    return found


@dataclass(frozen=True)
class BareMachine:
    """An environment in `folder`, with a Python of its own, the other packages of this one, and no fastps."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "venv/bin/python"

    def run(self, *command: str | Path, timeout_s: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it. Its working directory is empty."""
        site = shlex.quote(sysconfig.get_path("purelib"))
        covers = [f"mount --bind /dev/null {shlex.quote(str(path))}" for path in sorted(set(compilers().values()))]
        script = [
            "set -e",
            f"mount --bind {site} {shlex.quote(str(self.folder / 'site'))}",
            *covers,
            f"mount -t tmpfs none {shlex.quote(str(ROOT))}",
            f"exec {shlex.join(map(str, command))}",
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("FASTPS_", "PYTHON", "PIP_"))}
        path = f"{self.python.parent}:{environment['PATH']}"
        environment |= {"PATH": path, "HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1", **variables}
        environment.pop("XDG_CACHE_HOME", None)
        return subprocess.run(
            [*UNSHARE, "sh", "-c", "\n".join(script)],
            cwd=self.folder / "work", env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip


def make(folder: Path) -> BareMachine:
    """Make such an environment. Skips the test where this user may make no mount namespace."""
    tried = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.strip()}")
    for name in ("site", "packages", "home", "work"):
        (folder / name).mkdir()
    subprocess.run([sys._base_executable, "-m", "venv", folder / "venv"], check=True)  # type: ignore[attr-defined]
    own_pip = [folder / "venv/bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
    subprocess.run(own_pip, check=True)  # Python 3.11 puts an old one into every environment, and torch needs a newer one
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("fastps", "__editable__", "pip", "__pycache__")):
            (folder / "packages" / entry.name).symlink_to(folder / "site" / entry.name)
    [packages] = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(f"{folder / 'packages'}\n")
    return BareMachine(folder)


def that_run(machine: BareMachine) -> list[str]:
    """The names of compilers that can be run in it after all."""
    names = shlex.join(sorted(compilers()))
    tries = f'for name in {names}; do "$name" --version >/dev/null 2>&1 && echo "$name"; done; echo tried'
    *found, last = machine.run("sh", "-c", tries, timeout_s=60).stdout.split()
    assert last == "tried"
    return found
