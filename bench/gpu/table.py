"""The measured rows of docs/how-to/gpu.md from a file of `fastps gpu-check`: `python -m fastps.bench.gpu.table [FILE.json]`.

Without a file it takes the newest one of docs/benchmarks. Where there is none, the rows say that nothing has run on a GPU.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fastps.bench.measure import Row

NEVER = "never run on a GPU"
_RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks"
_TITLES = {
    "kernels": "the kernels against double precision",
    "bandwidth": "folds of 100 million parameters",
    "IPC": "memory and events shared between processes",
    "peers": "copies between GPUs",
    "fold over peers": "folds that read gradients on other GPUs",
    "one process": "one process against the CPU path",
    "two processes": "two processes on one GPU against the CPU path",
    "several GPUs": "a worker on each GPU against the CPU path",
    "several GPUs on one": "the same on one GPU that processes see as two",
    "faults": "the others go on after a worker's death",
    "training": "training on images, with and without AMP",
}


def newest(folder: Path = _RESULTS) -> Path | None:
    """The newest file of gpu-check in a folder, by the date in it; None if there is none."""
    files = sorted(folder.glob("gpu-*.json"), key=lambda path: str(json.loads(path.read_text())["date"]))
    return files[-1] if files else None


def table(found: dict[str, Any] | None) -> str:
    """The table in Markdown: a row for each kind of check. `found`: the contents of a file, or None.

    >>> print(table(None).splitlines()[2])
    | the kernels against double precision | never run on a GPU |
    """
    where = NEVER
    if found is not None:
        gpu = found["gpu"]
        where = f"{gpu.get('count', 1)} x {gpu['name']}, {str(found['date'])[:10]}"
    lines = [f"| check | {'measured' if found is None else where} |", "|---|---|"]
    for check, title in _TITLES.items():
        rows = [row for row in found["rows"] if row["check"] == check] if found is not None else []
        lines.append(f"| {title} | {_cell(check, rows)} |")
    return "\n".join(lines)


def _cell(check: str, rows: list[Row]) -> str:
    """The outcome of one kind of check, with its main figures."""
    if not rows:
        return NEVER
    run = [row for row in rows if row["ok"] is not None]
    if not run:
        return f"not run: {rows[0]['missing']}"
    passed = sum(bool(row["ok"]) for row in run)
    failed = [f"{row['name']} failed" for row in run if not row["ok"]]
    left_out = f"{len(rows) - len(run)} not run" if len(run) < len(rows) else ""
    return "; ".join(part for part in (f"{passed} of {len(run)} passed", *failed[:3], left_out, _figures(check, run)) if part)


def _figures(check: str, rows: list[Row]) -> str:
    if check == "bandwidth":
        bound = [row for row in rows if row.get("bound") is not None]
        return ", ".join(f"{row['name']} {row['limit_share']:.0%} of a copy's bandwidth" for row in bound)
    if check in ("peers", "fold over peers"):
        speeds = [row["bytes_per_s"] / 1e9 for row in rows if "bytes_per_s" in row]
        access = f", {sum(bool(row.get('access')) for row in rows)} pairs with peer access" if check == "peers" else ""
        return f"{min(speeds):.3g} to {max(speeds):.3g} GB/s{access}" if speeds else ""
    if check == "training":
        accuracies = [row["accuracy"] for row in rows if "accuracy" in row]
        return f"accuracy {min(accuracies):.3f} or more" if accuracies else ""
    differences = [row["difference"] for row in rows if row.get("difference") is not None]
    return f"greatest relative difference {max(differences):.1e}" if differences else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastps.bench.gpu.table", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a file of gpu-check (default: the newest of docs/benchmarks)")
    path = parser.parse_args(arguments).file or newest()
    sys.stdout.write(table(json.loads(path.read_text()) if path is not None else None) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
