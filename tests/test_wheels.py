"""The wheel: what must not be in it, and that it installs and trains on a machine without a compiler."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import bare_machine
from tests.support.bare_machine import BareMachine
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
    made = bare_machine.make(tmp_path_factory.mktemp("bare"))
    ended = made.run(made.python, "-m", "pip", "install", "--no-index", f"fastps[demo] @ {wheel.as_uri()}")
    assert ended.returncode == 0, ended.stderr
    return made


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_bare_machine_has_neither_compiler_nor_source(machine: BareMachine) -> None:
    assert bare_machine.compilers(), "a machine that has none proves nothing here, and the next tests all the more"
    assert bare_machine.that_run(machine) == []
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
