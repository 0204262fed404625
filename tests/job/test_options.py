"""Options: an argument counts before the variable, the variable before the default, and one row judges all three."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import fastps
from fastps.cli.main import app
from fastps.errors import UsageError
from fastps.job.options import OPTIONS, NodePolicy, Range, tell_misspelt, value_of
from tests.job.conftest import Environment


def test_an_argument_counts_before_the_variable_and_that_before_the_default(environment: Environment) -> None:
    assert value_of("FASTPS_MAX_READERS") == 8
    environment({"FASTPS_MAX_READERS": "3"})
    assert (value_of("FASTPS_MAX_READERS"), value_of("FASTPS_MAX_READERS", 0)) == (3, 0)
    environment({"FASTPS_SERVER": "process"})
    assert (value_of("FASTPS_SERVER", ""), value_of("FASTPS_SERVER", "workers")) == ("process", "workers")


@pytest.mark.parametrize("variable", OPTIONS)
def test_an_empty_variable_is_the_default(environment: Environment, variable: str) -> None:
    environment({variable: ""})
    assert value_of(variable) == OPTIONS[variable].default


@pytest.mark.parametrize(("variable", "given", "sentence"), [
    ("FASTPS_SERVER", "threads", "expected server to be one of workers, process, found 'threads'"),
    *(
        ("FASTPS_STALL_MS", given, "expected stall_ms to be a number of 100 ms or more, or 0 for none, found")
        for given in (99, "soon", "nan")
    ),
    *(("FASTPS_BUCKET_MB", text, "expected bucket_mb to be a number of 0 (no overlap) or more ") for text in ("-1", "inf")),
    ("FASTPS_CHECKPOINT_EVERY", "1.5", "expected checkpoint_every to be a whole number of 0 or more updates, found '1.5'"),
])  # fmt: skip
def test_a_value_that_is_none_is_refused_by_the_name_that_gave_it(
    environment: Environment, variable: str, given: Any, sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        value_of(variable, given)
    assert str(caught.value).startswith(sentence)
    environment({variable: str(given)})
    with pytest.raises(UsageError, match=f"expected {variable} to be "):
        value_of(variable)


@pytest.mark.parametrize("variable", OPTIONS)
def test_nonsense_is_an_error_in_a_job_that_would_not_need_the_variable_too(environment: Environment, variable: str) -> None:
    environment({variable: "nonsense"})
    with pytest.raises(UsageError, match=f"expected {variable} to be "):
        fastps.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


def test_a_variable_that_is_misspelt_is_told_of_and_one_that_is_read_is_not(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "environment.md").read_text()
    for variable in set(re.findall(r"FASTPS_[A-Z_]*[A-Z]", page)):
        with monkeypatch.context() as alone:
            alone.setenv(variable, "1")
            tell_misspelt.__wrapped__()
    assert caplog.messages == []
    environment({"FASTPS_" + wrong: "1" for wrong in ("SYNCH", "STALL", "CHECKPOINTS", "PROXY")} | {"FASTPS_CHECKPOINT": "a"})
    tell_misspelt.__wrapped__()
    said = [f"fastps does not read the variable FASTPS_{wrong}: is it FASTPS_{right}?" for wrong, right in (
        ("STALL", "STALL_MS"), ("SYNCH", "SYNC"),
    )]  # fmt: skip
    assert caplog.messages == said


def test_run_has_an_option_for_each_value_of_a_policy_of_nodes() -> None:
    run: Any = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    found = {option.name: option for option in run.params}
    for option in NodePolicy.options().values():
        assert (option.flag in found[option.name].opts, found[option.name].default) == (True, option.default)


def test_the_page_of_variables_has_their_defaults_and_words() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "environment.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| `FASTPS_")]
    rows = {each[1].strip("`"): each for each in cells}
    of_nodes = {option.variable: option for option in NodePolicy.options().values()}
    for variable, option in {**OPTIONS, **of_nodes}.items():
        default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
        assert rows[variable][4] == f"`{default}`"
        if not isinstance(option.values, Range):
            assert [word for word in option.values if f"`{word}`" not in rows[variable][3] + rows[variable][4]] == []
        if variable in of_nodes:
            assert rows[variable][5] == f"`{option.flag}`"


@pytest.mark.parametrize("name", NodePolicy.options())
def test_a_policy_of_nodes_refuses_a_value_out_of_range(name: str) -> None:
    option = NodePolicy.options()[name]
    beyond = option.values.most * 2 + 1 if isinstance(option.values, Range) else "other"
    with pytest.raises(UsageError, match=rf"expected {option.flag} \({option.variable}\) to be "):
        NodePolicy(**{name: beyond})
