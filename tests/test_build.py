"""What setup.py does besides compiling: levels of optimization by module, and what modules share."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("Cython")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, as it is for a plain install."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("tests run without the source tree")
    for variable in ("FASTPS_DEBUG", "FASTPS_HOOKS", "FASTPS_SANITIZE", "CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("fastps_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_modules_that_exist_have_a_level_of_their_own(build: ModuleType) -> None:
    assert set(build.LEVELS) <= {source.stem for source in (ROOT / "kernels").glob("*.pyx")}


def test_every_module_is_compiled_at_its_level_and_without_debugging_information(build: ModuleType) -> None:
    for extension in build.extensions():
        flags, module = extension.extra_compile_args, extension.name.rpartition(".")[2]
        assert [flag for flag in flags if flag.startswith("-O")] == [build.LEVELS.get(module, build.LEVEL)], module
        assert [flag for flag in flags if flag.startswith("-g")] == ["-g0"], module
        assert "-ffp-contract=off" in flags, module


def test_what_modules_share_is_compiled_with_them(build: ModuleType) -> None:
    assert [extension.name for extension in build.extensions()].count(build.SHARED) == 1
