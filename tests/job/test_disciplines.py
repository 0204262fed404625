"""The table of disciplines: what it exports, and what other lists make of it."""

import ast
from pathlib import Path

import pytest

import fastps
from fastps.advice.advise import candidates
from fastps.job import disciplines
from fastps.job.disciplines import DISCIPLINES
from fastps.job.specs import parse_policy
from fastps.lab.worlds.chaos_worlds import SPECS
from tests.oracles.table import ORACLES, PLAYED

# `auto` is for DistributedOptimizer alone, and `policy` is Policy itself; they have no function of their own in fastps.
WITHOUT_FUNCTION = {"auto", "policy"}


def test_every_row_has_a_public_function() -> None:
    """A new row's function is to be named in `__all__` of fastps/job/disciplines.py, and nowhere else."""
    functions = {row.build.__name__ for name, row in DISCIPLINES.items() if name not in WITHOUT_FUNCTION}
    assert functions == set(disciplines.__all__)
    for name in disciplines.__all__:
        assert name in fastps.__all__
        assert getattr(fastps, name) is getattr(disciplines, name)


def test_type_checkers_read_the_public_names_that_there_are() -> None:
    """A public name is imported in fastps/__init__.pyi, in a line of its own; disciplines are not."""
    tree = ast.parse(Path(fastps.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    (exported,) = [node.module for node in imports if node.names[0].name == "*"]
    assert exported == disciplines.__name__
    names = {alias.asname for node in imports for alias in node.names if alias.name != "*"}
    assert names | set(disciplines.__all__) == set(fastps.__all__)


def test_every_row_has_an_oracle_that_the_scheduler_is_compared_with() -> None:
    """A new row's oracle is a file of tests/oracles with an attribute PLAYS."""
    played = {play.spec_of(8).replace(",", ":").partition(":")[0] for play in PLAYED}
    played |= {spec.partition(":")[0] for plays in ORACLES.values() for spec in plays.simulated}
    assert set(DISCIPLINES) - played == WITHOUT_FUNCTION


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 100])
def test_advice_tries_what_the_rows_name_and_all_of_it_fits_the_workers(workers: int) -> None:
    specs = candidates(workers, batch=16)
    assert len(specs) == len(set(specs))
    assert {"bsp", "asp"} <= set(specs)
    for spec in specs:
        parse_policy(spec).check_workers(workers)
    tried = {spec.replace(",", ":").partition(":")[0] for spec in specs}
    rows = {name for name, row in DISCIPLINES.items() if row.advised(8, 16)}
    assert tried == (rows if workers > 1 else {"bsp", "asp"})


def test_chaos_plays_what_the_rows_name() -> None:
    assert len(SPECS) == len(set(SPECS))
    for name, row in DISCIPLINES.items():
        for spec in row.chaos:
            assert spec in SPECS
            assert parse_policy(spec).spec.replace(",", ":").partition(":")[0] == name
            parse_policy(spec).check_workers(2)
