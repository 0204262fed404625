"""`python -m fastps.bench.tables`: write the tables of docs/benchmarks.md and README.md from docs/benchmarks/*.json.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->` and is made from NAME.json: command, machine,
statistic, columns and rows. Numbers keep the digits that the file has, so that 1.10 stays 1.10. With `--check` the page stays
as it is, and the exit code is 1 if it differs. Standard library only; it measures nothing.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

PAGES = ("benchmarks.md", "../README.md")  # from the documentation's folder
FIGURES = "benchmarks"
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_UNITS = (("s", 0), ("ms", 3), ("µs", 6), ("ns", 9))


class TableError(Exception):
    """A page or a file of figures is not as the docstring of this module says; the message is one sentence."""


def shown(value: Any, unit: str) -> str:
    """A cell. Units: "count" and "ratio" of numbers, "seconds" with the unit that fits, "text". None is a dash.

    >>> shown(25000, "count"), shown(Decimal("1.10"), "ratio"), shown(Decimal("1.15e-5"), "seconds"), shown(None, "ratio")
    ('25,000', '1.10', '11.5 µs', '-')
    """
    if value is None:
        return "-"
    if unit == "text":
        return str(value)
    number = Decimal(value)
    if unit == "count":
        return f"{number:,f}"
    if unit == "ratio":
        return f"{number:f}"
    if unit == "seconds":
        name, digits = next((each for each in _UNITS if abs(number).scaleb(each[1]) >= 1), _UNITS[-1])
        return f"{number.scaleb(digits):f} {name}"
    raise TableError(f"expected the unit count, ratio, seconds or text, found {unit!r}")


def table(figures: Mapping[str, Any]) -> str:
    """The table of one file, with what was run and where, as Markdown.

    >>> columns = [{"key": "sync", "heading": "sync", "unit": "text"}, {"key": "step", "heading": "a step", "unit": "seconds"}]
    >>> told = {"command": "fastps bench step", "machine": "a machine", "measured": "today", "statistic": "Median of 7"}
    >>> print(table(told | {"columns": columns, "rows": [{"sync": "bsp", "step": Decimal("4.8e-4")}]}))
    `fastps bench step`
    <BLANKLINE>
    | sync | a step |
    |---|---:|
    | bsp | 480 µs |
    <BLANKLINE>
    *Median of 7. Machine: a machine. Measured: today.*
    """
    columns = figures["columns"]
    lines = [f"`{figures['command']}`", ""]
    lines.append(_row([column["heading"] for column in columns]))
    lines.append("|" + "|".join("---" if column["unit"] == "text" else "---:" for column in columns) + "|")
    lines += [_row([shown(row[column["key"]], column["unit"]) for column in columns]) for row in figures["rows"]]
    lines += ["", f"*{figures['statistic']}. Machine: {figures['machine']}. Measured: {figures['measured']}.*"]
    return "\n".join(lines)


def rewritten(page: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with each of its tables made anew. Raises TableError for a table without a file.

    >>> rewritten("<!-- table: step -->", {})
    Traceback (most recent call last):
    ...
    fastps.bench.tables.TableError: 'table: step' is not followed by '<!-- end of table -->'
    """
    unended = set(re.findall(r"<!-- table: ([\w-]+) -->", page)) - set(_named(page))
    if unended:
        raise TableError(f"'table: {min(unended)}' is not followed by '<!-- end of table -->'")
    return _TABLE.sub(lambda match: f"{match[1]}\n{table(figures[match[2]])}\n\n{match[3]}", page)


def _named(page: str) -> list[str]:
    return [match[2] for match in _TABLE.finditer(page)]


def read_figures(folder: Path) -> dict[str, Any]:
    """All files of figures by name, but reports of GPUs, which have a table of their own (fastps.bench.gpu.table).

    Floats are Decimals, so that they keep their digits. Raises TableError.
    """
    figures = {}
    for file in sorted(file for file in folder.glob("*.json") if not file.name.startswith("gpu-")):
        try:
            figures[file.stem] = json.loads(file.read_text(), parse_float=Decimal)
        except ValueError as error:
            raise TableError(f"{file} is not JSON: {error}") from None
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or with --check compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastps.bench.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="the folder of the documentation (default: docs)")
    options = parser.parse_args(arguments)
    pages = [page for page in (options.docs / name for name in PAGES) if page.exists()]
    try:
        figures = read_figures(options.docs / FIGURES)
        before = [page.read_text() for page in pages]
        named = sorted(name for text in before for name in _named(text))
        if named != sorted(figures):
            raise TableError(f"expected one table for each of {', '.join(sorted(figures))}, found {', '.join(named)}")
        after = [rewritten(text, figures) for text in before]
    except (OSError, TableError, KeyError) as error:
        reason = f"a key is missing: {error}" if isinstance(error, KeyError) else str(error)
        sys.stderr.write(f"fastps.bench.tables: {reason}\n")
        return 2
    for page, old, new in zip(pages, before, after, strict=True):
        if options.check and old != new:
            sys.stderr.write(f"fastps.bench.tables: {page} differs from its figures: run `python -m fastps.bench.tables`\n")
            return 1
        if not options.check:
            page.write_text(new)
    return 0


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
