"""What the documentation shows is run: the examples of docstrings."""

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import fastps
from tests.support.scripts import modules_of

ROOT = Path(__file__).parents[1]


OF_BENCH = ["fastps.bench.nodes", "fastps.bench.tables", "fastps.bench.two_nodes.namespaces"]  # others import frameworks
NAMES = [*modules_of(fastps), *OF_BENCH]
ROOMS = sorted({".".join(name.split(".")[:2]) for name in NAMES})


SLOW = ("fastps.evaluation", "fastps.integrations", "fastps.processes")  # they import frameworks, and start processes


@pytest.mark.parametrize("room", [pytest.param(room, marks=[pytest.mark.slow] * (room in SLOW)) for room in ROOMS])
@pytest.mark.sampled(4)
def test_docstring_examples_do_what_they_show(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "FASTPS_JOB", "FASTPS_SYNC"):
        monkeypatch.delenv(variable, raising=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for name in [name for name in NAMES if f"{name}.".startswith(f"{room}.")]:
        try:
            module = importlib.import_module(name)
        except ImportError:
            if room != "fastps.integrations":
                raise
            continue  # the framework is not installed, or does not import beside this folder's `kernels`
        for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
            runner.run(example)
    assert runner.failures == 0, "see the captured output"


def test_some_examples_were_found_in_both_packages() -> None:
    for name in ("fastps.job.policy", "fastps.store.store", "fastps.torch.optimizer", "fastps.kernels.scheduling.scheduler"):
        found = doctest.DocTestFinder().find(importlib.import_module(name), name)
        assert any(example.examples for example in found), name


def test_every_file_that_the_documents_name_exists() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not documents[0].exists():
        pytest.skip("tests run without the source tree")
    for document in documents:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
        for path in re.findall(r"`((?:tests|docs|examples|kernels|fastps|bench)/[\w./]+\.\w+)`", document.read_text()):
            assert (ROOT / path).exists(), f"{document.name}: {path}"


def test_no_error_sends_to_a_registry_for_fastps_and_every_extra_that_one_names_exists() -> None:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("tests run without the source tree")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(
        file.read_text() for folder in ("fastps", "kernels", "bench") for file in sorted((ROOT / folder).rglob("*.py"))
    )
    assert "fastps[" not in text
    named = set(re.findall(r"'\.\[(\w+)\]'|how_to_install\('(\w+)'\)", text))
    assert {"cuda12", "demo", "peers"} <= {name for pair in named for name in pair if name} <= set(extras)
