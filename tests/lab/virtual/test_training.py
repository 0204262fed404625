"""Real gradients in virtual time: the weights are those that a plain loop would have, and that each worker would have read."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastps import parse_policy
from fastps.errors import UsageError
from fastps.lab.demo.data import Dataset, load
from fastps.lab.demo.models import accuracy, model_for
from fastps.lab.demo.options import TrainingOptions
from fastps.lab.demo.worker_main import Batches
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.lab.virtual.training import VirtualTraining, _Pushed, _Replay, _Shard, train_virtually
from fastps.simulation.simulate import ComputeModel, Outcome, Simulation, simulate
from tests.support import commands

VARIED = parse_compute("lognormal:10ms,0.4")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def trained(spec: str, data: Dataset, simulation: Simulation, **options: Any) -> Outcome:
    return train_virtually(parse_policy(spec), simulation, VirtualTraining(data=data, looks=4, **options))


def stepping(data: Dataset, workers: int) -> tuple[torch.nn.Module, list[Batches], torch.optim.SGD]:
    """What a plain loop needs: the same first weights and the same batches."""
    torch.manual_seed(0)
    model = model_for(data)
    options = TrainingOptions(workers=workers, batch_size=16)
    batches = [Batches(data, options, worker) for worker in range(workers)]
    return model, batches, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def replay_of(spec: str, simulation: Simulation, training: VirtualTraining) -> _Replay:
    trace = simulate(parse_policy(spec), simulation, trace=True).trace
    assert trace is not None
    return _Replay(parse_policy(spec), simulation, training, trace)


def learned(spec: str, data: Dataset, simulation: Simulation) -> np.ndarray:
    """The weights at the end."""
    replay = replay_of(spec, simulation, VirtualTraining(data=data, learning_rate=0.05, momentum=0.5))
    replay.run(None)
    return np.concatenate([shard.weights for shard in replay._shards])


def flat(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("specs", "compute", "divisor"), [
    (("bsp", "bsp,shards=5"), VARIED, 3),
    # Three workers of one speed push at one instant: each drain is a step of all three.
    (("asp,combine=true", "ssp:1,shards=3,combine=true"), ComputeModel("constant", 1e6), 1),
])  # fmt: skip
def test_a_version_of_all_pushes_is_torch_on_their_mean_or_sum(
    specs: tuple[str, ...], compute: ComputeModel, divisor: int, digits: Dataset
) -> None:
    simulation = Simulation(workers=3, steps=20, batch=16, compute=compute)
    model, batches, optimizer = stepping(digits, 3)
    for _ in range(20):
        optimizer.zero_grad()
        for each in batches:
            inputs, labels = each.next()
            (torch.nn.functional.cross_entropy(model(inputs), labels) / divisor).backward()
        optimizer.step()
    for spec in specs:
        np.testing.assert_allclose(learned(spec, digits, simulation), flat(model), atol=1e-5)


def test_a_gradient_is_of_the_weights_that_its_worker_had_read(digits: Dataset) -> None:
    """Workers that push in turn under asp: each gradient is of the weights of two updates ago."""
    steps, workers = 30, 3
    times = [[10 + worker, *[30] * steps] for worker in range(workers)]
    simulation = Simulation(workers=workers, steps=steps, batch=16, compute=ComputeModel("replay", replay=times))
    outcome = trained("asp", digits, simulation, learning_rate=0.05, momentum=0.5)
    assert outcome.row["staleness"][-1][0] == 2
    model, batches, optimizer = stepping(digits, workers)
    read = [[parameter.detach().clone() for parameter in model.parameters()] for _ in range(workers)]
    for update in range(steps * workers):
        worker = update % workers
        newest = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter, old in zip(model.parameters(), read[worker], strict=True):
            parameter.data.copy_(old)
        optimizer.zero_grad()
        inputs, labels = batches[worker].next()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        for parameter, new in zip(model.parameters(), newest, strict=True):
            parameter.data.copy_(new)
        optimizer.step()
        read[worker] = [parameter.detach().clone() for parameter in model.parameters()]
    np.testing.assert_allclose(learned("asp", digits, simulation), flat(model), atol=1e-5)
    assert outcome.row["test_accuracy"] == pytest.approx(accuracy(model, digits), abs=1 / 360), "one image may tip over"


@pytest.mark.slow
@pytest.mark.parametrize("spec", [
    "ssp:1", "dssp:1,4", "backup:2", "psp:4,0.5", "hardsync:64", "softsync:2", "softsync:5,scale=staleness", "adv:1", "adv*:1",
    "r2sp:0.8", "r2sp:0.8,tune=true", "bsp,tune=true", "ssp:2,clip=1", "asp,scale=1/sigma,combine=true",
])  # fmt: skip
def test_every_discipline_learns_and_says_the_same_twice(spec: str, digits: Dataset) -> None:
    simulation = Simulation(workers=6, steps=40, batch=16, compute=VARIED, model_bytes=1000, bandwidth=1e6)
    options = {"learning_rate": 0.02, "momentum": 0.5}
    first, second = (trained(spec, digits, simulation, **options).row for _ in range(2))
    assert first["test_accuracy"] > 0.5
    assert first["accuracy_over_time"] == second["accuracy_over_time"] and first["train_loss"] == second["train_loss"]
    times = [seconds for seconds, _ in first["accuracy_over_time"]]
    assert len(times) == 4 and times == sorted(times)


def test_a_rate_that_falls_stops_learning(digits: Dataset) -> None:
    simulation = Simulation(workers=2, steps=60, batch=16, compute=VARIED)
    early = tuple(share / 100 for share in range(1, 9))
    whole, fallen = (trained("asp", digits, simulation, learning_rate=0.1, falls_at=falls).row for falls in ((), early))
    assert fallen["train_loss"] > 2 * whole["train_loss"]


def test_a_rate_falls_by_the_factor_that_is_asked_for(digits: Dataset) -> None:
    """One fall at the beginning by a half is half the rate from the beginning on."""
    simulation = Simulation(workers=2, steps=20, batch=16, compute=VARIED)
    rates: list[dict[str, Any]] = [{"learning_rate": 0.05}, {"learning_rate": 0.1, "falls_at": (0.0,), "falls_by": 0.5}]
    one, other = (trained("asp", digits, simulation, **each).row for each in rates)
    assert one["train_loss"] == other["train_loss"]


@pytest.mark.parametrize("spec", ["bsp", "asp,shards=3"])
def test_a_moving_average_of_the_weights_is_judged_in_their_place(spec: str, digits: Dataset) -> None:
    """Algorithm 4's sequence of backup workers, which begins with the first weights."""
    simulation = Simulation(workers=2, steps=10, batch=16, compute=VARIED)
    replay = replay_of(f"{spec},ema=0.9", simulation, VirtualTraining(data=digits, learning_rate=0.05))
    expected = [[shard.weights] for shard in replay._shards]
    for shard, weights in zip(replay._shards, expected, strict=True):
        fold = shard.fold
        shard.fold = lambda *given, fold=fold, shard=shard, weights=weights: (fold(*given), weights.append(shard.weights))  # type: ignore[method-assign, assignment, misc]
    curve, _ = replay.run(None)
    for shard, weights in zip(replay._shards, expected, strict=True):
        average = weights[0].astype(np.float64)
        for each in weights[1:]:
            average = 0.9 * average + 0.1 * each
        np.testing.assert_allclose(shard.average, average, atol=1e-6)
        assert not np.allclose(shard.average, shard.weights, atol=1e-4)
    replay._model.load([shard.average for shard in replay._shards])
    assert curve[-1][1] == replay._model.accuracy()


