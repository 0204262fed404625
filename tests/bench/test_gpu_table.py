"""The table of what has run on GPUs: from a file of the check, or the words that nothing has; docs/how-to/gpu.md has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from fastps.bench.gpu import table as gpu_table
from fastps.bench.gpu.report import Report, not_run

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "gpu.md"
ROWS: list[dict[str, Any]] = [
    {"check": "kernels", "name": "a", "ok": True, "difference": 1e-6},
    {"check": "kernels", "name": "b", "ok": False, "difference": 3e-2},
    {"check": "bandwidth", "name": "adam", "ok": True, "bound": 0.85, "limit_share": 0.912},
    {"check": "peers", "name": "GPU 0 reads GPU 1", "ok": True, "access": True, "bytes_per_s": 4.1e11},
    {"check": "peers", "name": "GPU 1 reads GPU 0", "ok": True, "access": False, "bytes_per_s": 2e10},
    not_run("several GPUs", "all cases", "needs 2 GPUs, found 1"),
    {"check": "faults", "name": "asp", "ok": True, "difference": 0.0},
    not_run("faults", "several GPUs", "needs 2 GPUs, found 1"),
]


def test_rows_of_a_file_are_told_with_their_figures_and_their_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu-some-gpu-2026.json"
    Report({"name": "Some GPU", "count": 2}, path).add("all", ROWS, 1.0)
    assert gpu_table.newest(tmp_path) == path
    assert gpu_table.main([str(path)]) == 0
    lines = dict(line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if "---" not in line)
    assert lines["check"].startswith("2 x Some GPU, 20")
    assert lines["the kernels against double precision"] == "1 of 2 passed; b failed; greatest relative difference 3.0e-02"
    assert lines["folds of 100 million parameters"] == "1 of 1 passed; adam 91% of a copy's bandwidth"
    assert lines["copies between GPUs"] == "2 of 2 passed; 20 to 410 GB/s, 1 pairs with peer access"
    assert lines["a worker on each GPU against the CPU path"] == "not run: needs 2 GPUs, found 1"
    assert lines["the others go on after a worker's death"] == "1 of 1 passed; 1 not run; greatest relative difference 0.0e+00"
    assert lines["training on images, with and without AMP"] == gpu_table.NEVER


def test_the_newest_file_is_that_of_the_latest_date(tmp_path: Path) -> None:
    assert gpu_table.newest(tmp_path) is None
    for name, date in (("gpu-b-2026-01-02", "2026-01-02"), ("gpu-a-2026-03-04", "2026-03-04")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": date, "rows": [], "gpu": {"name": name}}))
    found = gpu_table.newest(tmp_path)
    assert found is not None and found.name.startswith("gpu-a")


def test_the_page_has_the_table_of_the_newest_file() -> None:
    path = gpu_table.newest()
    assert gpu_table.table(json.loads(path.read_text()) if path else None) in PAGE.read_text(), (
        "docs/how-to/gpu.md: expected what `python -m fastps.bench.gpu.table` prints, found another table"
    )
