"""Rudra-adv*'s broadcast tree: when weights reach the learners, by hand and beside an oracle, and the staleness of it."""

from typing import Any

import numpy as np
import pytest

from fastps.simulation.simulate import ComputeModel, Outcome
from tests.oracles.broadcast import arrivals
from tests.support.virtual_runs import lines_of, played, row_of

MS = 1_000_000


def test_a_hop_takes_weights_one_level_down() -> None:
    assert arrivals({1: 100}, 6, 10) == [[(110, 1)], [(110, 1)], [(120, 1)], [(120, 1)], [(120, 1)], [(120, 1)]]


def test_versions_that_come_while_a_node_sends_are_skipped() -> None:
    """ "Each learner continuously receives": node 0 sends 1 from 100 to 110, and then 3, the newest."""
    assert arrivals({1: 100, 2: 103, 3: 106}, 2, 10) == [[(110, 1), (120, 3)]] * 2


def _made(outcome: Outcome) -> dict[int, int]:
    """The time at which each version was made: all folds of a version have one, and no two versions share one."""
    return {version: int(now_ns) for version, now_ns in enumerate(np.unique(lines_of(outcome, "fold")["time_ns"]), 1)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("spec", "workers"), [("adv*:1,groups=2", 6), ("adv*:3,groups=3", 13), ("adv*:4,groups=4", 32)])
def test_simulated_learners_begin_with_the_weights_that_have_reached_them(spec: str, workers: int, seed: int) -> None:
    latency_ns = 7 * MS  # of a push, and of a hop
    compute = ComputeModel("lognormal", 20 * MS, 0.4)
    outcome = played(spec, workers=workers, steps=60, compute=compute, latency_ns=latency_ns, seed=seed)
    reached = arrivals(_made(outcome), workers, latency_ns)
    begun = lines_of(outcome, "begin")
    assert begun["version"].max() > 10
    for line in begun:
        now_ns = int(line["time_ns"])
        newest = max((each for at_ns, each in reached[line["worker"]] if at_ns <= now_ns), default=0)
        before = max((each for at_ns, each in reached[line["worker"]] if at_ns < now_ns), default=0)
        assert line["version"] in (before, newest), line


def test_a_tree_makes_adv_star_staler_than_adv_and_no_slower() -> None:
    """Section 5.5: "this improvement in performance comes at the cost of increasing the average staleness"."""
    options: dict[str, Any] = {"workers": 54, "steps": 300, "compute": ComputeModel("lognormal", 1350 * MS, 0.05)}
    options |= {"model_bytes": 289e6, "service_rate": 4.8e9}
    tree, background = (row_of(spec, **options) for spec in ("adv:1,groups=7", "adv*:1,groups=7"))
    assert background["sigma_mean"] > tree["sigma_mean"] + 0.05
    assert background["steps_per_s"] > tree["steps_per_s"]


def test_without_times_of_messages_weights_are_there_at_once() -> None:
    outcome = played("adv*:1", workers=8, steps=40, compute=ComputeModel("lognormal", 20 * MS, 0.4))
    made = _made(outcome)
    for line in lines_of(outcome, "begin"):
        now_ns = int(line["time_ns"])
        assert line["version"] in (
            sum(at_ns < now_ns for at_ns in made.values()),
            sum(at_ns <= now_ns for at_ns in made.values()),
        )
