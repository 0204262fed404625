"""Stores whose weights are float64: sums, checkpoints, readers and rejected pushes keep all digits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.checkpoint.format import TENSORS_FILE
from tests.support import processes

THIRD = 1 / 3  # has other digits in float32
WEIGHTS = {"w": np.linspace(-1, 1, 15).reshape(5, 3) * THIRD, "b": np.full(3, THIRD)}


def _gradient(rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(value.shape) for name, value in WEIGHTS.items()}


@pytest.mark.parametrize("sync", ["bsp", "asp", "bsp,shards=2", "asp,ema=0.5"])
def test_one_worker_keeps_all_digits(sync: str) -> None:
    expected = {name: value.copy() for name, value in WEIGHTS.items()}
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=0.25), sync=sync) as store, store.attach(0) as worker:
        for step in range(20):
            worker.step(_gradient(0, step))
            for name, value in _gradient(0, step).items():
                expected[name] -= 0.25 * value
        for name, value in worker.weights.items():
            assert value.dtype == np.float64
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-14)


def test_workers_sums_are_those_of_one_process() -> None:
    def work(rank: int) -> list[list[float]]:
        with store.attach(rank) as worker:
            for step in range(50):
                worker.step(_gradient(rank, step))
            return [value.reshape(-1).tolist() for value in worker.weights.values()]

    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=0.1), workers=3) as store:
        first, *others = processes.results(processes.start_each(work, 3), 30)
    assert others == [first] * 2
    expected = [value.copy() for value in WEIGHTS.values()]
    for step in range(50):
        for value, *gradients in zip(expected, *(_gradient(rank, step).values() for rank in range(3)), strict=True):
            value -= 0.1 * sum(gradients) / 3
    for found, value in zip(first, expected, strict=True):
        np.testing.assert_allclose(found, value.reshape(-1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("update", [fastps.SGD(lr=0.1, momentum=0.9), fastps.Adam(lr=0.01)], ids=["momentum", "adam"])
@pytest.mark.parametrize("sync", ["bsp", "bsp,ema=0.9"])
def test_a_resumed_job_goes_on_with_the_same_bits(tmp_path: Path, update: Any, sync: str) -> None:
    def state(store: fastps.Store) -> list[bytes]:
        weights, states = store.committed()
        planes = [view for plane in range(store.layout.planes) for view in store.plane_views(states, plane)]
        return [view.tobytes() for view in [*store.weight_views(weights), *planes]]

    with fastps.Store.create(WEIGHTS, update, sync=sync) as store, store.attach(0) as worker:
        for step in range(12):
            if step == 7:
                saved = fastps.save(worker, tmp_path)
            worker.step(_gradient(0, step))
        expected = state(store)
    data = (saved / TENSORS_FILE).read_bytes()
    described = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {described[name]["dtype"] for name in described if not name.startswith("buffers/")} == {"F64"}
    checkpoint = fastps.load(tmp_path)
    assert checkpoint.weights()["w"].dtype == np.float64
    with fastps.Store.create(WEIGHTS, update, sync=sync, resume=checkpoint) as store, store.attach(0) as worker:
        for step in range(7, 12):
            worker.step(_gradient(0, step))
        assert state(store) == expected


@pytest.mark.parametrize(("saved", "started"), [(np.float64, np.float32), (np.float32, np.float64)])
def test_a_job_of_the_other_precision_does_not_resume_and_names_both(tmp_path: Path, saved: Any, started: Any) -> None:
    update = fastps.SGD(lr=0.1)
    first = {name: value.astype(saved) for name, value in WEIGHTS.items()}
    with fastps.Store.create(first, update) as store, store.attach(0) as worker:
        fastps.save(worker, tmp_path)
    other = {name: value.astype(started) for name, value in WEIGHTS.items()}
    found = rf"expected 'w' of {np.dtype(started)}, .*found 'w' of {np.dtype(saved)},"
    with pytest.raises(fastps.Error, match=found):
        fastps.Store.create(other, update, resume=fastps.load(tmp_path))


def test_readers_see_doubles() -> None:
    store = fastps.Store.create(WEIGHTS, fastps.SGD(lr=0.1))
    with store, store.attach(0) as worker, fastps.reader(store.job) as reader:
        for step in range(5):
            worker.step(_gradient(0, step))
            reader.pull()
            for name, value in worker.weights.items():
                assert reader.weights[name].dtype == np.float64
                assert np.array_equal(reader.weights[name], value)


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e308])
def test_a_push_whose_results_are_not_finite_is_rejected(bad: float) -> None:
    """Doubles beyond float32's largest are finite."""
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=10.0), sync="asp", nonfinite="reject") as store, store.attach(0) as worker:
        worker.step({"w": np.full((5, 3), 1e200), "b": np.zeros(3)})
        assert float(worker.weights["w"].max()) == pytest.approx(-1e201)
        before = worker.weights["w"].copy()
        worker.step({"w": np.full((5, 3), bad), "b": np.zeros(3)})
        assert np.array_equal(worker.weights["w"], before)
        assert store.arena.rejected(0)[0] == 1
