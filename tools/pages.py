"""Write what pages of docs/ show of the programs: example files, the help of each command, and the entries of the Python API.

    python tools/pages.py

So a page reads well as a file. A block whose title is a file of examples/ has the file's text; a block that begins with
`Usage: fastps COMMAND` has the command's help; below a heading `### fastps.NAME` is a name's call and first sentence. With
`--check` the pages stay as they are, and the exit code is 1 if one differs.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_FILE = re.compile(r'^(```\w+ title="(examples/[^"]+)"[^\n]*\n)(?:.*?\n)??(```)$', re.MULTILINE | re.DOTALL)
_HELP = re.compile(r"^```text\nUsage: fastps ([\w-]+)\b.*?^```$", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^### fastps\.(\w+)\n\n(?:(?!#).+\n)*", re.MULTILINE)
_WIDTH = 100  # columns of a help text


@cache
def _commands() -> dict[str, Any]:
    import typer

    from fastps.cli.main import app

    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def help_of(name: str) -> str:
    """What `fastps NAME --help` prints."""
    command = _commands()[name]
    context = command.context_class(command, info_name=f"fastps {name}", terminal_width=_WIDTH, max_content_width=_WIDTH)
    context.help_option_names = ["-h", "--help"]
    text: str = command.get_help(context)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def entry_of(name: str) -> str:
    """A name's call and the first sentence about it.

    >>> entry_of("world_size")
    '`fastps.world_size()`. The number of workers of the job; 1 when alone, and where no launcher has started this process.'
    """
    import fastps

    value = getattr(fastps, name)
    first = re.split(r"\n\s*\n|(?<=\.)(?<!al\.)\s", inspect.getdoc(value) or "", maxsplit=1)[0]
    first = " ".join(first.split())
    if isinstance(value, type) and issubclass(value, Exception):
        return first
    given = inspect.signature(value).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in given if " at 0x" not in str(each)]
    return f"`fastps.{name}{inspect.Signature(bare)}`. {first}"


def rewritten(page: str) -> str:
    """The page with all that it shows of the programs made anew. Raises OSError for a file of examples/ that is not there.

    >>> print(rewritten("### fastps.rank\\n\\nold\\n"))
    ### fastps.rank
    <BLANKLINE>
    `fastps.rank()`. This worker's number, from 0; 0 when alone, and where no launcher has started this process.
    <BLANKLINE>
    """
    page = _FILE.sub(lambda match: f"{match[1]}{(ROOT / match[2]).read_text().rstrip()}\n{match[3]}", page)
    page = _HELP.sub(lambda match: f"```text\n{help_of(match[1])}\n```", page)
    return _ENTRY.sub(lambda match: f"### fastps.{match[1]}\n\n{entry_of(match[1])}\n", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or with --check compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/pages.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")
    is_check = parser.parse_args(arguments).check
    changed = 0
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text()
        if (after := rewritten(before)) != before:
            changed += 1
            if is_check:
                sys.stderr.write(f"{page.relative_to(ROOT)} differs from the programs: run `python tools/pages.py`\n")
            else:
                page.write_text(after)
    return 1 if is_check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
