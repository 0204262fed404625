"""What setup.py does besides compiling: levels of optimization by module, ccache where there is one, a line for each module."""

import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fastps
from tests.support.scripts import loaded

pytest.importorskip("Cython")
Distribution = pytest.importorskip("setuptools").Distribution

ROOT = Path(__file__).parents[1]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """setup.py as a module, as it is for a plain install."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("tests run without the source tree")
    for variable in ("FASTPS_DEBUG", "FASTPS_HOOKS", "FASTPS_SANITIZE", "CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(ROOT)
    return loaded(ROOT / "setup.py")


@pytest.fixture
def ccache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A ccache on the PATH that writes down what it is asked for, and lets the compiler do it."""
    script = tmp_path / "bin" / "ccache"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nexec "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    return script


def test_only_modules_that_exist_have_a_level_of_their_own(build: Any) -> None:
    assert set(build.LEVELS) <= {f"{source.parent.name}.{source.stem}" for source in (ROOT / "kernels").glob("*/*.pyx")}


def test_every_module_is_compiled_at_its_level_and_without_debugging_information(build: Any) -> None:
    for extension in build.extensions():
        flags, module = extension.extra_compile_args, extension.name.removeprefix("fastps.kernels.")
        assert [flag for flag in flags if flag.startswith("-O")] == [build.LEVELS.get(module, build.LEVEL)], module
        assert [flag for flag in flags if flag.startswith("-g")] == ["-g0"], module
        assert "-ffp-contract=off" in flags, module


def test_a_torch_whose_headers_do_not_fit_leaves_out_its_loops_and_does_not_end_the_build(build: Any) -> None:
    """Cython drops the word on the way."""
    assert [extension.optional for extension in build.torch_extension()] == [True]


def test_what_modules_share_is_compiled_with_them(build: Any) -> None:
    assert [extension.name for extension in build.extensions()].count(build.SHARED) == 1


@pytest.mark.parametrize(
    "cached", [(), ("ccache",), ("/opt/bin/ccache",), ("sccache",)], ids=lambda cached: "".join(cached) or "plain"
)
def test_compile_commands_go_through_ccache_where_there_is_one_and_once(
    build: Any, ccache: Path, cached: tuple[str, ...]
) -> None:
    assert build.behind_ccache([*cached, "cc", "-O2"]) == [*(cached or [str(ccache)]), "cc", "-O2"]


def test_no_ccache_is_needed(build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.behind_ccache(["cc", "-O2"]) == ["cc", "-O2"]


@pytest.mark.sampled(3)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("suffix", "parallel"), [("c", 1), ("c", 2), ("cpp", 1)])
def test_each_compiled_module_is_told_of_once(
    build: Any,
    ccache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    suffix: str,
    parallel: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("first", "second")
    for name in names:
        Path(f"{name}.{suffix}").write_text(f"int {name};\n")

    def lines() -> list[str]:
        extensions = [build.Extension(f"some.{name}", [f"{name}.{suffix}"]) for name in names]
        options = {"build_lib": ("test", "lib"), "build_temp": ("test", "objects"), "parallel": ("test", parallel)}
        distribution = Distribution({"name": "some", "ext_modules": extensions})
        distribution.get_option_dict("build_ext").update(options)
        command = build.Build(distribution)
        command.ensure_finalized()
        command.run()
        return sorted(line for line in capfd.readouterr().err.splitlines() if line.startswith("fastps: "))

    told = lines()
    assert {line.split()[2] for line in told} == {f"some.{name}" for name in names}
    assert {line.partition(" (")[2] for line in told} == {"1 of 2)", "2 of 2)"}
    asked = Path("asked").read_text().splitlines()
    assert [sum(f"{name}.{suffix}" in line and " -c " in line for line in asked) for name in names] == [1, 1]
    assert lines() == []  # all are newer than their sources


def test_a_copied_tree_stages_its_own_declarations(build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tree in ("first", "second"):
        (tmp_path / tree / "kernels").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "first")
    build.stage_cimports()
    shutil.copytree(tmp_path / "first/build", tmp_path / "second/build", symlinks=True)
    monkeypatch.chdir(tmp_path / "second")
    assert (Path(build.stage_cimports()) / "fastps/kernels").resolve() == tmp_path / "second/kernels"


def test_what_an_index_shows_has_the_addresses_of_all_files_and_images_from_one_constant(build: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = project["urls"]["Source"]
    assert all(address.startswith(source) for address in project["urls"].values()) and "readme" in project["dynamic"]
    targets = re.findall(r"\]\(([^)]+)\)", build.long_description())
    assert len(targets) > 30 and f"{source}/docs/images/overview.svg" in targets
    assert [target for target in targets if not target.startswith("https://")] == []
    paths = [target.removeprefix(f"{source}/").partition("#")[0] for target in targets if target.startswith(source)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_citation_has_the_version_and_the_five_papers(build: Any) -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {fastps.__version__}\n" in text
    assert len(re.findall(r"^  - type: (?:article|conference-paper|generic)$", text, re.MULTILINE)) == 5
