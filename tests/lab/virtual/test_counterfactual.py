"""A recorded run is played again with pushes left out, or computed with the newest weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastps.errors import UsageError
from fastps.lab.virtual.counterfactual import Counterfactual, counterfactual_of
from fastps.lab.virtual.driver import RECEIVE
from fastps.lab.virtual.recorded import Recorded, recorded_of
from tests.lab.virtual.test_replay import FIRST, STEPS, WORKERS, Arrays, gradient, record, replayed


@pytest.fixture
def asp(tmp_path: Path) -> Recorded:
    return recorded_of(record("asp", tmp_path / "run.trace")[1], tmp_path / "run.trace")


def plain(run: Counterfactual) -> Arrays:
    """What a loop over the commits of an `asp` run of one shard gives: each push by itself, with momentum."""
    steps = run.recorded.steps
    versions, momentum = [{name: value.copy() for name, value in FIRST.items()}], {name: 0 * FIRST[name] for name in FIRST}
    for commit in run.recorded.commits[0]:
        for event in commit:
            if event.kind != RECEIVE:
                continue
            made = {name: value.copy() for name, value in versions[-1].items()}
            if (event.worker, event.detail) not in run.left_out:
                of = steps[event.worker]
                read = versions[int(of.reads[event.detail, 0])]
                for name in FIRST:
                    found = gradient(read[name], event.worker, int(of.numbers[event.detail]))
                    is_first = not momentum[name].any()
                    momentum[name] = found if is_first else np.float32(0.5) * momentum[name] + found
                    made[name] -= np.float32(0.1) * momentum[name]
            versions.append(made)
    return versions[-1]


@pytest.mark.parametrize(
    ("without", "fresh"), [(["2:5"], []), (["1"], []), ([], ["2:6"]), (["0:3", "2:7"], ["1:4"]), ([], ["0:1", "0:2"])]
)
def test_changed_pushes_give_the_weights_of_a_plain_loop(
    without: list[str], fresh: list[str], asp: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = counterfactual_of(asp, without, fresh)
    weights, row = replayed(run, monkeypatch)
    for name, expected in plain(run).items():
        np.testing.assert_allclose(weights[name], expected, rtol=1e-5, atol=1e-6)
    assert row["pushes"] == sum(STEPS + rank for rank in range(WORKERS))
    assert row["changed"] == list(run.sentences) and row["gradients"] < row["pushes"]
    if without:
        _, recorded = replayed(asp, monkeypatch)
        assert row["weights"] != recorded["weights"]


def test_a_fresh_push_reads_what_is_there_before_it_counts(asp: Recorded) -> None:
    run = counterfactual_of(asp, fresh=["2:6"])
    commits = [commit for commit in asp.commits[0] if any((each.worker, each.detail) == (2, 6) for each in commit)]
    newest = commits[0][0].version - sum(each.kind == RECEIVE for each in commits[0])
    assert run.recorded.steps[2].reads[6, 0] == newest
    assert (np.diff(run.recorded.steps[2].reads[:, 0]) >= 0).all()
    assert run.sentences[0].startswith(f"worker 2, step 6: computed with version {newest} instead of ")


@pytest.mark.parametrize(("without", "fresh", "message"), [
    (["x"], [], r"^--without: expected a worker, or a worker and a step, as in 2 or 2:140, found 'x'$"),
    ([], ["2"], r"^--fresh: expected a worker and a step, as in 2:140, found '2'$"),
    (["3:1"], [], r"^--without 3:1: expected a worker from 0 to 2, found 3$"),
    ([], ["1:99"], r"^--fresh 1:99: expected a step that worker 1 pushed in the recorded run \(steps 0 to 12\)$"),
])  # fmt: skip
def test_pushes_that_the_run_has_not_are_refused(without: list[str], fresh: list[str], message: str, asp: Recorded) -> None:
    with pytest.raises(UsageError, match=message):
        counterfactual_of(asp, without, fresh)


def test_a_push_that_was_dropped_has_nothing_to_be_fresh_for(asp: Recorded) -> None:
    dropped = asp.steps[1].dropped.copy()
    dropped[3] = True
    run = replace(asp, steps=[asp.steps[0], replace(asp.steps[1], dropped=dropped), asp.steps[2]])
    with pytest.raises(UsageError, match=r"^--fresh 1:3: expected a push that counted, found one that was dropped"):
        counterfactual_of(run, fresh=["1:3"])
