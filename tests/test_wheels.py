"""The wheel: what must not be in it, and that it installs and trains on a machine without a compiler."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import loaded

pytest.importorskip("elftools", reason="needs auditwheel: pip install '.[wheels]'")

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "wheels.py"
pytestmark = [
    pytest.mark.skipif(not TOOL.exists(), reason="tests run without the source tree"),
    pytest.mark.xdist_group("wheel"),  # in one process, so that one wheel is built
]

OWN_RULE = """
import fastps, torch

@fastps.rule()
def halved(weight, gradient, learning_rate):
    return weight - learning_rate * 0.5 * gradient

model = torch.nn.Linear(8, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = fastps.DistributedOptimizer(fastps.RuleOptimizer(model.parameters(), halved, learning_rate=1.0))
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
print("weight", model.weight[0, 0].item())
optimizer.close()
"""


COMPILER = re.compile(
    r"([\w.]+-)*(cc|gcc|g\+\+|c\+\+|cpp|c89|c99|clang|clang\+\+|tcc|icx|icpx|as|ld|ld\.(bfd|gold|lld|mold)|zig|nvcc|ccache)(-[\d.]+)?"
)
UNSHARE = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))


def compilers() -> dict[str, Path]:
    """Whatever on the PATH compiles, assembles or links, by name, with the file behind it; and gcc's own passes."""
    found: dict[str, Path] = {}
    for folder in os.get_exec_path():
        for path in sorted(Path(folder).glob("*")) if Path(folder).is_dir() else ():
            if COMPILER.fullmatch(path.name) and path.is_file():
                found.setdefault(path.name, path.resolve())
    for path in [*Path("/usr/lib/gcc").rglob("cc1*"), *Path("/usr/libexec/gcc").rglob("cc1*")]:
        found.setdefault(path.name, path.resolve())
    return found


@dataclass(frozen=True)
class BareMachine:
    """An environment in `folder`, with a Python of its own, the other packages of this one, and no fastps.

    Its commands run in a mount namespace in which compilers, assemblers and linkers are covered by a file that cannot be run,
    and the checkout by an empty folder. Everything else is this machine. The installed packages of this environment, fastps
    aside, stay readable under another path.
    """

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


def make_bare(folder: Path) -> BareMachine:
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


@pytest.fixture(scope="module")
def tool() -> Any:
    """tools/wheels.py as a module."""
    return loaded(TOOL)


def _wheel_with(path: Path, *files: Path, source: bool = True) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.write(file, f"fastps/kernels/{file.parent.name}/{file.name}")
        for suffix in (".cpp", ".hpp") if source else ():
            archive.writestr(f"fastps/kernels/tensors/torch_tensors{suffix}", "")
    return path


def test_a_binary_that_knows_torch_is_found(tool: Any, tmp_path: Path) -> None:
    loops = next((ROOT / "kernels/tensors").glob("torch_tensors.*.so"), None)
    if loops is None:
        pytest.skip("this tree is built without torch")
    faults = "\n".join(tool.faults_of(_wheel_with(tmp_path / "a.whl", loops)))
    assert "expected libraries of glibc only, found libtorch_cpu.so" in faults
    assert "expected no symbol of torch, found _ZN3c10" in faults


def test_a_wheel_without_the_source_of_the_loops_is_found(tool: Any, tmp_path: Path) -> None:
    faults = list(tool.faults_of(_wheel_with(tmp_path / "a.whl", source=False)))
    assert len(faults) == 2 and "torch_tensors.cpp" in faults[0]


def test_the_kernels_have_no_faults_and_fit_the_glibc_of_the_wheel(tool: Any, tmp_path: Path) -> None:
    kernels = [path for path in (ROOT / "kernels").rglob("*.so") if not path.name.startswith("torch_tensors")]
    assert not list(tool.faults_of(_wheel_with(tmp_path / "a.whl", *kernels)))
    newest = max(tuple(map(int, version)) for path in kernels for version in _glibc_versions(path))
    assert newest <= (2, 28)


def _glibc_versions(path: Path) -> list[list[str]]:
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    with path.open("rb") as file:
        sections = [one for one in ELFFile(file).iter_sections() if isinstance(one, GNUVerNeedSection)]
        names = [need.name for section in sections for _, needs in section.iter_versions() for need in needs]
    return [name.removeprefix("GLIBC_").split(".")[:2] for name in names if name.startswith("GLIBC_")]


def test_an_interpreter_that_is_not_there_is_named(tool: Any) -> None:
    assert tool.interpreter("python2.0") is None
    assert tool.interpreter(sys.executable) == Path(sys.executable)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a wheel takes minutes where its compiler's results are not cached
def test_two_builds_are_the_same_bytes(tool: Any, wheel: Path, tmp_path: Path) -> None:
    [source] = wheel.parent.glob("*.tar.gz")
    again = tool.source_distribution(tmp_path)
    assert again.read_bytes() == source.read_bytes()
    assert tool.wheel(Path(sys.executable), again, tmp_path).read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this interpreter, built by the tool."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, TOOL, "--out", out, sys.executable]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    [made] = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def machine(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> BareMachine:
    """A machine without a compiler, with the wheel installed from the file alone."""
    made = make_bare(tmp_path_factory.mktemp("bare"))
    ended = made.run(made.python, "-m", "pip", "install", "--no-index", f"fastps[demo] @ {wheel.as_uri()}")
    assert ended.returncode == 0, ended.stderr
    return made


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_bare_machine_has_neither_compiler_nor_source(machine: BareMachine) -> None:
    assert compilers(), "a machine that has none proves nothing here, and the next tests all the more"
    assert that_run(machine) == []
    assert machine.run("ls", "-A", ROOT).stdout == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_trains_and_the_doctor_agrees(machine: BareMachine) -> None:
    doctor = machine.run("fastps", "doctor", "--json", "doctor.json")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    rows = json.loads((machine.folder / "work/doctor.json").read_text())["rows"]
    shown = next(row["shown"] for row in rows if row["name"] == "torch")
    assert "loops over Python's attributes" in shown and "FASTPS_TENSOR_LOOPS=build fastps doctor" in shown
    trained = machine.run("fastps", "train", "--workers", "2", "--epochs", "1", "--json", "train.json")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    [row] = json.loads((machine.folder / "work/train.json").read_text())["rows"]
    assert row["test_accuracy"] > 0.7
    assert not list((machine.folder / "home").rglob("*.so"))  # nothing was built


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rule_of_ones_own_needs_no_compiler(machine: BareMachine) -> None:
    (machine.folder / "work/own_rule.py").write_text(OWN_RULE)
    ended = machine.run("fastps", "run", "-n", "2", "own_rule.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "weight -0.5" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_asking_for_a_build_without_a_compiler_is_refused_in_one_sentence(machine: BareMachine) -> None:
    ended = machine.run("fastps", "doctor", FASTPS_TENSOR_LOOPS="build", CXX="")
    assert ended.returncode != 0
    assert "expected a C++ compiler (c++ or g++ or clang++), found none" in ended.stderr.replace("\n", " ")
