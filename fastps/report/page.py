"""One HTML page as one file that opens offline: findings, plots and tables, with plotly.js inside.

The page may load nothing: its Content-Security-Policy names the two scripts by their hashes and forbids every request.
"""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fastps.errors import UsageError
from fastps.report.figure import Figure, Table
from fastps.report.findings import Finding
from fastps.system.extras import how_to_install

_MARKS = {"bad": "✕", "warning": "▲", "note": "i", "good": "✓"}
_LEVELS = {"bad": "Problem", "warning": "Warning", "note": "Note", "good": "Good"}


@dataclass(frozen=True)
class Fact:
    """A number of the page's head, with a few words beside it."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class Part:
    """A section of sentences and a table."""

    name: str
    title: str
    sentences: Sequence[str] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Page:
    """What a page shows, from the top down."""

    title: str  # of the browser's tab
    heading: str  # the first heading
    what: str  # the line below it
    facts: Sequence[Fact]  # the numbers below that
    findings: Sequence[Finding]  # what a reader should see first, the worst first
    figures: Sequence[Figure]  # the plots
    tables: Sequence[Part] = ()  # sections of text
    notes: Sequence[Finding] = ()  # what else is worth knowing, below the first plot
    made: str = ""  # the last line: how the page was made


def write(page: Page, file: Path) -> None:
    """Write the page. Raises UsageError if a package of the extra is missing or the file cannot be written."""
    text = html(page)
    try:
        file.write_text(text, encoding="utf-8", errors="replace")  # a file name may be no text
    except OSError as error:
        raise UsageError(f"{file}: the report cannot be written: {error.strerror}; choose another file") from None


def check_installed() -> None:
    """Raise UsageError, which names the extra, if a package that pages need is missing."""
    for name in ("plotly", "jinja2"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"a report needs {name}, which is not installed: {how_to_install('report')}")


def html(page: Page) -> str:
    """Return the page as HTML. Raises UsageError if a package of the extra is missing."""
    check_installed()
    from jinja2 import Environment
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    plotly, script = (_embedded(text) for text in (get_plotlyjs(), _asset("page.js")))
    figures = [{"name": each.name, "spec": each.spec, "height": each.height, "extra": each.extra} for each in page.figures]
    template = Environment(autoescape=True, trim_blocks=False).from_string(_asset("page.html"))
    return template.render(
        page=page,
        marks=_MARKS,
        levels=_LEVELS,
        policy=_policy([plotly, script]),
        style=Markup(_asset("page.css")),
        data=Markup(json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")),
        plotly=Markup(plotly),
        script=Markup(script),
    )


def _asset(name: str) -> str:
    return (files("fastps.report") / name).read_text(encoding="utf-8")


def _embedded(script: str) -> str:
    """A script as a page holds it: a parser turns every end of line into a line feed, before the hash is checked."""
    return script.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: Sequence[str]) -> str:
    """The Content-Security-Policy: these scripts, styles and pictures of the page itself, and no request."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    own = "img-src data: blob:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {own}"
