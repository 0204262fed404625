"""Put the whole documentation of each name into reference/api.md, in place of the sentence that the file has."""

import re
from typing import Any

_PAGE = "reference/api.md"
_ENTRY = re.compile(r"^### fastps\.(\w+)\n\n(?:(?!#).+\n)*", re.MULTILINE)
_ALL_MEMBERS = "    options:\n      inherited_members: true\n"
_OF_A_STORE = "[create, attach, version, committed, close]"
_OF_A_WORKER = (
    "[step, push, advance, pull, weights, gradients, version, steps, loss, batch_size, wait_for_start, wait_for_others, close]"
)
_OPTIONS = {
    "DistributedOptimizer": _ALL_MEMBERS,
    "Reader": _ALL_MEMBERS,
    "Store": f"    options:\n      members: {_OF_A_STORE}\n",
    "Worker": f"{_ALL_MEMBERS}      members: {_OF_A_WORKER}\n",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the entries (an event of MkDocs)."""
    return expanded(markdown) if page.file.src_uri == _PAGE else markdown


def expanded(markdown: str) -> str:
    """Return the page with what mkdocstrings replaces by the documentation of each name."""
    return _ENTRY.sub(lambda match: f"::: fastps.{match[1]}\n{_OPTIONS.get(match[1], '')}", markdown)
