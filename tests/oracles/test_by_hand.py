"""The oracles against answers worked out by hand, and against the papers' own numbers.

A wrong oracle would let a wrong compiled scheduler pass. These tests guard against it, and do not use the compiled scheduler.
"""

import itertools
import math

import pytest

from tests.oracles.backup import Backup
from tests.oracles.by_hand import SEQUENCES, Sequence
from tests.oracles.hardsync import HardSync, learning_rate_factor
from tests.oracles.psp import PspServer
from tests.oracles.r2sp import R2sp
from tests.oracles.softsync import SoftSync, average_staleness


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: f"{sequence.oracle}: {sequence.name}")
def test_the_oracle_answers_as_worked_out_by_hand(sequence: Sequence) -> None:
    oracle = sequence.played().oracle(sequence.workers)
    pushes: dict[int, int] = dict.fromkeys(range(sequence.workers), 0)
    for event in sequence.events:
        shown = event.arguments if sequence.played().plays.timed else event.arguments[:2]  # without timestamp and samples
        assert getattr(oracle, event.kind)(*shown) == (event.folded, event.granted), event
        assert oracle.due_ns() == event.due_ns, event
        if event.kind == "push":
            pushes[event.arguments[0]] += 1
        elif event.kind == "leave":
            del pushes[event.arguments[0]]
        elif event.kind == "join":
            pushes[event.arguments[0]] = min(pushes.values())
        for worker in event.granted:
            assert oracle.granted[worker] == pushes[worker] + 1
            assert worker not in oracle.waiting
        assert oracle.t == pushes
    assert oracle.version == sequence.version
    for worker, dropped in sequence.dropped.items():
        assert oracle.dropped[worker] == dropped, worker
    for worker, batch in sequence.batch.items():
        assert oracle.batch[worker] == batch, worker


def test_the_vector_clock_and_its_average_staleness() -> None:
    server = SoftSync(4, n=2)
    for worker, timestamp in ((0, 0), (1, 0), (0, 0), (1, 1), (3, 1), (2, 0)):
        server.push(worker, 1, timestamp)
    assert server.history == [(1, [0, 0]), (2, [0, 1]), (3, [0, 1])]
    assert [average_staleness(version, timestamps) for version, timestamps in server.history] == [0.0, 0.5, 1.5]
    with pytest.raises(AssertionError, match="vector clock"):
        average_staleness(2, [2])


def test_the_learning_rate_of_hardsync() -> None:
    """Sections 3.2 and 5.2: alpha = alpha_0 sqrt(mu lambda / 128), with numbers worked out by hand."""
    assert learning_rate_factor(workers=2, batch=16, reference_batch=128) == 0.5
    assert learning_rate_factor(workers=18, batch=16, reference_batch=2) == 12.0
    assert learning_rate_factor(workers=1, batch=128, reference_batch=128) == 1.0
    assert learning_rate_factor(workers=4, batch=128, reference_batch=128) == 2.0
    assert learning_rate_factor(workers=30, batch=4, reference_batch=128) == pytest.approx(math.sqrt(120 / 128))


def test_oracles_refuse_what_their_drivers_must_not_do() -> None:
    server = PspServer(2, c=1, tau1_ns=10)
    server.push(0, 0, 0)
    with pytest.raises(AssertionError, match="not fired"):
        server.push(1, 10, 0)
    with pytest.raises(AssertionError, match="no timer"):
        Backup(2, b=1).fire()
    hardsync = HardSync(1)
    hardsync.push(0, 1, 0)
    with pytest.raises(AssertionError, match="version 0 at version 1"):
        hardsync.push(0, 2, 0)
    with pytest.raises(AssertionError, match="still to come"):
        SoftSync(1, n=1).push(0, 1, 1)


def test_r2sp_of_three_equal_workers_settles_as_in_figure_3a() -> None:
    """Updates at relative times 0, T/3 and 2T/3, and again in the next iteration; T = 300."""
    server, due, updates = R2sp(3, relax=1.0), dict.fromkeys(range(3), 300), []
    while len(updates) < 30:
        timer_ns = server.due_ns()
        worker = min(due, key=lambda worker: (due[worker], worker)) if due else None
        if worker is None or (timer_ns is not None and timer_ns <= due[worker]):
            _, granted = server.fire()
        else:
            now_ns = due.pop(worker)
            folded, granted = server.push(worker, now_ns, 0)
            updates += [(now_ns, other) for other in folded]
        due.update({other: server.now_ns + 300 for other in granted})
    assert [worker for _, worker in updates] == [0, 1, 2] * 10
    settled = updates[-9:]
    assert [later[0] - earlier[0] for earlier, later in itertools.pairwise(settled)] == [100] * 8
