"""Loops over tensors that are built on this machine: where they lie, that one process builds, and what is refused."""

import os
import stat
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch

from fastps.errors import UsageError
from fastps.kernels.tensors import torch_tensors
from fastps.torch import built_loops

BUILD_ELSEWHERE = """
import sys
sys.modules["fastps.kernels.tensors.torch_tensors"] = None
import torch
from fastps.torch import tensor_loops
parameter = torch.nn.Parameter(torch.zeros(2))
loops = tensor_loops.tensor_loops([parameter])
loops.show(loops.prepare([torch.ones(2)]))
print(type(loops).__name__, parameter.tolist(), tensor_loops.why_not_compiled())
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder. The package has the C++ source, as a wheel has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = built_loops.path_of_build()
    if path is None:
        pytest.skip("this tree was built without the C++ source of the loops")
    return path.parent


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compiler that counts its calls, takes a while, and gives out the module that fastps' own build made."""
    script = tmp_path / "slow-c++"
    script.write_text(
        f'#!/bin/sh\necho call >> {tmp_path}/calls\nsleep 0.2\nwhile [ "$1" != -o ]; do shift; done\n'
        f'cp {torch_tensors.__file__} "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return tmp_path / "calls"


def test_without_a_build_there_is_nothing_to_load(cache: Path) -> None:
    assert built_loops.load() is None and not cache.exists()


def test_a_build_is_found_by_the_next_load(cache: Path, compiler: Path) -> None:
    assert built_loops.build().BUILT_FOR == torch_tensors.BUILT_FOR
    found = built_loops.load()
    assert found is not None and found.BUILT_FOR == torch_tensors.BUILT_FOR
    assert Path(str(found.__file__)).parent == cache and stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_processes_that_build_at_once_compile_once(cache: Path, compiler: Path) -> None:
    building = [threading.Thread(target=built_loops.build) for _ in range(3)]  # flock is by open file, so threads wait, too
    for thread in building:
        thread.start()
    for thread in building:
        thread.join()
    assert compiler.read_text() == "call\n"
    assert len(list(cache.glob("*.so"))) == 1 and not [path for path in cache.iterdir() if path.is_dir()]


def test_another_source_or_torch_is_another_build(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = built_loops.path_of_build()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    other_torch = built_loops.path_of_build()
    (tmp_path / "tensors").mkdir()
    for name in built_loops.SOURCES:
        (tmp_path / "tensors" / name).write_text("other")
    monkeypatch.setattr(built_loops, "KERNELS", tmp_path)
    assert len({before, other_torch, built_loops.path_of_build()}) == 3


@pytest.mark.parametrize(("compiler_name", "sentence"), [
    ("no-such-c++", r"expected a C\+\+ compiler \(no-such-c\+\+\), found none: install one"),
    ("false", r"expected false to compile the loops, found exit code 1 \(no output\): see .*\.log"),
])  # fmt: skip
def test_a_build_that_cannot_be_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler_name: str, sentence: str
) -> None:
    monkeypatch.setenv("CXX", compiler_name)
    with pytest.raises(UsageError, match=sentence):
        built_loops.build()
    assert not list(cache.glob("*.so"))


def test_missing_headers_are_named(cache: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match=r"expected the header .*Python\.h, found none: .*python3-dev"):
        built_loops.build()


@pytest.mark.usefixtures("cache")
def test_a_cache_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"expected a folder to write to at .*set XDG_CACHE_HOME"):
        built_loops.build()


def test_a_build_that_does_not_load_is_left_alone_and_said(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = built_loops.path_of_build()
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    assert built_loops.load() is None
    assert "does not load" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loops_are_built_for_this_torch_and_used(cache: Path, tmp_path: Path) -> None:
    def run(loops: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", BUILD_ELSEWHERE],
            env={**os.environ, "FASTPS_TENSOR_LOOPS": loops},
            capture_output=True, text=True, check=True,
        )  # fmt: skip

    assert run("auto").stdout.startswith("TensorLoops [1.0, 1.0] loops over Python's attributes")
    built = run("build")
    assert built.stdout == "CompiledLoops [1.0, 1.0] None\n" and built.stderr.count("building the loops") == 1
    again = run("auto")
    assert again.stdout == built.stdout and again.stderr == ""