@pytest.mark.parametrize(
    ("options", "message"), [({"learning_rate": 0.0}, "--lr"), ({"momentum": 1.0}, "--momentum"), ({"looks": 0}, "look")]
)
def test_values_that_do_not_fit_are_refused(options: dict[str, float], message: str, digits: Dataset) -> None:
    with pytest.raises(UsageError, match=message):
        VirtualTraining(data=digits, **options)


def test_late_pushes_are_refused(digits: Dataset) -> None:
    with pytest.raises(UsageError, match="--late-push"):
        trained("asp", digits, Simulation(late_pushes=(0.1, 1000)))


def test_a_shard_keeps_no_version_that_nobody_will_read(digits: Dataset) -> None:
    simulation = Simulation(workers=5, steps=30, batch=16, compute=VARIED)
    replay = replay_of("ssp:3", simulation, VirtualTraining(data=digits))
    replay.run(None)
    assert set(replay._shards[0]._kept) == {replay._shards[0].version}
    assert np.isfinite(replay._shards[0].weights).all()


@pytest.mark.slow
def test_the_command_shows_and_writes_the_accuracy(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--train", "--sync", "bsp,asp", "-n", "3", "--steps", "30"]
    assert "accuracy" in commands.done("simulate", *arguments, "--json", str(file)).stdout
    for row in json.loads(file.read_text())["rows"]:
        assert row["accuracy_over_time"][-1][1] == row["test_accuracy"] > 0.5


@pytest.mark.slow
def test_the_goal_is_reached_when_one_worker_had_ten_small_losses_in_a_row(digits: Dataset) -> None:
    """In virtual time a goal is a matter of the losses: a loss that is never met, one that is met at once, and one between."""
    simulation = Simulation(workers=2, steps=60, batch=16, compute=ComputeModel("replay", replay=[[10_000_000], [15_000_000]]))
    assert trained("asp", digits, simulation).row["goal_s"] is None, "none was asked for"
    assert trained("asp", digits, simulation, goal=1e-9).row["goal_s"] is None
    assert trained("asp", digits, simulation, goal=1e9).row["goal_s"] == pytest.approx(0.1), "the first worker's tenth step"
    found = trained("asp", digits, simulation, goal=1.0).row
    assert 0.1 < found["goal_s"] < found["seconds"]


def folded(spec: str, data: Dataset, gradients: list[int], batches: list[int], staleness: list[int]) -> Any:
    """Four weights of 0 after one fold of these pushes with a rate of 0.5."""
    training = VirtualTraining(data=data, learning_rate=0.5, momentum=0.0)
    shard = _Shard(np.zeros(4, np.float32), Counter({0: 1}), training, parse_policy(spec))
    pushes = [_Pushed(np.full(4, each, np.float32), 1.0, batch, batch) for each, batch in zip(gradients, batches, strict=True)]
    shard.fold(list(zip(pushes, staleness, strict=True)), slice(0, 4), training.learning_rate)
    return shard.weights


@pytest.mark.parametrize(("spec", "batches", "staleness", "by"), [
    ("softsync:1", [8, 8], [0, 0], 1.0),
    ("softsync:4", [8, 8], [2, 5], 1 / 4),  # equation (6): alpha_0 / n, whatever each gradient's staleness
    ("softsync:30,scale=mean", [8, 8], [9, 9], 1.0),
    ("adv:2", [8, 8], [1, 1], 1 / 2),
    ("adv*:2", [8, 8], [1, 1], 1 / 2),
    ("hardsync:128", [4, 4], [0, 0], 1 / 4),  # section 3.2: sqrt(lambda mu / B) = sqrt(8 / 128)
    ("hardsync:128", [64, 64], [0, 0], 1.0),
    ("hardsync:2", [9, 9], [0, 0], 3.0),
    ("hardsync:10", [10, 30], [0, 0], 2.0),
])  # fmt: skip
def test_learning_rates_are_those_of_rudras_equations(
    spec: str, batches: list[int], staleness: list[int], by: float, digits: Dataset
) -> None:
    """Equations (3), (5), (6) and section 3.2: alpha times the factor, times the mean of the gradients 1 and 3."""
    assert folded(spec, digits, [1, 3], batches, staleness) == pytest.approx([-0.5 * by * (1 + 3) / 2] * 4)


def test_a_rate_for_each_gradients_own_staleness_is_footnote_3(digits: Dataset) -> None:
    """ "Such a strategy should apply smaller learning rates to staler gradients": 1 / 4, and 1 for a staleness of 0 and 1."""
    found = folded("softsync:1,scale=1/sigma", digits, [8, 3, 1], [8] * 3, [4, 1, 0])
    assert found == pytest.approx([-0.5 * (8 / 4 + 3 + 1) / 3] * 4)
