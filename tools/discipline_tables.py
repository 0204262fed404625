"""Write the tables of disciplines in docs/ from the one table in fastps/job/disciplines.py.

    python tools/discipline_tables.py

A table stands between `<!-- disciplines: NAME -->` and `<!-- end of disciplines -->`. With `--check` the pages stay as they
are, and the exit code is 1 if one differs.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fastps.errors import PolicyError
from fastps.job.disciplines import DISCIPLINES, Discipline
from fastps.job.specs import parse_policy

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("which-discipline.md", "disciplines.md")
_TABLE = re.compile(r"(<!-- disciplines: (\w+) -->\n).*?(<!-- end of disciplines -->)", re.DOTALL)


def spec_of(row: Discipline) -> str:
    """The usage without its options: `dssp:lo,hi`."""
    return f"`{row.usage.partition('[,')[0]}`"


def choices() -> str:
    """What each does, and when to use it."""
    cells = [(spec_of(row), row.does, row.staleness, row.use, row.paper) for row in DISCIPLINES.values()]
    return _markdown(("spec", "what it does", "staleness", "when to use it", "paper"), cells)


def values() -> str:
    """The values of the policy that the first example of each row makes."""
    rows = [(row, parse_policy(row.examples[0])) for row in DISCIPLINES.values()]
    cells = [(spec_of(row), policy.fold, policy.grant, policy.scale) for row, policy in rows if row.build is not type(policy)]
    return _markdown(("spec", "fold", "grant", "scale"), cells)


def modifiers() -> str:
    """Which modifiers the first example of each row accepts."""
    tried = ("scale=1/sigma", "pull=0.75", "shards=4", "stagger=0.8", "combine=true", "ema=0.999", "clip=1", "momentum=worker")
    rows = [row for name, row in DISCIPLINES.items() if name != "policy"]
    cells = [(spec_of(row), *(_accepts(f"{row.examples[0]},{modifier}") for modifier in tried)) for row in rows]
    return _markdown(("spec", *(f"`{modifier}`" for modifier in tried)), cells)


def _accepts(spec: str) -> str:
    """Whether a spec is accepted, as a cell."""
    try:
        parse_policy(spec)
    except PolicyError:
        return "-"
    return "yes"


TABLES: dict[str, Callable[[], str]] = {"choices": choices, "modifiers": modifiers, "values": values}


def rewritten(page: str) -> str:
    """The page with its tables made anew. Raises KeyError for a table of another name.

    >>> rewritten("<!-- disciplines: values -->\\n<!-- end of disciplines -->").splitlines()[4]
    '| `bsp` | all | next-version | mean |'
    """
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or with --check compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/discipline_tables.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")
    is_check = parser.parse_args(arguments).check
    changed = [page for page in PAGES if rewritten((DOCS / page).read_text()) != (DOCS / page).read_text()]
    for page in changed:
        if is_check:
            sys.stderr.write(f"docs/{page} differs from the table of disciplines: run `python tools/discipline_tables.py`\n")
        else:
            (DOCS / page).write_text(rewritten((DOCS / page).read_text()))
    return 1 if is_check and changed else 0


def _markdown(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
