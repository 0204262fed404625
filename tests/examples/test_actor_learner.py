"""The actor-learner solves CartPole, and its evaluator, which only reads, ends the training of all actors."""

import pytest

from tests.support import example_programs

pytest.importorskip("gymnasium", reason="the extra fastps[demo] is not installed")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", example_programs.WAYS)
def test_the_evaluator_finds_the_task_solved_and_ends_the_training(way: str) -> None:
    figures, shown = example_programs.figures(way, "actor_learner/main.py", "--solved", "195")
    assert figures["solved"] and figures["mean_return"] >= 195, "CartPole begins at about 20"
    assert figures["version"] >= 10
    assert "solved in" in shown


@pytest.mark.slow
def test_training_that_does_not_solve_the_task_ends_at_its_budget() -> None:
    figures, shown = example_programs.figures("alone", "actor_learner/main.py", "--updates", "25", "--solved", "501")
    assert not figures["solved"]
    assert "not solved in" in shown


@pytest.mark.slow
def test_the_plain_program_learns_the_same_task() -> None:
    figures, _ = example_programs.figures("alone", "actor_learner/plain.py", "--workers", "2", "--solved", "195")
    assert figures["mean_return"] >= 195


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_cartpole_is_solved_with_every_seed(seed: int) -> None:
    """What fails with every second seed is found seven times of eight."""
    figures, _ = example_programs.figures("fastps run", "actor_learner/main.py", "--seed", str(seed))
    assert figures["mean_return"] >= 475
