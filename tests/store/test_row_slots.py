"""Rows that a worker pushes of a job's tables, without torch: what is summed, what is refused, and what memory they take."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.store.row_slots import RowSlots
from tests.support import processes


def _allocated(store: fastps.Store) -> int:
    return 512 * os.fstat(store.descriptor).st_blocks


def test_rows_out_of_range_and_other_shapes_are_refused_before_anything_is_pushed() -> None:
    table = np.zeros((10, 4), np.float32)
    with fastps.Store.create({"t": table}, fastps.SGD(lr=1.0), tables=["t"]) as store, store.attach(0) as worker:
        wrong = ([3, 10], 4, "rows 0 to 9, found row 10"), ([-1], 4, "found row -1"), ([1], 3, "shape")
        for numbers, width, message in wrong:
            with pytest.raises(fastps.UsageError, match=message):
                worker.put_rows("t", numbers, np.ones((len(numbers), width)))
        with pytest.raises(fastps.UsageError, match="the name of a table"):
            worker.put_rows("u", [1], np.ones((1, 4)))
        worker.step()
        assert not worker.weights["t"].any()
        worker.put_rows("t", [2, 2], np.ones((2, 4)))
        worker.step()
        assert worker.weights["t"][2].tolist() == [-2.0] * 4


def test_memory_is_allocated_for_the_rows_that_are_pushed_and_not_for_all() -> None:
    rows, width, pushed = 100_000, 32, 2_000
    table = np.zeros((rows, width), np.float32)
    with fastps.Store.create({"t": table}, fastps.SGD(lr=1.0), tables=["t"]) as store, store.attach(0) as worker:
        before = _allocated(store)
        assert before < 1.2 * table.nbytes, "the table lies in memory once"
        worker.put_rows("t", np.arange(pushed), np.ones((pushed, width)))
        worker.step()
        # The slot and the log, each with the rows' values and numbers, in whole pages.
        assert _allocated(store) - before < 2.5 * pushed * 4 * (width + 2)
        worker.put_rows("t", np.arange(pushed), np.ones((pushed, width)))
        after = _allocated(store)
        worker.step()
        assert _allocated(store) == after


def test_a_push_that_no_memory_is_left_for_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.zeros((50_000, 16), np.float32)
    with fastps.Store.create({"t": table}, fastps.SGD(lr=1.0), tables=["t"]) as store, store.attach(0) as worker:
        monkeypatch.setattr("fastps.system.shared_memory.available_bytes", lambda: (1_000, "limit of the test"))
        with pytest.raises(fastps.ArenaError, match=r"a push of 40,000 rows of 't' needs .* free \(limit of the test\)"):
            worker.put_rows("t", np.arange(40_000), np.ones((40_000, 16)))
        monkeypatch.undo()
        worker.put_rows("t", [1], np.ones((1, 16)))
        worker.step()
        assert worker.weights["t"].sum() == -16


def test_a_push_without_rows_leaves_the_table_and_its_count_of_steps() -> None:
    weights = {"d": np.zeros(3, np.float32), "t": np.zeros((4, 2), np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=1.0), tables=["t"]) as store, store.attach(0) as worker:
        worker.put_rows("t", [0], [[1, 1]])
        worker.step({"d": np.ones(3)})
        worker.step({"d": np.ones(3)})
        assert worker.weights["d"].tolist() == [-2, -2, -2]
        assert worker.weights["t"].tolist() == [[-1, -1], [0, 0], [0, 0], [0, 0]]
        assert [int(steps[0]) for steps in store.rule_steps(store.committed()[1])] == [2, 1]


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:2", "softsync:1", "backup:1", "psp:2,0.5", "r2sp:0.8"])
def test_every_discipline_folds_each_push_of_rows_once(sync: str) -> None:
    """Each worker pushes 1 for a row of its own and for a common one; the sums tell how often each push was folded."""
    workers, steps, rows = 3, 12, 8
    weights = {"d": np.zeros(40, np.float32), "t": np.zeros((rows, 4), np.float32), "u": np.zeros((rows, 1), np.float32)}
    store = fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=workers, tables=["t", "u"])

    def work(rank: int) -> Any:
        with store.attach(rank) as worker:
            for _ in range(steps):
                for table, width in (("t", 4), ("u", 1)):
                    worker.put_rows(table, [rank, rows - 1], np.ones((2, width)))
                worker.step({"d": np.ones(40)})
            worker.wait_for_others()
            counters = [store.arena.counters(lane) for lane in range(workers)]
            return {name: array.copy() for name, array in worker.weights.items()}, [each["dropped"] for each in counters]

    with store:
        found, dropped = processes.results(processes.start_each(work, workers), 60)[0]
    for table in ("t", "u"):
        own, common = found[table][:workers, 0], found[table][rows - 1, 0]
        assert np.allclose(own.sum(), common, atol=1e-4), "what each folds of its own, all fold of the common row"
        if not any(dropped):
            assert (own < 0).all()
    assert np.allclose(found["d"][0], found["t"][rows - 1, 0], atol=1e-4) or any(dropped) or sync.startswith("psp")


def test_numbers_may_be_of_another_dtype_and_values_of_another_order() -> None:
    with fastps.Store.create({"t": np.zeros((4, 2), np.float32)}, fastps.SGD(lr=1.0), tables=["t"]) as store:
        with store.attach(0) as worker:
            worker.put_rows("t", np.array([3, 0], np.int32), np.asfortranarray([[1.0, 2.0], [3.0, 4.0]]))
            worker.step()
            assert worker.weights["t"].tolist() == [[-3, -4], [0, 0], [0, 0], [-1, -2]]


def test_rows_are_collected_while_other_threads_run() -> None:
    """The collection releases the GIL."""
    table = np.zeros((300_000, 16), np.float32)
    with fastps.Store.create({"t": table}, fastps.SGD(lr=1.0), tables=["t"]) as store, store.attach(0) as worker:
        slots, ticks = RowSlots(store, 0), 0
        numbers, values = np.arange(300_000), np.ones((300_000, 16), np.float32)
        with ThreadPoolExecutor(1) as threads:
            put = threads.submit(slots.put, worker.slot, 0, numbers, values)
            while not put.done():
                ticks += 1
        assert ticks > 10 and put.exception() is None
