"""Help and names of options: groups, synonyms of other launchers, and the nearest name of a wrong one."""

import re
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.scripts import program


def test_the_help_of_run_begins_with_ten_options_at_most_and_has_those_of_nodes_apart() -> None:
    shown = commands.done("run", "-h").stdout
    assert shown == commands.done("run", "--help").stdout
    titles = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
    assert titles[:2] == ["Arguments", "Options"] and titles[-2:] == ["Several nodes", "Examples"]
    groups = dict(zip(titles, re.split(r"^\w[\w ]*:$", shown, flags=re.MULTILINE)[1:], strict=True))
    first = re.findall(r"^  (?:-\w, )?(--[\w-]+)", groups["Options"], re.MULTILINE)
    assert len(first) <= 10 and {"--workers", "--sync", "--restarts", "--checkpoint", "--job", "--help"} <= set(first)
    assert "--rendezvous" in groups["Several nodes"] and "--local-steps" in groups["Several nodes"]


def test_each_example_of_a_command_is_a_line_that_can_be_copied() -> None:
    shown = commands.done("run", "--help").stdout.partition("\nExamples:\n")[2].splitlines()
    assert len(shown) == 5 and all(line.startswith("  fastps run ") for line in shown)


@pytest.mark.parametrize(("arguments", "said"), [
    (("run", "--synch", "bsp", "x.py"), "found '--synch', which is nearest to --sync; fastps run --help lists all"),
    (("train", "--epoch", "3"), "expected an option of fastps train, found '--epoch', which is nearest to --epochs"),
    (("run", "--zzz", "x.py"), "expected an option of fastps run, found '--zzz'; fastps run --help"),
])  # fmt: skip
def test_an_unknown_option_is_answered_with_the_nearest(arguments: tuple[str, ...], said: str) -> None:
    assert said in commands.refused(*arguments)


@pytest.mark.parametrize("name", ["--nproc-per-node", "--nproc_per_node", "-np"])
@pytest.mark.sampled(2)
def test_names_of_other_launchers_are_understood(name: str, tmp_path: Path) -> None:
    script = program(tmp_path, "import os; print(os.environ['FASTPS_WORKERS'])")[1]
    ended = commands.done("run", name, "2", "--max-restarts", "1", script)
    assert sorted(ended.stdout.splitlines()) == ["[0] 2", "[1] 2"]
