"""The roofline's loops, and the kernels' own loops for benchmarks, compute what they should."""

import mmap

import numpy as np
import numpy.typing as npt
import pytest

from fastps.job.specs import parse_policy
from fastps.kernels.baseline import roofline
from fastps.kernels.baseline.scheduler_load import SchedulerLoad
from fastps.kernels.combining.ring import Ring
from fastps.kernels.scheduling.scheduler import Scheduler
from fastps.kernels.update import fold
from tests.support import processes

Floats = npt.NDArray[np.float32]
LENGTH = 1013


def _aligned(*shape: int) -> Floats:
    """Zeros whose rows begin on cache lines."""
    rows, length = shape if len(shape) == 2 else (1, shape[0])
    stride = -(-length // 16) * 16
    memory = np.zeros(rows * stride + 16, np.float32)
    skip = -memory.ctypes.data % roofline.LINE // 4
    found: Floats = memory[skip : skip + rows * stride].reshape(rows, stride)
    return found if len(shape) == 2 else found[0]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("planes", "count"), [(2, 1), *((1, count) for count in (1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 61))])
def test_the_roofline_computes_what_the_fold_computes(planes: int, count: int, streaming: bool) -> None:
    random = np.random.default_rng(count)
    gradients = [_aligned(LENGTH) for _ in range(count)]
    weights, weights_out = _aligned(LENGTH), _aligned(LENGTH)
    state, state_out = _aligned(planes, LENGTH), _aligned(planes, LENGTH)
    for array in (*gradients, weights, *([state] if planes == 1 else [])):
        array[:] = random.standard_normal(array.shape)
    length = weights.shape[0]
    hyper = (0.1, 0.9 if planes == 1 else 0.0, 0.0, 0.0, 0.9, 0.999, 1e-8, 0.0, 0)
    pushes = [(gradient, [hyper], [True], 1.0) for gradient in gradients]
    rule = fold.RULE_SGD if planes == 1 else fold.RULE_ADAM
    steps = np.array([1 if planes == 1 else 0])
    expected = fold.fold(rule, fold.FOLD_SUM, [(0, length, 0)], pushes, weights, state, steps)
    rates = {"learning_rate": 0.1, "momentum": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    loop = roofline.Loop(gradients, weights, state, weights_out, state_out, **rates)
    loop.run(0, 512, streaming)
    loop.run(512, length, streaming, 2)
    np.testing.assert_allclose(weights_out, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state_out, expected[1], rtol=1e-4, atol=1e-5)


def test_every_second_pass_reads_what_the_first_has_written() -> None:
    gradient, weights, weights_out = (_aligned(32) for _ in range(3))
    state, state_out = _aligned(1, 32), _aligned(1, 32)
    gradient[:], weights[:], state[:] = 1.0, 1.0, 0.0
    rates = {"learning_rate": 0.5, "momentum": 0.5}
    there = roofline.Loop([gradient], weights, state, weights_out, state_out, **rates)
    back = roofline.Loop([gradient], weights_out, state_out, weights, state, **rates)
    there.run(0, 32, False, 3, back)
    assert (weights[0], weights_out[0], state_out[0, 0]) == (-0.25, -1.125, 1.75)
    other = roofline.Loop([gradient] * 2, weights_out, state_out, weights, state, **rates)
    with pytest.raises(ValueError, match="number of gradients"):
        there.run(0, 32, False, 2, other)


def test_a_folding_runs_again_into_the_same_buffers() -> None:
    gradient, weights, out = (np.full(40, value, np.float32) for value in (1, 1, 0))
    state, steps = np.ones((1, 40), np.float32), np.ones(1, np.int64)
    state_out, steps_out = state.copy(), steps.copy()
    pushes = [(gradient, [(0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)], [True], 1.0)]
    folding = fold.Folding(fold.RULE_SGD, fold.FOLD_SUM, [(0, 40, 0)], pushes, weights, state, steps, out, state_out, steps_out)
    folding.run(0, 40, 3)
    assert (out[0], state_out[0, 0], steps_out[0]) == (0.25, 1.5, 2)
    with pytest.raises(ValueError, match="outputs of the inputs' shapes"):
        fold.Folding(fold.RULE_SGD, fold.FOLD_SUM, [(0, 40, 0)], pushes, weights, state, steps, out[:39], state_out, steps_out)


def test_refusals_say_what_was_expected() -> None:
    weights, state = _aligned(32), _aligned(1, 32)
    with pytest.raises(ValueError, match="expected at least one gradient, found 0"):
        roofline.Loop([], weights, state, weights, state, learning_rate=0.1, momentum=0.9)
    adam = _aligned(2, 32)
    with pytest.raises(ValueError, match="expected one gradient, found 2"):
        roofline.Loop([weights] * 2, weights, adam, weights, adam, learning_rate=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="begin on a cache line"):
        roofline.Loop([weights[1:17]], weights[:16], state[:, :16].copy(), weights[:16], state, learning_rate=0.1, momentum=0.9)


def test_two_processes_echo_descriptors_and_spin() -> None:
    size = Ring.bytes_for(4)
    memory = mmap.mmap(-1, 3 * 4096)
    views = [memoryview(memory)[4096 * index : 4096 * index + size] for index in range(2)]
    there, back = Ring(views[0], 4), Ring(views[1], 4)

    def work(first: bool) -> None:
        rings = (there, back) if first else (back, there)
        for _ in range(2):
            rings[0].echo(rings[1], first, 20)
            roofline.spin(memoryview(memory)[8192:8320], first, 20)

    child = processes.start(lambda: work(False))
    work(True)
    processes.results([child], 30)
    assert (len(there), len(back)) == (0, 0)


@pytest.mark.parametrize(("spec", "folds"), [
    ("bsp", 100), ("asp", 800), ("ssp:3", 800), ("dssp:3,15", 800), ("softsync:4", 400), ("softsync:1", 100), ("r2sp:0.8", 800),
])  # fmt: skip
def test_arrivals_make_the_folds_that_their_pushes_earn(spec: str, folds: int) -> None:
    scheduler = Scheduler(8, **parse_policy(spec).values(8))
    load = SchedulerLoad(scheduler)
    found = sum(load.play(events) for events in (300, 500))
    assert found == scheduler.version
    # Pushes that wait for their place in the order are folded later.
    assert folds - (8 if spec.startswith("r2sp") else 0) <= found <= folds
    assert sum(scheduler.clock(worker) for worker in range(8)) == 800


def test_arrivals_too_late_are_dropped_as_a_store_would() -> None:
    scheduler = Scheduler(8, **parse_policy("backup:1").values(8))
    folds = SchedulerLoad(scheduler).play(800)
    assert folds * 7 + sum(scheduler.dropped(worker) for worker in range(8)) == pytest.approx(800, abs=8)
