"""docs/errors.md quotes sentences that the code really prints."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"


def _strings() -> str:
    """Every piece of text in fastps/, a line each; where a value is put into a sentence, a new piece begins."""
    pieces = []
    for file in sorted((ROOT / "fastps").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value.replace("\n", " "))
    return "\n".join(pieces)


def _quotes() -> list[str]:
    return [line.removeprefix("> ") for line in PAGE.read_text().splitlines() if line.startswith("> ")]


def test_page_quotes_many_sentences() -> None:
    assert len(_quotes()) >= 25


def test_quoted_sentences_are_those_that_the_code_prints() -> None:
    strings = _strings()
    pieces = [piece.strip() for quote in _quotes() for piece in re.split(r"\*[^*]*\*", quote)]
    assert [piece for piece in pieces if piece not in strings] == []
