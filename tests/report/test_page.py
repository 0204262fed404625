"""The page as a file: complete, without a request, escaped, and with a sentence where a package is missing."""

import base64
import hashlib
import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fastps.errors import UsageError
from fastps.report import page as module
from fastps.report.figure import Figure, Table
from fastps.report.findings import Finding
from fastps.report.page import Fact, Page, Part, check_installed, html, write

EVIL = '</script><script>alert("x")</script><img src=x>'


class Parsed(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._is_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_script = tag == "script"
        if self._is_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        if self._is_script:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def text() -> str:
    pytest.importorskip("plotly")
    figure = Figure("steps", EVIL, EVIL, EVIL, {"data": [{"name": EVIL}], "layout": {}}, 200, Table([EVIL], [[EVIL]]), EVIL)
    finding = Finding("kind", "bad", EVIL, EVIL)
    return html(Page(EVIL, EVIL, EVIL, [Fact(EVIL, EVIL)], [finding], [figure], [Part("part", EVIL)]))


def test_no_text_of_a_trace_becomes_markup(text: str) -> None:
    parsed = Parsed(text)
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "figures"}, {}, {}]
    assert json.loads(parsed.scripts[0])[0]["spec"]["data"][0]["name"] == EVIL


def test_the_policy_names_the_scripts_by_their_hashes_and_allows_no_request(text: str) -> None:
    parsed = Parsed(text)
    (policy,) = [str(each["content"]) for _, each in parsed.tags if each.get("http-equiv") == "Content-Security-Policy"]
    for script in parsed.scripts[1:]:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert policy.startswith("default-src 'none'; ") and "http" not in policy and "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in re.search(r"script-src [^;]*", policy)[0]  # type: ignore[index]
    assert not [attributes for _, attributes in parsed.tags if "src" in attributes or "onclick" in attributes]
    assert not [attributes for tag, attributes in parsed.tags if tag == "link"]


def test_the_page_has_a_title_a_language_headings_in_order_and_text_for_plots(text: str) -> None:
    parsed = Parsed(text)
    assert ("html", {"lang": "en"}) in parsed.tags and "title" in [tag for tag, _ in parsed.tags]
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and set(levels[1:]) == {2}
    plots = [attributes for _, attributes in parsed.tags if attributes.get("class") == "plot"]
    assert [each["role"] for each in plots] == ["img"] and all(each["aria-label"] for each in plots)
    assert ("th", {"scope": "row"}) in parsed.tags and ("th", {"scope": "col"}) in parsed.tags


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "plotly" else find(name, *rest))
    with pytest.raises(UsageError, match=r"a report needs plotly, which is not installed: pip install '\.\[report\]'"):
        check_installed()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "html", lambda page: "text")
    with pytest.raises(UsageError, match="the report cannot be written: Is a directory; choose another file"):
        write(Page("", "", "", [], [], []), tmp_path)


def test_name_of_a_file_that_is_no_text_is_shown_with_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "html", lambda page: page.heading)
    write(Page("", "bad\udcff.trace", "", [], [], []), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "bad?.trace"
