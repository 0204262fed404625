"""The report of the GPU check: a file of JSON or a page, complete after each part, whose first lines say what works.

It has no name of a host and no path of a home, so that its owner can send it to others.
"""

import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastps.bench.gpu.surroundings import surroundings
from fastps.bench.measure import Row
from fastps.report import page
from fastps.report.figure import Table
from fastps.report.findings import BAD, GOOD, NOTE, Finding
from fastps.system.machine import machine
from fastps.version import __version__

_WORDS = {True: "ok", False: "FAIL", None: "not run"}
_FORMS = {"difference": "{:.2g}", "limit_share": "{:.3f}", "accuracy": "{:.3f}", "steps_per_s": "{:.0f}", "missing": "{}"}
_FORMS |= {"access": "{}", "bytes_per_s": "{:.3g}", "ratio": "{:.2f}", "version": "{}", "steps_per_s_median": "{:.0f}"}


def not_run(check: str, name: str, reason: str) -> Row:
    """A row for a check that does not apply to this machine: neither passed nor failed."""
    return {"check": check, "name": name, "ok": None, "missing": reason}


class Report:
    """The rows of the parts so far, and what is written about them. Raises UsageError if pages need a missing package.

    Attributes:
        file: where it is written; by default gpu-NAME-DATE.json in the current folder.
    """

    def __init__(self, gpu: Mapping[str, Any], file: Path | None = None, quick: bool = False) -> None:
        now = datetime.now(UTC)
        name = "".join(letter if letter.isalnum() else "-" for letter in str(gpu["name"]).lower())
        self.file = file or Path(f"gpu-{name}-{now:%Y-%m-%d}.json")
        self._is_page = self.file.suffix.lower() in (".html", ".htm")
        if self._is_page:
            page.check_installed()
        self._head: dict[str, Any] = {"command": "gpu-check", "version": __version__, "quick": quick}
        self._head["date"] = now.isoformat(timespec="seconds")
        self._head |= {"machine": machine(), "gpu": dict(gpu), "surroundings": surroundings()}
        self._parts: dict[str, list[Row]] = {}
        self._seconds: dict[str, float] = {}

    def expect(self, parts: Iterable[str]) -> None:
        """Name the parts, and write a report in which none has been reached."""
        self._parts = {name: [not_run(name, "all", "the check ended before this part")] for name in parts}
        self._write()

    def add(self, part: str, rows: Sequence[Row], seconds: float) -> str:
        """Take the rows of a part and write the report; returns a line about the part."""
        self._parts[part], self._seconds[part] = list(rows), round(seconds, 1)
        self._write()
        return _line(part, rows, seconds)

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order of the parts."""
        return [row for rows in self._parts.values() for row in rows]

    @property
    def passed(self) -> bool:
        """Whether all that could run passed."""
        return all(row["ok"] is not False for row in self.rows) and any(row["ok"] for row in self.rows)

    def says(self) -> list[str]:
        """What works here, and what to use, in sentences."""
        passed = {part: _outcome(rows) for part, rows in self._parts.items()}
        listed = {word: ", ".join(part for part in passed if passed[part] is is_ok) for is_ok, word in _WORDS.items()}
        told = [f"Works: {listed['ok'] or 'nothing'}."]
        told += [f"Does not work: {listed['FAIL']}."] * bool(listed["FAIL"])
        told += [f"Not run: {listed['not run']}."] * bool(listed["not run"])
        return [*told, *_advice(self._parts, passed, self._head["surroundings"])]

    def _write(self) -> None:
        """Write the file as a whole: one that a reader finds is complete."""
        draft = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        if self._is_page:
            page.write(self._page(), draft)
        else:
            found = {"says": self.says(), **self._head, "seconds": self._seconds, "rows": self.rows}
            draft.write_text(json.dumps(scrubbed(found), indent=2, allow_nan=False) + "\n")
        draft.replace(self.file)

    def _page(self) -> page.Page:
        gpu, around = self._head["gpu"], scrubbed(self._head["surroundings"])
        heading = f"{gpu['count']} x {gpu['name']}"
        facts = [page.Fact("fastps", __version__, str(self._head["date"])[:10])]
        facts += [page.Fact(name, str(version)) for name, version in around["versions"].items() if name != "fastps"]
        failed = [row for row in self.rows if row["ok"] is False]
        findings = [Finding("says", NOTE if failed else GOOD, sentence) for sentence in self.says()]
        findings += [Finding("failed", BAD, f"{row['check']} {row['name']} failed.", figures(scrubbed(row))) for row in failed]
        tables = [page.Part(name.replace(" ", "-"), name, (), _table(scrubbed(rows))) for name, rows in self._parts.items()]
        about = [[name, json.dumps(value)] for name, value in {**around, "machine": self._head["machine"], "gpu": gpu}.items()]
        tables.append(page.Part("machine", "The machine", (), Table(("what", "found"), about)))
        made = f"Made by fastps gpu-check {__version__}. This file holds all that it shows, and loads nothing."
        title, what = f"{heading}: fastps gpu-check", "What of fastps works here"
        return page.Page(title, heading, what, facts, findings, (), tables, made=made)


def _outcome(rows: Sequence[Row]) -> bool | None:
    """False if a row failed, True if one passed, else None."""
    found = [row["ok"] for row in rows if row["ok"] is not None]
    return all(found) if found else None


def _advice(parts: Mapping[str, Sequence[Row]], passed: Mapping[str, bool | None], around: Mapping[str, Any]) -> list[str]:
    """What to use, by what has passed, and what of the machine stands against it."""
    both = {
        place: _outcome([row for row in parts.get("two processes", ()) if place in str(row["name"])])
        for place in ("device", "host")
    }
    one, several = passed.get("kernels") and passed.get("IPC") and both["device"], passed.get("several GPUs")
    told = []
    if one is not None:
        host = "nothing, for host memory failed, too" if both["host"] is False else "FASTPS_PLACEMENT=host"
        what = "the default, shards on the GPU" if one else host
        told.append(f"Use on one GPU: {what}.")
    if several is not None:
        what = "FASTPS_PLACEMENT=device" if one and several else "the default, shards in host memory"
        told.append(f"Use on several GPUs: {what}.")
    modes = {gpu.get("compute_mode", "Default") for gpu in around["gpus"] or ()}
    told += [
        f"The compute mode is {mode}: only one process can use a GPU, or the server of MPS." for mode in modes - {"Default"}
    ]
    if around["mig_devices"]:
        told.append("MIG is on: processes on two of its devices share no memory, so use FASTPS_PLACEMENT=host for them.")
    if one and not around["mps"]:
        told.append("Workers that share a GPU take turns there: MPS does not run (nvidia-cuda-mps-control -d starts it).")
    return told


def _line(part: str, rows: Sequence[Row], seconds: float) -> str:
    """One line about a part."""
    run = [row for row in rows if row["ok"] is not None]
    if not run:
        return f"{part}: not run, {rows[0]['missing']}"
    failed = [row for row in run if not row["ok"]]
    text = f"{part}: {len(run) - len(failed)} of {len(run)} passed, {seconds:.0f} s"
    return f"{text}; {failed[0]['name']} failed: {figures(failed[0])}" if failed else text


def figures(row: Row) -> str:
    """Format the main figures of a row."""
    return " ".join(f"{key}={form.format(row[key])}" for key, form in _FORMS.items() if row.get(key) is not None)


def _table(rows: Sequence[Row]) -> Table:
    told = [[str(row["name"]), _WORDS[row["ok"]], figures(row), "\n".join(row.get("output", ()))] for row in rows]
    return Table(
        ("check", "outcome", "figures", "output"), told, [index for index, row in enumerate(rows) if row["ok"] is False]
    )


def scrubbed(value: Any) -> Any:
    """A value of JSON without the host's name and the home's path, and None for numbers that are not finite.

    >>> scrubbed({"a": [float("inf"), str(Path.home() / "x")]})
    {'a': [None, '~/x']}
    """
    if isinstance(value, dict):
        return {key: scrubbed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, str):
        return value
    node = platform.node()
    for name in (node, node.partition(".")[0]):  # the longer one first
        if name not in ("", "localhost"):
            value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "HOST", value)
    return value.replace(str(Path.home()), "~")
