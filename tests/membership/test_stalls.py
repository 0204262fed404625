"""A worker that is stopped in the middle of a fold holds the others up for no longer than they are told to wait."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.job import limits
from fastps.kernels.protocol.lane import Lane
from fastps.membership.stalls import Stalls
from tests.support import processes
from tests.support.plain_arena import helps

FLOATS = 4_000_000
STALL_S = 0.3


def _work(store: fastps.Store, steps: int, rank: int) -> None:
    gradient = {"w": np.ones(FLOATS, np.float32)}
    with store.attach(rank) as worker:
        worker.wait_for_start()
        for _ in range(steps):
            worker.step(gradient)


def _stop_in_fold(store: fastps.Store, victim: processes.Child, rank: int) -> None:
    """Stop the victim while it holds the shard's lock and a push is undecided: one that the others can fold at their bounds."""
    while True:
        processes.stop(victim.process_id)
        counters = [store.arena.counters(lane) for lane in range(3)]
        if Lane(store.arena, 0).owner() == rank and any(each["posted"] > each["done"] for each in counters):
            return
        os.kill(victim.process_id, signal.SIGCONT)
        time.sleep(0.001)


def _await_versions(store: fastps.Store, more: int) -> None:
    before = store.version
    processes.wait_until(lambda: store.version >= before + more, 5.0, "the others waited for the stopped worker")


@contextlib.contextmanager
def _working(sync: str, steps: int, **options: Any) -> Iterator[tuple[fastps.Store, list[processes.Child]]]:
    """A job of three workers, which have no patience; at its end each push was folded once."""
    weights = {"w": np.zeros(FLOATS, np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=3, timeout_s=30, **options) as store:
        children = processes.start_each(partial(_work, store, steps), 3)
        yield store, children
        processes.results(children, 60)
        assert store.version == 3 * steps
        assert set(store.weight_views(store.committed()[0])[0].tolist()) == {-3.0 * steps}, "a push is lost or doubled"


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", ["asp", "dssp:3,15"])
def test_the_others_go_on_without_a_worker_that_is_stopped_in_its_fold(monkeypatch: pytest.MonkeyPatch, sync: str) -> None:
    monkeypatch.setenv("FASTPS_STALL_MS", str(int(STALL_S * 1000)))
    with _working(sync, 60) as (store, children):
        processes.wait_until(lambda: store.version >= 10)
        _stop_in_fold(store, children[1], 1)
        _await_versions(store, 1)
        os.kill(children[1].process_id, signal.SIGCONT)


def _stop_helper(store: fastps.Store, children: list[processes.Child]) -> processes.Child:
    """Stop a worker while it helps with the server's fold."""
    while store.version < 120:
        for lane, child in enumerate(children):
            processes.stop(child.process_id)
            if helps(store.memory, lane):
                return child
            os.kill(child.process_id, signal.SIGCONT)
        time.sleep(0.0005)
    pytest.fail("no worker helped with a fold")


@pytest.mark.slow
def test_a_server_goes_on_without_a_worker_that_is_stopped_while_it_helps_also_a_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FASTPS_STALL_MS", str(int(STALL_S * 1000)))
    with _working("asp", 50, server="process") as (store, children):
        for first in (10, 40):
            processes.wait_until(lambda first=first: store.version >= first)
            victim = _stop_helper(store, children)
            _await_versions(store, 2)
            os.kill(victim.process_id, signal.SIGCONT)


def test_a_peer_that_computes_is_not_taken_for_stopped() -> None:
    with fastps.Store.create({"w": np.zeros(8, np.float32)}, fastps.SGD(lr=1.0), workers=2) as store:
        with store.attach(0) as mine, store.attach(1) as other:
            stalls = Stalls(mine.lane, store.descriptor, 100_000_000)
            assert other.lane.hold()
            now_ns = 0
            for _ in range(3):  # this process holds both lanes, and uses processor time
                stalls.check(now_ns, lambda outcome: pytest.fail(f"passed by, with outcome {outcome}"))
                began = time.process_time()
                while time.process_time() < began + 0.03:
                    pass
                now_ns += 200_000_000
            other.lane.release(False)


@pytest.mark.parametrize(("used", "is_passed_by"), [("7 7", True), ("", False)])
def test_a_peer_of_which_nobody_can_tell_whether_it_runs_is_waited_for(
    used: str, is_passed_by: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another PID namespace, for example, its processor time cannot be read. That does not show that it stands still."""
    monkeypatch.setattr("fastps.system.proc.processor_time", lambda process_id: used)
    with fastps.Store.create({"w": np.zeros(8, np.float32)}, fastps.SGD(lr=1.0), workers=2) as store:
        with store.attach(0) as mine, store.attach(1) as other:
            passed: list[int] = []
            stalls = Stalls(mine.lane, store.descriptor, 100_000_000)
            monkeypatch.setattr(stalls, "_pass_by", lambda peer, *_: passed.append(peer))
            assert other.lane.hold()
            for now_ns in (0, 200_000_000):
                stalls.check(now_ns, lambda _: None)
            assert passed == ([1] if is_passed_by else [])
            other.lane.release(False)


def test_the_patience_is_half_a_second_and_can_be_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTPS_STALL_MS", raising=False)
    assert limits.stall_ns() == 500_000_000
    assert (limits.stall_ns(250), limits.stall_ns(0)) == (250_000_000, 0)
