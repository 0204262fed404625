"""Configuration files: the order of what counts, what a file may have, and the way back."""

import tomllib
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.scripts import program


def _file(folder: Path, text: str) -> str:
    (folder / "job.toml").write_text(text)
    return str(folder / "job.toml")


@pytest.mark.slow
def test_the_command_line_counts_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, 'workers = 3\nsync = "bsp"\nnonfinite = "raise"\nmax-workers = 7\n')
    arguments = ("run", "--config", file, "--sync", "asp", "--print-config")
    shown = commands.done(*arguments, FASTPS_SYNC="ssp:1", FASTPS_NONFINITE="allow").stdout
    assert tomllib.loads(shown) == {"workers": 3, "sync": "asp", "nonfinite": "allow", "max_workers": 7}
    assert 'nonfinite = "allow"  # environment (FASTPS_NONFINITE)\n' in shown
    assert "# the command line counts before" not in shown and "# grace = 30.0\n" in shown


@pytest.mark.slow
def test_what_is_printed_is_a_file_that_gives_the_same_job(tmp_path: Path) -> None:
    script = program(tmp_path, "import os, sys; print(os.environ['FASTPS_SYNC'], sys.argv[1:])")[1]
    printed = commands.done("run", "-n", "2", "--sync", "ssp:3", "--print-config", script, "--epochs", "3").stdout
    ended = commands.done("run", "--config", _file(tmp_path, printed))
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] ssp:3 ['--epochs', '3']" for rank in range(2)]
    other = commands.done("run", "--config", _file(tmp_path, printed), "-n", "1", script)
    assert other.stdout == "[0] ssp:3 []\n"


@pytest.mark.parametrize(("text", "said"), [
    ("workers = ", "expected options in TOML, such as workers = 4, found: Invalid value"),
    ("worker = 4", "expected the name of an option, found 'worker'; the nearest is workers"),
    ("workers = true", "workers: expected a text or a number, found True"),
    ("workers = [1]", "workers: expected a text or a number, found [1]"),
    ("overwrite = 1", "overwrite: expected true or false, found 1"),
    ("script = [1]", "script: expected a text, or a list of texts, found [1]"),
    ('config = "other.toml"', "expected the name of an option, found 'config'"),
    ('hosts = "a,b"', "--hosts gives this command line to each host: expected no --config beside it"),
])  # fmt: skip
@pytest.mark.sampled(3)
def test_a_file_that_cannot_be_right_is_named_with_the_key(text: str, said: str, tmp_path: Path) -> None:
    script = program(tmp_path, "")[1]
    assert said in commands.refused("run", "--config", _file(tmp_path, text), script)


def test_a_file_that_is_not_there_and_a_script_that_is_missing_are_one_sentence(tmp_path: Path) -> None:
    assert "expected options in TOML" in commands.refused("run", "--config", str(tmp_path / "none.toml"), "x.py")
    assert "expected a script, found none, as in fastps run -n 4 train.py" in commands.refused("run", "-n", "2")


@pytest.mark.slow
def test_a_variable_that_holds_nonsense_is_named_and_those_of_nodes_are_read_on_several_nodes_alone(tmp_path: Path) -> None:
    script = program(tmp_path, "")[1]
    said = commands.refused("run", script, FASTPS_MAX_WORKERS="many")
    assert "expected the environment variable FASTPS_MAX_WORKERS to be a value of --max-workers" in said and "'many'" in said
    assert commands.done("run", "-q", script, FASTPS_LOCAL_STEPS="many", FASTPS_LOCAL_FRAGMENTS="3").stderr == ""
    nodes = ("run", "--nnodes", "2", "--rendezvous", "a:1")
    said = commands.refused(*nodes, script, FASTPS_LOCAL_STEPS="many")
    assert "expected --local-steps (FASTPS_LOCAL_STEPS) to be a whole number of 0 to 1,000,000 versions, found 'many'" in said
    file = _file(tmp_path, 'link-dtype = "int8"\nlocal-steps = 9\n')
    shown = commands.done(*nodes, "--config", file, "--local-steps", "4", "--print-config", FASTPS_LINK_DTYPE="float16").stdout
    assert 'link_dtype = "float16"  # environment (FASTPS_LINK_DTYPE)\n' in shown and "local_steps = 4  # command line" in shown
