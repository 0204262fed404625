"""Cut the slow tests into slices that take about as long as each other.

    python tools/slices.py list 2/6                # print the test files of the second of six slices
    python tools/slices.py renew build/slow/*.xml  # write the times in these reports of pytest into tests/slow_times.json

A file's slow tests are all in one slice. The files are dealt by the times in `tests/slow_times.json`, the longest first, each
to the slice with the least time so far; a file without a time is dealt by its name. So each file, even a new one, is in one
slice.
"""

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / "tests" / "slow_times.json"


def deal(files: Iterable[str], times_s: Mapping[str, float], count: int) -> list[list[str]]:
    """The files of each of `count` slices; `times_s` has the seconds of some."""
    slices: list[list[str]] = [[] for _ in range(count)]
    loads_s = [0.0] * count
    for file in sorted(files, key=lambda file: (-times_s.get(file, 0.0), file)):
        if file in times_s:
            index = loads_s.index(min(loads_s))
            loads_s[index] += times_s[file]
        else:
            index = zlib.crc32(file.encode()) % count
        slices[index].append(file)
    return slices


def test_files() -> list[str]:
    """All test files, from the root of the repository."""
    return [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]


def read_times() -> dict[str, float]:
    """The seconds of each file's slow tests, where they were measured."""
    times_s: dict[str, float] = json.loads(TIMES.read_text())
    return times_s


def parse_slice(text: str) -> tuple[int, int]:
    """The index and the count of "2/6", which are 1 and 6."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected a slice such as 2/6, its number from 1 on, found {text!r}")
    return int(number) - 1, int(count)


def measured_s(reports: Iterable[Path]) -> dict[str, float]:
    """The seconds of each file in reports of pytest (--junitxml, -o junit_family=xunit1)."""
    times_s: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.attrib["file"]
            times_s[file] = times_s.get(file, 0.0) + float(case.attrib["time"])
    return times_s


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the files of a slice").add_argument("slice", type=parse_slice)
    commands.add_parser("renew", help="renew the times from reports").add_argument("reports", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "list":
        index, count = given.slice
        print(*deal(test_files(), read_times(), count)[index], sep="\n")
        return
    known_s = {**read_times(), **measured_s(given.reports)}
    times_s = {file: round(each) for file, each in sorted(known_s.items()) if (ROOT / file).exists()}
    TIMES.write_text(json.dumps(times_s, indent=1) + "\n")
    print(f"{TIMES}: {len(times_s)} files, {sum(times_s.values())} s", file=sys.stderr)


if __name__ == "__main__":
    main()
