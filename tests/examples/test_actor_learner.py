"""The actor-learner solves CartPole, and its evaluator, which only reads, ends the training of all actors."""

import json
from pathlib import Path

import pytest

from tests.support import example_programs

pytest.importorskip("gymnasium", reason="the extra fastps[demo] is not installed")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", example_programs.WAYS)
def test_the_evaluator_finds_the_task_solved_and_ends_the_training(way: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    ended = example_programs.run(way, "actor_learner/main.py", "--solved", "195", "--json", str(file))
    figures = json.loads(file.read_text())
    assert figures["solved"] and figures["mean_return"] >= 195, "CartPole begins at about 20"
    assert figures["version"] >= 10
    assert "solved in" in ended.stdout


def test_training_that_does_not_solve_the_task_ends_at_its_budget(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    ended = example_programs.run("alone", "actor_learner/main.py", "--updates", "25", "--solved", "501", "--json", str(file))
    assert not json.loads(file.read_text())["solved"]
    assert "not solved in" in ended.stdout


@pytest.mark.slow
def test_the_plain_program_learns_the_same_task(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    example_programs.run("alone", "actor_learner/plain.py", "--workers", "2", "--solved", "195", "--json", str(file))
    assert json.loads(file.read_text())["mean_return"] >= 195


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_cartpole_is_solved_with_every_seed(seed: int, tmp_path: Path) -> None:
    """What fails with every second seed is found seven times of eight."""
    file = tmp_path / "figures.json"
    example_programs.run("fastps run", "actor_learner/main.py", "--seed", str(seed), "--json", str(file))
    assert json.loads(file.read_text())["mean_return"] >= 475
