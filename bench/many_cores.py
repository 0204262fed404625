"""What a machine with many cores shows within some minutes: `python -m fastps.bench.many_cores --minutes 5`.

It runs `fastps bench` once for each number of workers and size, the most telling first, and writes the rows of all runs after
each. A run that the minutes cut off, or that has no time left, is a row with the reason.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fastps.bench.measure import Row
from fastps.system.machine import machine

LEAST_S = 15.0  # that a run needs to start torch in each process and to measure once
STEP = ("step", "--against", "limit,gloo,hogwild", "--sync", "bsp")


def runs(workers: Sequence[int]) -> list[tuple[str, ...]]:
    """The arguments of `fastps bench` for each run, in their order: steps, trainings, readers.

    >>> runs([2])[0]
    ('step', '--against', 'limit,gloo,hogwild', '--sync', 'bsp', '--parameters', '1e6', '--workers', '2')
    """
    steps = [(*STEP, "--parameters", size, "--workers", str(each)) for size in ("1e6", "25e6", "25e3") for each in workers]
    trainings = [("train", "--against", "ddp,hogwild", "--workers", str(each)) for each in workers if each > 2]
    return [*steps[: len(workers)], *trainings, *steps[len(workers) :], ("readers", "--parameters", "25e6")]


def measure(run: Sequence[str], repeats: int, limit_s: float) -> list[Row]:
    """The rows of one run of `fastps bench`; one row with the reason if it fails or is not done within `limit_s` seconds."""
    with tempfile.TemporaryDirectory(prefix="fastps-many-cores-") as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "fastps.cli", "bench", *run, "--repeats", str(repeats), "--json", str(rows)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return [_missing(run, f"it did not end within {limit_s:.0f} s")]
        if ended.returncode:
            return [_missing(run, (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1])]
        found: list[Row] = json.loads(rows.read_text())["rows"]
        return found


def _missing(run: Sequence[str], reason: str) -> Row:
    return {"bench": run[0], "name": " ".join(run), "missing": reason}


def within(
    minutes: float, workers: Sequence[int], repeats: int, measure: Callable[[Sequence[str], int, float], list[Row]] = measure
) -> Iterator[tuple[str, list[Row]]]:
    """Each run's command and rows, in turn, within the minutes. A run may take what is left."""
    ends_s = time.monotonic() + 60 * minutes
    for run in runs(workers):
        left_s = ends_s - time.monotonic()
        reason = f"{max(0, left_s):.0f} s were left, expected at least {LEAST_S:.0f} s: raise --minutes"
        rows = [_missing(run, reason)] if left_s < LEAST_S else measure(run, repeats, left_s)
        yield f"fastps bench {' '.join(run)} --repeats {repeats}", rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, say what each run found, and write the file after each. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastps.bench.many_cores", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="all runs together (default: 5)")
    parser.add_argument("--workers", default="2,4,8,16", help="numbers of workers (default: 2,4,8,16)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each figure (default: 3)")
    parser.add_argument("--json", type=Path, default=Path("many-cores.json"), metavar="FILE", help="default: many-cores.json")
    given = parser.parse_args(arguments)
    found: list[Row] = []
    for command, rows in within(given.minutes, [int(each) for each in given.workers.split(",")], given.repeats):
        found += rows
        given.json.write_text(json.dumps({"machine": machine(), "minutes": given.minutes, "rows": found}, indent=2) + "\n")
        missing = [row["missing"] for row in rows if "missing" in row]
        sys.stdout.write(f"{command}: {f'{len(rows)} rows' if not missing else missing[0]}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
