"""The documentation is complete, the code that it shows runs, and the sentences that it quotes are those of the code."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest
import typer

import fastps
from fastps import errors
from fastps.cli.main import app
from fastps.job.specs import DISCIPLINES, MODIFIERS
from tests.support.scripts import loaded, output, program

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIAL = ROOT / "examples" / "tutorial"
VARIABLE = re.compile(r"\bFASTPS_[A-Z][A-Z_]*\b")

pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="tests run without the source tree")


def _environment() -> dict[str, str]:
    """The environment of a program that no launcher has started."""
    told = re.compile(r"FASTPS_|RANK$|LOCAL_RANK$|WORLD_SIZE$|MASTER_|TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not told.match(name)}


def _run(*command: str) -> str:
    return output(command, env=_environment(), cwd=ROOT)


# -- What there is has its place


def _names_on_api_page() -> set[str]:
    page = loaded(DOCS / "hooks" / "api.py").expanded((DOCS / "reference" / "api.md").read_text())
    return set(re.findall(r"^::: fastps\.(\w+)$", page, re.MULTILINE))


def test_api_page_has_every_public_name_and_no_other() -> None:
    assert _names_on_api_page() == set(fastps.__all__) - {"__version__"}


def test_every_public_error_has_a_place_on_the_api_page() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.Error)}
    assert len(kinds) > 10
    assert kinds <= _names_on_api_page()


def _sources() -> list[Path]:
    suffixes = {".py", ".pyx", ".pxd", ".h", ".hpp", ".cu"}
    folders = ("fastps", "kernels", "bench", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in suffixes]
    return [*(file for file in files if file != Path(__file__)), ROOT / "setup.py", ROOT / "Makefile"]


def test_table_of_environment_variables_has_those_of_the_sources_and_no_other() -> None:
    used = {name for file in _sources() for name in VARIABLE.findall(file.read_text())}
    rows = [line for line in (DOCS / "reference" / "environment.md").read_text().splitlines() if line.startswith("|")]
    described = {name for row in rows for name in VARIABLE.findall(row)}
    assert len(used) > 20
    assert used - described == set(), "used and not described"
    assert described - used == set(), "described and not used"


def test_table_of_disciplines_has_every_head_and_every_modifier() -> None:
    rows = re.findall(r"^\| `([\w*]+)", (DOCS / "which-discipline.md").read_text(), re.MULTILINE)
    assert set(rows) == {*DISCIPLINES, *MODIFIERS}


def test_tables_of_disciplines_are_those_of_the_code() -> None:
    tables = loaded(ROOT / "tools" / "discipline_tables.py")
    assert tables.main(["--check"]) == 0, "run `python tools/discipline_tables.py`"
    pages = "".join((DOCS / page).read_text() for page in tables.PAGES)
    assert set(re.findall(r"<!-- disciplines: (\w+) -->", pages)) == set(tables.TABLES)


def test_pages_show_the_programs_as_they_are_and_read_well_as_files(capfd: pytest.CaptureFixture[str]) -> None:
    assert loaded(ROOT / "tools" / "pages.py").main(["--check"]) == 0, capfd.readouterr().err
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        found = re.findall(r"^\s*(?:--8<--|:::|\?\?\?).*|<!-- (?!table|end of|disciplines:).*", page.read_text(), re.MULTILINE)
        assert found == [], f"{page}: what only the site shows"


def test_what_a_copy_button_copies_of_a_console_is_the_commands() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        for kind, first in re.findall(r"^```(\w+)[^\n]*\n([^\n]*)$", page.read_text(), re.MULTILINE):
            assert kind == "console" or not first.startswith("$ "), f"{page.name}: {first}"
    assert "[data-md-copying] .gp, [data-md-copying] .go" in (DOCS / "stylesheets" / "extra.css").read_text()


def test_every_discipline_has_its_paragraph() -> None:
    page = (DOCS / "disciplines.md").read_text().replace("\\*", "*")
    heads = set(re.findall(r"^\*\*([a-z0-9]+\*?)(?::[\w,]+)?\*\*", page, re.MULTILINE))
    without = sorted(set(DISCIPLINES) - heads - {"policy"})  # `policy` has a section
    assert without == [], "write a paragraph that begins with the spec in bold, such as **ssp:s**, in docs/disciplines.md"


def test_page_of_the_command_line_has_every_command() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    page = (DOCS / "reference" / "command-line.md").read_text()
    assert set(re.findall(r"^## fastps ([\w-]+)$", page, re.MULTILINE)) == commands
    assert set(re.findall(r"^Usage: fastps ([\w-]+)", page, re.MULTILINE)) == commands


def test_glossary_defines_each_word_once() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 40
    assert len(words) == len(set(words))
    kept = {
        "arena", "shard", "version", "slot", "staleness", "policy", "descriptor", "generation", "epoch", "push", "pull", "pin",
    }  # fmt: skip
    assert kept | {"fold", "grant", "shard lock", "combiner", "fenced", "work item", "push outcome"} <= set(words)


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"^ +- (?:[^:#\n]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages - named == set(), "not in mkdocs.yml"
    assert named - pages == set(), "in mkdocs.yml and not in docs/"


def test_the_tests_that_pages_name_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) == 20
    missing = [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert missing == []


# -- What is shown runs


def blocks_of(page: Path) -> list[str]:
    """The Python code of a page that is marked as whole."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL) if page.exists() else []


