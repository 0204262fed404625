"""The GPU check as a whole, whose parts are programs of a line: how each may end, the report that is left, and its table."""

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastps.bench.gpu import run, surroundings
from fastps.bench.gpu import table as gpu_table
from fastps.bench.gpu.report import Report, not_run, scrubbed
from fastps.bench.gpu.run import Part, Settings
from fastps.kernels.cuda.runtime import CudaUnavailableError, load_cupy
from tests.support import commands

GPU = {"name": "Some GPU 1", "count": 1}
PROGRAM = """
import faulthandler, json, os, signal, sys, time
faulthandler.enable()
name, settings, file = sys.argv[1:]
ends = json.loads(os.environ["ENDS"])
with open(file, "a", buffering=1) as rows:
    for ok in ends[name]["rows"]:
        rows.write(json.dumps({"check": name, "name": "a row", "ok": ok, "difference": float("inf")}) + "\\n")
    rows.write("half a r" * (ends[name]["then"] != "pass"))
    rows.flush()
def here():
    exec(ends[name]["then"])
here()
"""
LIMIT_S = 77.0
# What a part does, and how the row says that it ended: the first words, and the last.
ENDINGS = {
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "it was ended by SIGSEGV", ""),
    "hang": ("open(os.environ['BEGUN'], 'w').close(); time.sleep(1000)", "it did not end within 77 s,", ""),
    "raise": ("raise ValueError('no such thing')", "it ended with exit code 1", ": ValueError: no such thing"),
    "memory": ("bytearray(1 << 62)", "it ended with exit code 1", ": MemoryError"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "it was ended by SIGKILL", ""),
}

Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """Run a check whose parts are named, each with the results of its rows and what it does then."""

    def run_check(parts: dict[str, tuple[list[bool], str]], **more: Any) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(run, "COMMAND", (sys.executable, "-S", "-E", "-c", PROGRAM))
        monkeypatch.setattr(run, "PARTS", {name: Part(LIMIT_S) for name in parts} | more)
        monkeypatch.setenv("ENDS", json.dumps({name: {"rows": rows, "then": then} for name, (rows, then) in parts.items()}))
        report = Report(GPU, tmp_path / "report.json")
        code = run.check(report, Settings(), lambda _: None)
        assert list(tmp_path.iterdir()) == [report.file], "no draft is left"
        return code, json.loads(report.file.read_text())

    return run_check


