"""A worker that waits outside of the store: its job goes on, and it pushes without a gradient only where nobody computes."""

import contextlib
from collections.abc import Collection, Iterator

import pytest
import torch

import fastps
from fastps.errors import TimeoutExceededError
from fastps.integrations import attendance as waits
from fastps.integrations.attendance import Attendance
from fastps.store.worker import Worker
from fastps.system.clock import SYSTEM_CLOCK


class Board:
    """A board on which the given workers have come."""

    def __init__(self, *there: int) -> None:
        self.there = set(there)
        self.calls, self.rank = 0, 0

    def come(self) -> None:
        self.calls += 1

    def have_come(self, ranks: Collection[int]) -> bool:
        return set(ranks) <= self.there


@contextlib.contextmanager
def _workers(sync: str, count: int = 2) -> Iterator[list[Worker]]:
    store = fastps.Store.create({"w": torch.zeros(2).numpy()}, fastps.SGD(lr=1.0), sync=sync, workers=count)
    with store:
        yield [store.attach(rank) for rank in range(count)]


def _looked(worker: Worker, board: Board, looks: int = 2) -> None:
    attendance = Attendance([worker], board, SYSTEM_CLOCK)
    for _ in range(looks):
        attendance._next_ns = 0
        worker.try_combine()
        attendance.check()


def _push(worker: Worker) -> None:
    worker.gradients["w"][...] = 1.0
    worker.push(worker.store.hypers)


def test_without_a_job_it_only_waits() -> None:
    answers = iter([False] * 100 + [True])
    waits.wait(lambda: next(answers), "in a test", Board(), 10.0)
    assert list(answers) == []
    assert waits.open_workers() == []


def test_other_that_computes_is_not_pushed_for() -> None:
    with _workers("bsp") as (first, _):
        board = Board()
        _looked(first, board)
        assert board.calls > 0
        assert first.posts == 0


@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
def test_other_that_waits_for_a_grant_gets_it_by_a_push_without_a_gradient(sync: str) -> None:
    with _workers(sync) as (first, second):
        _push(second)
        _looked(first, Board(), looks=1)
        assert first.posts == 0, "it may be about to leave the meeting"
        _looked(first, Board())
        assert first.posts == 1
        second.advance()
        assert second.steps == 1
        second.pull()
        assert second.weights["w"].max() < 0, "its own push is folded"
        assert first.store.version >= 1


def test_nothing_is_pushed_for_another_that_has_made_a_step_since_the_last_look() -> None:
    with _workers("asp") as (first, second):
        attendance = Attendance([first], Board(), SYSTEM_CLOCK)
        for _ in range(2):
            _push(second)
            attendance._next_ns = 0
            attendance.check()
            second.advance()
        assert first.posts == 0


def test_without_a_job_the_wait_ends_at_its_own_limit() -> None:
    with pytest.raises(TimeoutExceededError, match=r"worker 0 waited 0.01 s for the other workers in a test: expected every"):
        waits.wait(lambda: False, "in a test", Board(), 0.01)


def test_nothing_is_pushed_while_a_third_worker_neither_waits_nor_has_come() -> None:
    with _workers("bsp", 3) as (first, second, _):
        _push(second)
        _looked(first, Board())
        assert first.posts == 0
        _looked(first, Board(2))
        assert first.posts == 1


def test_wait_that_does_not_end_raises_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_TIMEOUT", "0.2")
    model = torch.nn.Linear(2, 1)
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        waits.keep_going(optimizer)
        sentence = r"worker 0 waited 0.2 s for the other workers in a test: expected every"
        with pytest.raises(TimeoutExceededError, match=sentence):
            waits.wait(lambda: False, "in a test", Board(), 10.0)
        waits.wait(lambda: True, "in a test", Board(), 10.0)
    assert waits.open_workers() == []