def _sides(page: Path) -> tuple[str, str]:
    """The program before and after the change that a page shows as a diff."""
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = shown.splitlines()
    sides = ["\n".join(line[1:] for line in lines if not line.startswith(other)) + "\n" for other in ("+", "-")]
    return sides[0], sides[1]


def test_readme_is_no_longer_than_it_was_and_shows_its_first_result_on_one_screen() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 121
    assert lines.index("```diff") < 25 and "fastps run -n 4 --sync dssp:3,15 train.py" in "\n".join(lines[:50])


def test_program_of_readme_runs_alone_after_its_change_of_three_lines_and_an_import(tmp_path: Path) -> None:
    before, after = _sides(ROOT / "README.md")
    assert "fastps" not in before and len(after.splitlines()) == len(before.splitlines()) + 4
    assert _run(*program(tmp_path, f"{after}print(opt.version, len(loader))\n")) == "16 16\n"


@pytest.mark.slow
def test_program_of_readme_runs_before_its_change_and_under_the_launcher_after_it(tmp_path: Path) -> None:
    before, after = _sides(ROOT / "README.md")
    _run(*program(tmp_path, before))
    script = program(tmp_path, f"{after}print(opt.version, len(loader))\n")[1]
    assert sorted(_fastps(script).splitlines()) == ["[0] 8 8", "[1] 8 8"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_code_of_the_page_on_notebooks_runs_as_a_script(tmp_path: Path) -> None:
    blocks = blocks_of(DOCS / "how-to" / "notebooks.md")
    assert len(blocks) == 3
    printed = _run(*program(tmp_path, "\n\n".join(blocks)))
    assert len(re.findall(r"^worker [01]: loss 0\.0\d+$", printed, re.MULTILINE)) == 2
    assert 'raise EmptyShareError("worker 1 has no samples")' in printed


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((DOCS / "coming-from").glob("*.md")), ids=lambda page: page.stem)
def test_code_for_those_who_come_from_elsewhere_runs(page: Path, tmp_path: Path) -> None:
    (code,) = blocks_of(page)
    _run(*program(tmp_path, code.replace('"model.pt"', f'"{tmp_path}/model.pt"')))


@pytest.mark.slow
def test_the_model_in_double_precision_of_the_page_on_scripts_trains(tmp_path: Path) -> None:
    (code,) = [block for block in blocks_of(DOCS / "how-to" / "own-script.md") if ".double()\n" in block]
    code += "print(model(x).dtype, next(model.parameters()).dtype)\n"
    assert _run(*program(tmp_path, code)) == "torch.float64 torch.float64\n"


def _fastps(*arguments: str) -> str:
    return _run(sys.executable, "-m", "fastps", "run", "-n", "2", *arguments)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_plain_loop_and_workers_of_the_tutorial_run() -> None:
    assert "20 batches" in _run(sys.executable, str(TUTORIAL / "plain.py"), "--steps", "20")
    assert "the job: 10 updates" in _fastps(str(TUTORIAL / "workers.py"), "--steps", "20")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resumed_script_of_the_tutorial_ends_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    script, runs = str(TUTORIAL / "resumable.py"), str(tmp_path / "runs")
    _fastps("--checkpoint", runs, "--every", "10", script, "--steps", "10")
    resumed = _fastps("--resume", runs, script, "--steps", "20")
    whole = _fastps(script, "--steps", "20")
    assert "begins at step 10" in resumed
    assert _last_line(resumed) == _last_line(whole)


def _last_line(output: str) -> str:
    return next(line for line in output.splitlines() if "the job:" in line)


def test_tutorial_shows_every_script_of_its_folder() -> None:
    page = (DOCS / "tutorial.md").read_text()
    shown = set(re.findall(r'^```python title="examples/tutorial/(\w+\.py)"', page, re.MULTILINE))
    assert shown == {file.name for file in TUTORIAL.glob("*.py")}
    assert shown - {"task.py"} == {"plain.py", "workers.py", "resumable.py"}, "a test for each"


# -- What is quoted is said


def _strings() -> str:
    """Every piece of text in fastps/, a line each; where a value is put into a sentence, a new piece begins."""
    pieces = []
    for file in sorted((ROOT / "fastps").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value.replace("\n", " "))
    return "\n".join(pieces)


def test_sentences_that_the_page_of_errors_quotes_are_those_that_the_code_prints() -> None:
    page, strings = (DOCS / "errors.md").read_text(), _strings()
    quotes = [line.removeprefix("> ") for line in page.splitlines() if line.startswith("> ")]
    assert len(quotes) >= 25
    pieces = [piece.strip() for quote in quotes for piece in re.split(r"\*[^*]*\*", quote)]
    assert [piece for piece in pieces if piece not in strings] == []