def test_all_that_passed_is_exit_code_0_and_what_cannot_run_is_named(check: Check) -> None:
    more = {"peers": Part(9, gpus=2), "sanitizer": Part(9, tool=("no-such-tool",))}
    code, found = check({"kernels": ([True, True], "pass"), "IPC": ([True], "pass")}, **more)
    assert code == 0 and len(found["rows"]) == 5
    assert found["says"][:2] == ["Works: kernels, IPC.", "Not run: peers, sanitizer."]
    assert next(iter(found)) == "says", "the first lines say what works"
    assert [row["missing"] for row in found["rows"][3:]] == ["needs 2 GPUs, found 1", "no-such-tool is not installed"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_part_that_ends_badly_is_a_row_and_those_after_it_run(
    check: Check, ending: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, now_s = tmp_path_factory.mktemp("hang") / "begun", time.monotonic
    monkeypatch.setenv("BEGUN", str(begun))
    monkeypatch.setattr(run, "_CHECK_S", 0.01)
    monkeypatch.setattr(run.time, "monotonic", lambda: now_s() + (1000 if begun.exists() else 0))
    monkeypatch.setattr(run, "_end", lambda process, end=run._end: (begun.unlink(missing_ok=True), end(process)))
    then, first, last = ENDINGS[ending]
    code, found = check({"kernels": ([True], "pass"), "IPC": ([True, True], then), "faults": ([True], "pass")})
    assert code == 1
    told = [(row["check"], row["ok"]) for row in found["rows"]]
    assert told == [("kernels", True), *[("IPC", True)] * 2, ("IPC", False), ("faults", True)]
    row = found["rows"][3]
    assert row["missing"].startswith(f"{first} after 2 rows, the last a row; what follows was not reached"), row
    assert row["missing"].endswith(last)
    where = "\n".join(row["output"])
    assert ending == "killed" or " in here" in where, "where the part stood"
    assert found["says"][:2] == ["Works: kernels, faults.", "Does not work: IPC."]


def test_rows_are_in_the_report_while_their_part_still_runs(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_CHECK_S", 0.01)
    monkeypatch.setenv("REPORT", str(tmp_path / "report.json"))
    waits = "while '1 rows of this part' not in open(os.environ['REPORT']).read(): time.sleep(0.01)"
    code, found = check({"step": ([True], waits), "IPC": ([True], "pass")})
    assert code == 0 and [row["ok"] for row in found["rows"]] == [True, True]


def test_minutes_are_shared_by_what_has_never_run_first_and_what_is_left_out_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, ran = [0.0], []

    def run_part(name: str, part: Part, settings: Settings, add: object) -> list[dict[str, Any]]:
        ran.append((name, part.limit_s))
        now_s[0] += min(part.limit_s, 100)
        return [{"check": name, "name": "a row", "ok": True}]

    parts = {"old": Part(600, has_run=True), "new": Part(1800), "quick": Part(600), "none": Part(9, gpus=2)}
    monkeypatch.setattr(run, "PARTS", parts)
    monkeypatch.setattr(run, "run_part", run_part)
    monkeypatch.setattr(run.time, "monotonic", lambda: now_s[0])

    def within(minutes: float) -> tuple[list[tuple[str, float]], list[str]]:
        ran.clear()
        report = Report(GPU, tmp_path / "report.json")
        run.check(report, Settings(), lambda _: None, minutes)
        return list(ran), [row.get("missing", "") for row in report.rows]

    assert within(5) == ([("new", 180.0), ("quick", 100.0), ("old", 100.0)], ["", "", "", "needs 2 GPUs, found 1"])
    found, missing = within(0.5)
    assert found == [("new", 20.0)] and missing[0] == "10 s of --minutes 0.5 were left, expected at least 20 s"


def test_a_failed_row_or_a_part_without_rows_is_exit_code_1(check: Check) -> None:
    code, found = check({"kernels": ([True, False], "pass"), "IPC": ([], "pass")})
    assert code == 1
    assert found["rows"][1]["difference"] is None, "infinity is no number of JSON"
    assert found["rows"][2]["missing"].startswith("it ended before its first row")


def test_a_check_in_which_nothing_could_run_has_not_passed(check: Check) -> None:
    assert check({}, peers=Part(9, gpus=2))[0] == 1


def test_the_file_is_whole_before_the_first_part_has_ended(tmp_path: Path) -> None:
    report = Report(GPU, tmp_path / "report.json")
    report.expect(["kernels", "IPC"])
    found = json.loads(report.file.read_text())
    assert [row["missing"] for row in found["rows"]] == ["the check ended before this part"] * 2
    assert report.add("kernels", [{"check": "kernels", "name": "x", "ok": False, "difference": 1.0}], 2) == (
        "kernels: 0 of 1 passed, 2 s; x failed: difference=1"
    )
    assert report.add("IPC", [not_run("IPC", "all", "no such tool")], 0) == "IPC: not run, no such tool"


def test_advice_follows_what_has_passed_and_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def advice(begins: str = "Use", **ok: bool) -> list[str]:
        report = Report(GPU, tmp_path / "report.json")
        for part in ("kernels", "IPC", "two processes", "several GPUs"):
            if part.replace(" ", "_") in ok:
                report.add(part, [{"check": part, "name": "bsp-sgd-device", "ok": ok[part.replace(" ", "_")]}], 1)
        return [sentence for sentence in report.says() if sentence.startswith(begins)]

    assert advice(kernels=True, IPC=True, two_processes=True) == ["Use on one GPU: the default, shards on the GPU."]
    assert advice(kernels=True, IPC=True, two_processes=True, several_GPUs=True)[1] == (
        "Use on several GPUs: FASTPS_PLACEMENT=device."
    )
    assert advice(kernels=False, IPC=True, two_processes=True, several_GPUs=False) == [
        "Use on one GPU: FASTPS_PLACEMENT=host.",
        "Use on several GPUs: the default, shards in host memory.",
    ]
    assert advice("Workers", kernels=True, IPC=True, two_processes=True)[0].startswith("Workers that share a GPU take turns")
    around = surroundings.surroundings() | {"gpus": [{"compute_mode": "Exclusive_Process"}], "mig_devices": ["MIG 1g.5gb"]}
    monkeypatch.setattr("fastps.bench.gpu.report.surroundings", lambda: around)
    assert len(advice("The compute mode is Exclusive_Process")) == len(advice("MIG is on")) == 1


def test_a_report_names_neither_the_host_nor_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "node7.example.org")
    text = f"node7:12 said so in {Path.home()}/x, and node71 and node7.example.org"
    assert scrubbed([{"a": text}]) == [{"a": "HOST:12 said so in ~/x, and node71 and HOST"}]
    report = Report(GPU, tmp_path / "report.json")
    report.add("IPC", [{"check": "IPC", "name": "x", "ok": False, "missing": text}], 1)
    assert "node7:" not in report.file.read_text() and str(Path.home()) not in report.file.read_text()


def test_a_page_shows_what_failed(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    report = Report(GPU, tmp_path / "report.html")
    report.add("IPC", [{"check": "IPC", "name": "x<", "ok": False, "missing": "no", "output": ["line 1", "line 2"]}], 1)
    text = report.file.read_text()
    assert "1 x Some GPU 1" in text and "IPC x&lt; failed." in text and "Does not work: IPC." in text


@pytest.mark.slow
def test_without_a_gpu_one_sentence_says_so_and_the_exit_code_is_its_own(tmp_path: Path) -> None:
    try:
        load_cupy()
    except CudaUnavailableError:
        outcome = commands.fastps("gpu-check", "-o", str(tmp_path / "report.json"))
        assert outcome.returncode == 3
        assert outcome.stderr.startswith("gpu-check: no device: expected ") and outcome.stderr.count("\n") == 1, outcome.stderr
        assert not list(tmp_path.iterdir())
    else:
        pytest.skip("there is a GPU here")


def test_mps_is_seen_by_its_socket(tmp_path: Path) -> None:
    assert not surroundings.mps_runs(tmp_path)
    (tmp_path / "control").touch()
    assert surroundings.mps_runs(tmp_path)


def test_ctrl_c_leaves_no_process_and_a_whole_file(check: Check, tmp_path: Path) -> None:
    began = "os.kill(os.getppid(), signal.SIGINT); time.sleep(1000)"
    with pytest.raises(KeyboardInterrupt):
        check({"kernels": ([True], "pass"), "IPC": ([True], began), "faults": ([True], "pass")})
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in children if PROGRAM in child.cmdline()]
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["ok"] for row in found["rows"]] == [True, None, None]


def test_what_a_program_underlines_is_plain_in_the_report() -> None:
    assert surroundings._output("printf", r"\033[4mGPU0\tNUMA\033[0m\n") == "GPU0\tNUMA"


# -- the table of what has run on GPUs: from a file of the check, or the words that nothing has ----

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
