"""A replica's numbers: sums of pushes, also of those that lack parameters, and folds of them by parts."""

import numpy as np
import pytest

from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD, Hyper
from fastps.network.replica_state import LocalPush, ReplicaMemory
from fastps.network.spare import VersionBuffers
from fastps.network.sums import Terms
from fastps.store.store import Store

ALL = np.ones(2, np.bool_)


def _store(kind: str) -> Store:
    update = SGD(0.5, momentum=0.9)
    types = [kind, kind] if kind == "float64" else []
    parameters = place([("a", (3,), (1,), 0), ("b", (5,), (1,), 0)], types=types)
    layout = Layout(parameters, 1, update.rule, parse_policy("bsp"), 2, gradient_type=kind)  # type: ignore[arg-type]

    def write(views: list[np.ndarray]) -> None:
        for view in views:
            view[:] = 1.0

    return Store.create_for(layout, write, [update.hyper])


@pytest.mark.parametrize("kind", ["float32", "float64", "float16"])
def test_a_sum_has_each_push_times_its_factor_without_what_it_lacks(kind: str) -> None:
    with _store(kind) as store:
        memory = ReplicaMemory(store)
        for lane in range(2):
            memory.slot(lane, 0)[:] = 1.0 + lane
        whole = [LocalPush(0, 0, 1.0, ALL), LocalPush(1, 0, 0.5, ALL)]
        assert set(memory.add(whole, 0, memory.numbers).tolist()) == {2.0}
        lacking = [LocalPush(0, 0, 1.0, ALL), LocalPush(1, 0, 1.0, np.array([False, True]))]
        sums = memory.add(lacking, 0, memory.numbers).tolist()
        (first, length, _), (second, more, _) = memory.segments
        assert sums[first : first + length] == [1.0] * 3
        assert sums[second : second + more] == [3.0] * 5
        assert memory.add(lacking, second + 1, second + 2).tolist() == [3.0]
        assert not memory.add([], 0, memory.numbers).any()


def test_a_fold_by_parts_applies_the_rule_to_the_mean() -> None:
    with _store("float32") as store:
        memory, buffers = ReplicaMemory(store), VersionBuffers(0, 1, 0, 1)
        memory.sums[:] = 4.0
        terms = Terms([Hyper(0.5, 0.9)], np.array([True, False]))
        folding = memory.folding(terms, 2, 1.0, memory.state(0, 0), buffers)
        for first, last in ((16, memory.numbers), (0, 16)):
            folding.run(first, last)
            assert memory.is_finite(buffers, first, last)
        made = memory.state(1, 1)
        assert made.weights[:3].tolist() == [0.0] * 3
        assert made.weights[16:21].tolist() == [1.0] * 5
        assert made.planes[0][:3].tolist() == [2.0] * 3
        assert made.steps.tolist() == [1, 0]
        copied = made.empty()
        copied.take(made)
        assert copied.weights.tolist() == made.weights.tolist()
        made.planes[0][1] = np.inf
        assert not memory.is_finite(buffers, 0, 16)


def test_the_first_parameter_that_is_not_finite_is_found() -> None:
    with _store("float32") as store:
        memory = ReplicaMemory(store)
        memory.slot(0, 0)[:] = 1.0
        push = LocalPush(0, 0, 1.0, ALL)
        assert memory.first_bad(push) == -1
        memory.slot(0, 0)[17] = float("nan")
        assert memory.first_bad(push) == 1
        assert memory.first_bad(LocalPush(0, 0, 1.0, np.array([True, False]))) == -1
