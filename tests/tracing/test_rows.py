"""Rows of tables in traces, in what observers see, and in advice: a push of rows is a push, and its rows are counted."""

import io
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import fastps
from fastps.advice import advise
from fastps.cli import top, trace_report
from fastps.cli.tables import show
from fastps.tracing import perfetto
from fastps.tracing.check import check, push_log_row
from fastps.tracing.file import PUSH_DTYPE, Trace, TraceError, read, write
from fastps.tracing.summary import summary_row, worker_rows
from tests.telemetry.jobs import look_at

WIDTH, STEPS = 4, 12
# Rows of each table in a push, by worker: rows 0 to n - 1, so that the workers of one version share some.
PUSHED = {"t": (3, 5), "u": (2, 0)}


def _weights() -> dict[str, Any]:
    return {"w": np.zeros(8, np.float32), "t": np.zeros((10, WIDTH), np.float32), "u": np.zeros((6, WIDTH), np.float32)}


def _run(sync: str, file: Path | None = None, *, nulls: int = 0) -> tuple[Any, Any]:
    """Let two workers of one process push rows in turn; return what an observer sees, and the trace."""
    recording = fastps.trace(file) if file is not None else None
    with fastps.Store.create(_weights(), fastps.SGD(lr=0.5), sync=sync, workers=2, tables=["t", "u"]) as store:
        workers = [store.attach(rank) for rank in range(2)]
        for step in range(STEPS):
            for worker in workers:
                for name, counts in PUSHED.items():
                    if counts[worker.rank]:
                        rows = np.arange(counts[worker.rank])
                        worker.put_rows(name, [*rows, 0], np.ones((len(rows) + 1, WIDTH)))  # row 0 twice: one row
                worker.push(store.hypers, null=step < nulls)
            for worker in workers:
                worker.advance()
                worker.pull()
        look = look_at(store.job)
        for worker in workers:
            worker.close()
    if recording is None:
        return look, None
    recording.close()
    return look, read(file or Path())


@pytest.mark.parametrize("sync", ["bsp", "asp", "asp,shards=3"])
def test_an_observer_counts_the_rows_of_folded_pushes_and_those_that_were_written(sync: str) -> None:
    look, _ = _run(sync)
    assert look.tables == 2
    assert [row.rows for row in look.workers] == [5 * STEPS, 5 * STEPS]
    assert [row.folded for row in look.workers] == [STEPS * len(look.shards)] * 2
    # Under bsp both pushes are one update, which writes rows 0 to 4 of the one table and 0 and 1 of the other.
    assert sum(shard.rows_written for shard in look.shards) == STEPS * (7 if sync == "bsp" else 10)


def test_a_job_without_tables_shows_no_rows() -> None:
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=0.5)) as store, store.attach(0) as worker:
        worker.step({"w": np.ones(4)})
        look = look_at(store.job)
    rows = top.rows_of(None, look)
    assert look.tables == look.workers[0].rows == 0
    assert not any("rows" in row or "rows_written" in row for row in rows)
    assert "rows" not in _text(top.tables("x", rows, look))


def test_top_shows_a_workers_rows_and_the_rows_of_a_fold() -> None:
    look, _ = _run("bsp")
    rows = top.rows_of(None, look)
    assert [(row["rows"]) for row in rows if row["kind"] == "worker"] == [60, 60]
    text = _text(top.tables("x", rows, look))
    assert "rows" in text and "rows/fold" in text and "7.0" in text
    many = replace(look, shards=[replace(look.shards[0], shard=shard) for shard in range(9)])
    assert "7.0" in _text(top.tables("x", top.rows_of(None, many), many))


def _text(tables: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    for table in tables:
        show(console, table, wide=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("sync", ["bsp", "asp,shards=3"])
def test_a_trace_has_the_rows_of_each_push(sync: str, tmp_path: Path) -> None:
    look, found = _run(sync, tmp_path / "run.trace", nulls=2)
    assert len(found.rows) == len(found.pushes) == 2 * STEPS * len(look.shards)
    assert check(found) == [] and push_log_row(found)["complete"]
    assert found.header["committed"]["rows"] == [row.rows for row in look.workers] == [5 * (STEPS - 2)] * 2
    whole = summary_row(found)
    assert (whole["rows_pushed"], whole["rows_folded"]) == (100, 100)
    assert whole["rows_per_step"] == pytest.approx(100 / (2 * STEPS))
    assert [row["rows_folded"] for row in worker_rows(found)] == [50, 50]
    assert "100 rows of tables pushed (4.2 a step), 100 folded" in trace_report.summary_line(whole)
    assert "4.2" in _text([trace_report.worker_table(worker_rows(found), "x")])
    events = list(perfetto.events(found))
    pushes = [event["args"].get("rows") for event in events if event.get("name") == "push" and event["ph"] == "X"]
    assert sorted(pushes) == [0] * 4 + [5] * (2 * STEPS - 4)
    versions = [event["args"]["rows"] for event in events if event.get("name", "").startswith("version ")]
    assert sum(versions) == 100


def test_rows_that_the_log_lacks_are_a_violation(tmp_path: Path) -> None:
    _, found = _run("bsp", tmp_path / "run.trace")
    rows = found.rows.copy()
    rows["rows"][3] += 1
    assert [violation.rule for violation in check(replace(found, rows=rows))] == ["counts"]


def test_advice_takes_a_push_of_rows_as_a_push(tmp_path: Path) -> None:
    _, found = _run("bsp", tmp_path / "run.trace")
    without = Trace(found.header, found.steps, found.pushes)
    assert advise.advise(found, ["bsp", "asp"]) == advise.advise(without, ["bsp", "asp"])


def test_a_trace_without_rows_is_written_as_before_and_one_with_rows_ends_with_them(tmp_path: Path) -> None:
    """So each version of fastps reads the other's traces."""
    _, found = _run("asp", tmp_path / "run.trace")
    write(Trace(found.header, found.steps, found.pushes), tmp_path / "old.trace")
    old, new = (tmp_path / "old.trace").read_bytes(), (tmp_path / "run.trace").read_bytes()
    assert b'"rows"' not in old[:4096].split(b'"tables"')[1]
    assert len(read(tmp_path / "old.trace").rows) == 0
    assert new[:-4].endswith(found.rows.tobytes())  # before the checksum


def test_a_trace_with_a_table_of_a_later_version_is_read_and_still_refused_when_damaged(tmp_path: Path) -> None:
    _, found = _run("asp", tmp_path / "run.trace")
    data = (tmp_path / "run.trace").read_bytes()
    end = 24 + int.from_bytes(data[16:24], "little")
    text = data[24:end].replace(b'"tables": {', b'"tables": {"later": {"lines": 1, "dtype": []}, ')
    later = data[:16] + len(text).to_bytes(8, "little") + text + data[end:-4] + b"later"
    (tmp_path / "later.trace").write_bytes(later + zlib.crc32(later).to_bytes(4, "little"))
    assert np.array_equal(read(tmp_path / "later.trace").rows, found.rows)
    (tmp_path / "later.trace").write_bytes(later[:-1] + b"R" + zlib.crc32(later).to_bytes(4, "little"))
    with pytest.raises(TraceError, match="checksum"):
        read(tmp_path / "later.trace")
    assert found.pushes.dtype == PUSH_DTYPE
