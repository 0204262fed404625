"""The simulated job of several nodes: no seed violates what is promised, a seed repeats its history, mutants are found."""

import json

import pytest

from fastps.lab.worlds import node_chaos
from fastps.lab.worlds.node_mutants import MUTANTS
from fastps.lab.worlds.node_worlds import World
from tests.support import commands


@pytest.mark.slow
def test_no_seed_violates_anything_and_every_kind_of_fault_occurs() -> None:
    findings = node_chaos.simulate(3, 0, 800)
    assert findings.violations == []
    assert findings.steps > 100_000
    assert all(count >= 10 for count in findings.faults.values()), findings.faults


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [2, 5])
def test_no_seed_of_many_violates_anything(nodes: int) -> None:
    assert node_chaos.run(nodes, 2_500, 100_000 * nodes).violations == [], "300 find every mutant"


def test_a_seed_plays_the_same_history_again() -> None:
    for seed in range(20):
        worlds = World(seed, 3), World(seed, 3)
        for world in worlds:
            world.run()
        assert worlds[0].turns == worlds[1].turns
        assert worlds[0].arena.folded == worlds[1].arena.folded


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_a_mutant_is_found(mutant: str) -> None:
    findings = node_chaos.simulate(3, 0, 300, mutant, stop=True)
    assert len(findings.violations) == 1, f"{MUTANTS[mutant].text}: not found in {findings.seeds} seeds"
    assert node_chaos.simulate(3, 0, 1).violations == [], "it is off again"


@pytest.mark.slow
def test_the_command_says_what_it_found_and_its_exit_code_tells_violations() -> None:
    (row,) = commands.rows("chaos", "--nodes", "3", "--seeds", "20")
    assert (row["nodes"], row["seeds"], row["violations"]) == (3, 20, 0)
    broken = commands.fastps("chaos", "--nodes", "3", "--seeds", "20", "--mutant", "keep-pending", "--json", "-")
    assert broken.returncode == 1
    assert json.loads(broken.stdout)["rows"][0]["violations"] > 0
