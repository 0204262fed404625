"""The fold of rows against NumPy: each rule, several pushes with common rows, sums and one by one, any width."""

from typing import Any

import numpy as np
import pytest

from fastps.kernels.protocol.lane import DONE, KIND_PUSH
from fastps.kernels.protocol.row_writer import RowWriter
from fastps.kernels.rows import rows
from tests.support import plain_arena

pytestmark = pytest.mark.unit

ROWS, LANES = 40, 3
RATE, BETA1, BETA2, EPSILON, RATE_DECAY = 0.1, 0.8, 0.9, 1e-6, 0.01
MODES = {"sum": plain_arena.BSP, "each": plain_arena.ASP}


class Table:
    """An arena with one table of ROWS rows, and its NumPy twin in double precision."""

    def __init__(self, rule: str, width: int, mode: str) -> None:
        self.rule, self.width, self.mode = rule, width, mode
        tables = [(ROWS, width, 0, 0, 0)]
        measures: dict[str, Any] = {"floats": 16, "slots": 1, "tables": tables, "row_rule": rows.RULES[rule]}
        job = plain_arena.Job(LANES, MODES[mode], segments=[(0, 0, 0)], **measures)
        self.memory, self.arena, self.lanes = job.memory, job.arena, job.lanes
        for lane in range(LANES):
            assert self.arena.claim(lane, 1) == 0
        self.writers = [RowWriter(self.arena, lane) for lane in range(LANES)]
        self.weights = np.random.default_rng(1).standard_normal((ROWS, width))
        self.found[:] = self.weights
        self.weights = self.found.astype(np.float64)
        planes, words = rows.PLANES[rows.RULES[rule]]
        self.state = [np.zeros((ROWS, words or width)) for _ in range(planes)]
        self.steps = self.posted = 0

    @property
    def found(self) -> Any:
        return np.frombuffer(self.memory, np.float32, ROWS * self.width, self.arena.table_offset(0)).reshape(ROWS, self.width)

    def push(self, gradients: list[tuple[Any, Any]], scale: float) -> None:
        """Post a push of each lane; then one lane folds them all."""
        for lane, (numbers, values) in enumerate(gradients):
            self.writers[lane].collect(0, 0, numbers, values)
            self.lanes[lane].pull(0)
            self.lanes[lane].set_hyper(0, 0, RATE, 0, 0, 0, BETA1, BETA2, EPSILON, RATE_DECAY, 0)
            self.lanes[lane].set_presence(0, (1).to_bytes(8, "little"))
            self.lanes[lane].set_versions(0)
            assert self.lanes[lane].post(KIND_PUSH, self.posted, 0, self.lanes[lane].version, 10 + lane, scale)
        self.posted += 1
        assert self.lanes[0].try_combine(100) == DONE
        dense = [np.zeros((ROWS, self.width)) for _ in gradients]
        for (numbers, values), gradient in zip(gradients, dense, strict=True):
            np.add.at(gradient, numbers, values.astype(np.float64) * scale)
        touched = [np.unique(numbers) for numbers, _ in gradients]
        if self.mode == "sum":
            self._apply(sum(dense) / len(dense), np.unique(np.concatenate(touched)))
        else:
            for gradient, numbers in zip(dense, touched, strict=True):
                self._apply(gradient, numbers)

    def _apply(self, gradient: Any, at: Any) -> None:
        step = gradient[at]
        if self.rule == "sgd":
            self.weights[at] -= RATE * step
        elif self.rule == "adagrad":
            self.state[0][at] += step**2
            self.weights[at] -= RATE / (1 + self.steps * RATE_DECAY) * step / (np.sqrt(self.state[0][at]) + EPSILON)
        elif self.rule == "sparse_adam":
            mean, square = self.state
            mean[at] += (1 - BETA1) * (step - mean[at])
            square[at] += (1 - BETA2) * (step**2 - square[at])
            size = RATE * np.sqrt(1 - BETA2 ** (self.steps + 1)) / (1 - BETA1 ** (self.steps + 1))
            self.weights[at] -= size * mean[at] / (np.sqrt(square[at]) + EPSILON)
        else:
            self.state[0][at] += (step**2).mean(1, keepdims=True)
            self.weights[at] -= RATE * step / (np.sqrt(self.state[0][at]) + EPSILON)
        self.steps += 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("rule", rows.RULES)
def test_pushes_with_common_rows_equal_numpy(rule: str, width: int, mode: str) -> None:
    table, rng = Table(rule, width, mode), np.random.default_rng(width)
    for _ in range(20):
        gradients = []
        for lane in range(LANES):
            numbers = rng.integers(0, ROWS, 10 * lane + 3)  # duplicates within a push, and rows that several pushes have
            gradients.append((numbers, rng.standard_normal((len(numbers), width)).astype(np.float32)))
        table.push(gradients, scale=0.5)
    assert np.abs(table.found - table.weights).max() < 2e-5 * max(1.0, np.abs(table.weights).max())


@pytest.mark.parametrize("mode", MODES)
def test_a_push_of_all_rows_and_one_of_none(mode: str) -> None:
    table = Table("adagrad", 16, mode)
    everything = np.arange(ROWS), np.ones((ROWS, 16), np.float32)
    nothing = np.zeros(0, np.int64), np.zeros((0, 16), np.float32)
    table.push([everything, nothing, everything], scale=1.0)
    assert np.abs(table.found - table.weights).max() < 1e-6


def test_every_rule_has_a_twin_here() -> None:
    assert set(rows.RULES) == {"sgd", "adagrad", "sparse_adam", "row_wise_adagrad"}
