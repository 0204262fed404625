"""Put the functions of all disciplines into reference/api.md, in place of `<!-- functions of all disciplines -->`."""

from typing import Any

_PAGE = "reference/api.md"
_MARKER = "<!-- functions of all disciplines -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the marker (an event of MkDocs)."""
    return expanded(markdown) if page.file.src_uri == _PAGE else markdown


def expanded(markdown: str) -> str:
    """Return the page with an entry for each name that the table's module exports, in the order of the table."""
    from fastps.job import disciplines

    names = [row.build.__name__ for row in disciplines.DISCIPLINES.values()]
    public = [name for name in names if name in disciplines.__all__]
    return markdown.replace(_MARKER, "\n\n".join(f"::: fastps.{name}" for name in public))
