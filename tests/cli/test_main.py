"""The command line as a user meets it: help, usage errors, exit codes, JSON, and whole small runs."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import fastps
from fastps.cli.commands import SECTIONS
from fastps.cli.main import app
from tests.support import commands, example_programs
from tests.support.scripts import program

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TWO_NODES = ("--nnodes", "2", "--rendezvous", "a:1")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train.py")


def _python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in commands.OF_A_JOB}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("arguments", "message"), [
    (["train", "--sync", "foo"], "unknown synchronization 'foo': expected one of bsp[,tune=true], asp"),
    (["train", "--sync", "ssp:-1"], "expected s of 0"),
    (["train", "--sync", "dssp:9,3"], "expected lo <= hi"),
    (["compare", "--sync", "bsp,foo"], "'bsp,foo': expected bsp[,tune=true], found foo; no discipline is called 'foo'"),
    (["compare", "--plot", "x.foo"], "--plot x.foo: expected a file whose name ends with one of ."),
    (["stragglers", "--plot", "no-such-folder/x.png"], "--plot no-such-folder/x.png: expected a file in a folder that exists"),
    (["simulate", "--trace", "no-such-folder/x.npy"], "--trace no-such-folder/x.npy: expected a file in a folder that exists"),
    (["run", "--job", "a\tb", EXAMPLE], "expected a job's name (job=, FASTPS_JOB) of 1 to 64 bytes of printable text"),
    (["run", "--every", "5", EXAMPLE], "--every has no effect alone: expected --checkpoint beside it, found none"),
    (["run", *TWO_NODES, "--job", "mine", EXAMPLE], "the nodes agree on a name by themselves: expected no name, found one"),
    (["trace", "no.trace"], "expected a trace that --trace wrote, found no.trace: No such file"),
    (["advise", "no.trace", "--links", "no.json"], "expected a trace that --trace wrote, found no.trace: No such file"),
    (["report", "no.trace"], "expected a trace that --trace wrote, found no.trace: No such file"),
    (["replay", "no.trace", EXAMPLE], "expected a trace that --trace wrote, found no.trace: No such file"),
    (["run", "--resume", EXAMPLE, EXAMPLE], "expected checkpoint.json or folders checkpoint-NUMBER there, found neither"),
    (["run", "--secret-file", "no-secret", EXAMPLE], "--secret-file no-secret: expected a file with the job's secret, found"),
    (["train", "--workers", "0"], "--workers: expected at least 1, found 0"),
    (["train", "--epochs", "0"], "--epochs: expected at least 1"),
    (["train", "--lr", "-1"], "--lr: expected more than 0"),
    (["train", "--straggler", "9:3"], "expected a worker of 0 to 3"),
    (["train", "--straggler", "0:0.5"], "a factor of 1 to 1e6"),
    (["train", "--straggler", "x"], "expected WORKER:FACTOR such as 0:3"),
    (["train", "--data", "nothing"], "nothing"),
    (["train", "--push-dtype", "float64"], "--push-dtype: expected one of float32, float16, bfloat16, found 'float64'"),
    (["compare", "--push-dtype", "half"], "--push-dtype: expected one of float32, float16, bfloat16, found 'half'"),
    (["compare", "--runs", "0"], "--runs: expected 1 or more, found 0"),
    (["compare", "--seed", "0,x"], "--seed: expected whole numbers separated by commas, found '0,x'"),
    (["compare", EXAMPLE], "expected --script before a script, found "),
    (["compare", "--script"], "--script: expected a script and its arguments behind the options, found none"),
    (["compare", "--seed", "1", "--script", EXAMPLE], "--seed beside --script: expected a script that says what is trained"),
    (["disciplines", "--json", "-", "--csv", "-"], "--csv - and --json -: expected one of the two on standard output"),
    (["disciplines", "--csv", "no-such-folder/x.csv"], "--csv no-such-folder/x.csv: expected a file in a folder that exists"),
    (["run", "-n", "0", EXAMPLE], "at least 1 worker, found 0"),
    (["run", "-n", "100000", EXAMPLE], "at most 1024 workers, found 100000"),
    (["run", "-n", "2", "--sync", "backup:2", EXAMPLE], "backup:2: expected"),
    (["run", "-n", "2", "--max-workers", "1", EXAMPLE], "--max-workers: expected 2 or more, the number of workers"),
    (["run", "--trace", "no-such-folder/x.trace", EXAMPLE], "--trace no-such-folder/x.trace: expected a file in a folder"),
    (["run", "--json", "no-such-folder/x.json", EXAMPLE], "--json no-such-folder/x.json: expected a file in a folder"),
    (["train", "--save", "no-such-folder/x.npz"], "--save no-such-folder/x.npz: expected a file in a folder that exists"),
    (["run", "--server", "threads", EXAMPLE], "expected server to be one of workers, process, found 'threads'"),
    (["run", "no-such-script.py"], "found no file 'no-such-script.py'"),
    (["run", "/"], "expected a script, found the folder '/'; fastps run -m runs a module"),
    (["run", "--sync", "foo", EXAMPLE], "unknown synchronization 'foo'"),
    (["stragglers", "--sync", "asp"], "waits for all workers, such as bsp, found asp"),
    (["stragglers", "--exponent", "-1"], "--exponent: expected 0 to 2, found -1"),
    (["stragglers", "--iterations", "4"], "expected N:ITERATIONS,... such as 2:900,4:500, found '4'"),
    (["train", "--transfer-ms", "-5"], "--transfer-ms: expected 0 to 86400000 ms, which is a day, found -5"),
    (["train", "--compute-ms", "inf"], "--compute-ms: expected 0 to 86400000 ms, which is a day, found inf"),
    (["compare", "--transfer-ms", "nan"], "--transfer-ms: expected 0 to 86400000 ms, which is a day, found nan"),
    (["train", "--momentum", "2"], "--momentum: expected 0 to less than 1, found 2"),
    (["train", "--lr", "inf"], "--lr: expected more than 0, and finite, found inf"),
    (["train", "--straggler", "0:inf"], "a factor of 1 to 1e6, found '0:inf'"),
    (["train", "-n", "200", "--data", "nothing"], "expected 1 to 124 workers (and max_workers=) in this job, found 200"),
    (["train", "--max-workers", "125"], "expected 1 to 124 workers (and max_workers=) in this job, found 125"),
    (["compare", "-n", "200"], "expected 1 to 124 workers"),
    (["stragglers", "-n", "200"], "expected 1 to 124 workers"),
    (["train", "--overwrite"], "--overwrite has no effect alone: expected --checkpoint beside it, found none"),
    (["advise", "run.trace", "--nodes", "7"], "--nodes has no effect alone: expected --links beside it, found none"),
    (["advise", "run.trace", "--link-dtype", "int8"], "--link-dtype has no effect alone: expected --links beside it"),
    (["simulate", "--link-dtype", "int8"], "--link-dtype has no effect alone: expected --links beside it"),
    (["simulate", "--parameters", "1e6"], "--parameters has no effect alone: expected --links beside it"),
    (["simulate", "--momentum", "-3"], "--momentum has no effect alone: expected --train beside it"),
    (["doctor", "--output", "links.json"], "--output has no effect alone: expected --nodes beside it"),
    (["doctor", "--optimizer", "adam"], "--optimizer has no effect alone: expected --model-size beside it"),
    (["doctor", "--model-size", "many"], "--model-size: expected whole numbers"),
    (["doctor", "--model-size", "1,2"], "--model-size: expected one whole number, found '1,2'"),
    (["doctor", "--nodes"], "expected --nnodes N and --rendezvous HOST:PORT beside it"),
    (["doctor", "--script"], "expected --script SCRIPT ARGUMENTS"),
    (["doctor", "train.py"], "expected --script SCRIPT ARGUMENTS"),
    (["bench", "nothing"], "rows, train, optimizer, memory, readers, collectives, nodes, all; found 'nothing'"),
    (["bench", "step", "--against", "gloo,spark"], "--against: expected some of"),
    (["bench", "step", "--workers", "two"], "--workers: expected whole numbers"),
    (["bench", "kernels", "--repeats", "0"], "--repeats: expected at least 1"),
    (["gpu-check", "-o", "no-such-folder/x.json"], "expected a file in a folder that exists"),
    (["chaos", "--seeds", "0"], "expected at least 1 seed, from 0 on; found --seeds 0"),
    (["chaos", "--seed", "-1"], "expected at least 1 seed, from 0 on; found --seeds 1000 --seed -1"),
    (["chaos", "--seeds", "1", "--nodes", "0"], "expected 2 or more"),
    (["chaos", "--seeds", "1", "--nodes", "3", "--mutant", "none"], "expected one of count-"),
    (["chaos", "--seeds", "1", "--devices", "-1"], "--devices: expected 1 or more devices, found -1"),
    (["chaos", "--seeds", "1", "--devices", "2", "--nodes", "2"], "expected --nodes or --devices, found both"),
    (["chaos", "--seeds", "1", "--devices", "2", "--mutant", "forget-pins"], "--mutant: expected one of record-"),
    (["reproduce", "dssp/none"], "or a row that --list shows, found 'dssp/none'"),
    (["reproduce", "nobody"], "or a row that --list shows, found 'nobody'"),
    (["train", "--sync", "psp:5,0.5", "-n", "4"], "psp:5,0.5: expected c of 1 to 4, the number of workers, found 5\n"),
    (["train", "--sync", "ssp:3,ema=1"], "ssp:3,ema=1: expected ema of 0 (none) to less than 1, found 1\n"),
    (["compare", "--sync", "bsp,policy:fold=all,grant=at-once"],
     "policy:fold=all,grant=at-once: fold 'all' cannot go with grant 'at-once': a sum of all workers needs workers"
     " that wait for it: use grant 'next-version'\n"),
    (["top", "--interval", "0"], "--interval: expected 0.01 to 3600 seconds, found 0"),
    (["evaluate", EXAMPLE], "--job: expected the name of a job (fastps top names the running ones), found none"),
    (["evaluate", "no-such-script.py", "--job", "x"], "expected a script, found no file 'no-such-script.py'"),
    (["evaluate", EXAMPLE, "--job", "x", "--patience", "3"], "patience: expected metric and mode (max or min)"),
    (["evaluate", EXAMPLE, "--job", "x", "--rows", "none/x"], "--rows none/x: expected a file in a folder that exists"),
    (["run", "--nnodes", "0", EXAMPLE], "--nnodes: expected 2 or more nodes, found 0"),
    (["run", "--nnodes", "2", EXAMPLE], "--nnodes: expected --rendezvous HOST:PORT beside it"),
    (["run", "--nnodes", "2", "--rendezvous", "here", EXAMPLE], "HOST:PORT, such as node0:29400, found 'here'"),
    (["run", *TWO_NODES, "--node-rank", "2", EXAMPLE], "--node-rank: expected auto, or 0 to 1, found '2'"),
    (["run", *TWO_NODES, "--restarts", "1", EXAMPLE], "expected no --restarts and --inject-faults"),
    (["run", "--hosts", "one", EXAMPLE], "expected two or more hosts such as node0,node1, found 'one'"),
    (["run", "--hosts", "one,", EXAMPLE], "expected two or more hosts"),
    (["run", "--hosts", "one,-oProxyCommand=x", EXAMPLE], "ssh would take it as an option"),
    (["run", "--hosts", "one,two", "--ssh-command", " ", EXAMPLE], "--ssh-command (FASTPS_SSH): expected a command"),
])  # fmt: skip
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert message in commands.refused(*arguments)


def test_a_command_that_does_not_exist_is_named_with_exit_code_2() -> None:
    outcome = commands.fastps("no-such-command")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert "No such command 'no-such-command'" in outcome.stderr and "Traceback" not in outcome.stderr


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_one_sentence_and_exit_code_2(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "fastps", "simulate", "-n", "2", "--sync", "bsp", "--steps", "10"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment,
        )  # fmt: skip
    assert found.returncode == 2
    assert found.stderr.startswith("fastps: expected room for the output, found: ") and found.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments", [["--help"], ["disciplines"], ["simulate", "-n", "2", "--steps", "10"], ["disciplines", "--json", "-"]]
)
@pytest.mark.sampled(4)
def test_a_command_whose_reader_has_gone_ends_without_a_word(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        found = subprocess.run(
            [sys.executable, "-m", "fastps", *arguments], stdout=closed, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert found.returncode == 1
    assert "BrokenPipe" not in found.stderr and (found.stderr == "" or "--json" in arguments)  # whose tables are there


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in commands.fastps("--debug", "train", "--sync", "foo").stderr


@pytest.mark.sampled(8)
@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_commands_help_has_an_example(command: str) -> None:
    outcome = commands.fastps(command, "--help")
    assert outcome.returncode == 0
    assert f"fastps {command}" in outcome.stdout
    assert "Example" in outcome.stdout


def test_help_has_every_command_in_the_section_that_its_file_declares() -> None:
    lines = commands.fastps("--help").stdout.splitlines()
    shown: dict[str, str] = {}
    section = ""
    for line in lines:
        if line.rstrip(":") in SECTIONS:
            section = line.rstrip(":")
        elif section and line.startswith("  ") and not line.startswith("   "):
            shown[line.split()[0]] = section
    assert shown == {name: command.rich_help_panel for name, command in COMMANDS.items()}
    assert list(dict.fromkeys(shown.values())) == list(SECTIONS)


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_help_imports_neither_numpy_nor_torch(option: str) -> None:
    code = f"import sys; sys.argv = ['fastps', '{option}']\ntry:\n    import fastps.cli.main; fastps.cli.main.main()\n"
    code += "except SystemExit: pass\nprint([name for name in ('torch', 'numpy', 'numba') if name in sys.modules])"
    assert _python("-c", code).stdout.splitlines()[-1] == "[]"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [*example_programs.WAYS, pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_example_runs_alone_under_fastps_run_and_under_torchrun(way: str) -> None:
    assert "after 100 updates" in example_programs.run(way, "train.py").stdout


@pytest.mark.slow
def test_options_after_the_script_are_the_scripts(tmp_path: Path) -> None:
    script = program(tmp_path, "import sys; print(sys.argv[1:])")[1]
    outcome = commands.fastps("run", "-n", "1", script, "-n", "7", "--sync", "x", "--help")
    assert outcome.stdout.strip() == "[0] ['-n', '7', '--sync', 'x', '--help']"


def test_json_on_standard_output_is_one_object_also_where_the_script_prints(tmp_path: Path) -> None:
    outcome = commands.done("run", "-n", "2", "--json", "-", program(tmp_path, "print('a word')")[1])
    assert [row["exit_code"] for row in json.loads(outcome.stdout)["rows"]] == [0, 0]
    assert "[1] a word" in outcome.stderr


def test_a_failing_script_is_reported_with_exit_code_1(tmp_path: Path) -> None:
    outcome = commands.fastps("run", "-n", "2", program(tmp_path, "raise RuntimeError('boom')")[1])
    assert outcome.returncode == 1
    assert "failed first: exit code 1" in outcome.stderr
    assert "RuntimeError: boom" in outcome.stderr


@pytest.mark.slow
def test_train_writes_the_promised_keys() -> None:
    outcome = commands.done(
        *("train", "--data", "digits", "--workers", "2", "--epochs", "2", "--sync", "ssp:2,combine=true"),
        *("--push-dtype", "bfloat16", "--json", "-"),
    )
    document = json.loads(outcome.stdout)
    assert set(document) == {"command", "version", "machine", "rows"}
    (row,) = document["rows"]
    promised = {"sync", "workers", "seconds", "steps", "samples_per_s", "test_accuracy", "staleness_mean", "staleness_max"}
    assert promised | {"wait_share", "dropped"} <= set(row)
    assert (row["sync"], row["workers"], row["dropped"], row["push_dtype"]) == ("ssp:2,combine=true", 2, 0, "bfloat16")
    assert 0.5 < row["test_accuracy"] <= 1
    assert 0 <= row["wait_share"] < 1


def test_every_command_that_writes_json_writes_csv() -> None:
    flags = {name: {flag for each in command.params for flag in each.opts} for name, command in COMMANDS.items()}
    assert [name for name, own in flags.items() if ("--json" in own) != ("--csv" in own)] == []
    ended = commands.done("disciplines", "--csv", "-")
    rows = list(csv.DictReader(ended.stdout.splitlines()))
    assert "asp" in [row["spec"] for row in rows] and "asp" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)  # up to eight launches, each of which imports torch
def test_compare_repeats_runs_by_turns_and_shows_their_range(tmp_path: Path) -> None:
    picture = tmp_path / "accuracy.svg"
    arguments = ("compare", "--data", "digits", "-n", "2", "--epochs", "1", "--sync", "bsp,asp", "--seed", "3,4", "--runs", "2")
    ended = commands.done(*arguments, "--plot", str(picture), "--json", "-")
    rows = json.loads(ended.stdout)["rows"]
    assert [(row["sync"], row["runs"], [each["seed"] for each in row["each"]]) for row in rows] == [
        ("bsp", 4, [3, 4, 3, 4]), ("asp", 4, [3, 4, 3, 4])
    ]  # fmt: skip
    assert all(row["least"]["seconds"] <= row["seconds"] <= row["most"]["seconds"] for row in rows)
    assert " to " in ended.stderr and 'width="244.8pt"' in picture.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)  # up to eight launches, each of which imports torch
def test_compare_runs_a_script_of_ones_own_under_each_discipline(tmp_path: Path) -> None:
    shown = commands.done("compare", "-n", "2", "--sync", "bsp,asp", "--json", "-", "--script", EXAMPLE).stdout
    own = json.loads(shown)["rows"]
    assert [(row["sync"], row["workers"], row["runs"]) for row in own] == [("bsp", 2, 1), ("asp", 2, 1)]
    assert all(row["steps"] == 200 and "updates" in row["last_line"] for row in own)
    text = Path(EXAMPLE).read_text().replace("momentum=0.9))", 'momentum=0.9), sync="ssp:2")')
    said = commands.fastps("compare", "-n", "2", "--sync", "asp", "--script", program(tmp_path, text)[1]).stderr
    assert "expected a script that leaves the discipline to --sync, found sync=ssp:2 in the script, where asp was asked" in said


@pytest.mark.slow
def test_compare_prints_one_table_and_draws_a_plot(tmp_path: Path) -> None:
    picture, rows = tmp_path / "accuracy.png", tmp_path / "rows.json"
    outcome = commands.done(
        *("compare", "--data", "digits", "--workers", "2", "--epochs", "1", "--sync", "bsp,dssp:1,4"),
        *("--push-dtype", "float16", "--straggler", "0:2", "--plot", str(picture), "--json", str(rows)),
    )
    found = [(row["sync"], row["push_dtype"]) for row in json.loads(rows.read_text())["rows"]]
    assert found == [("bsp", "float16"), ("dssp:1,4", "float16")]
    assert picture.stat().st_size > 1000
    assert "dssp:1,4" in outcome.stdout


def test_the_version_is_printed_without_a_command() -> None:
    outcome = _python("-m", "fastps.cli", "--version")
    assert (outcome.returncode, outcome.stdout.strip()) == (0, fastps.__version__)


@pytest.mark.slow
def test_resuming_takes_the_newest_whole_checkpoint_and_says_so_and_starts_nothing_without_one(tmp_path: Path) -> None:
    script, saved = program(tmp_path, "import os; print('from', os.environ['FASTPS_RESUME'])")[1], tmp_path / "saved"
    with fastps.Store.create({"w": np.ones(3, np.float32)}, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        folders = [fastps.save(worker, saved), fastps.save(worker, saved)]
    (folders[1] / "checkpoint.json").write_text("{}")
    done = commands.fastps("run", "-n", "2", "--resume", str(saved), script)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] from {folders[0]}" for rank in range(2)]
    assert f"{folders[1]}: field 'format': expected int, found nothing" in done.stderr
    assert f"the newest whole one is taken: {folders[0]}, version 0" in done.stderr
    (folders[0] / "tensors.safetensors").write_text("")
    done = commands.fastps("run", "-n", "2", "--resume", str(saved), script)
    assert (done.returncode, done.stdout) == (2, "")
    assert str(folders[0]) in done.stderr and str(folders[1]) in done.stderr
