"""The choices that fastps makes by a job's size."""

from dataclasses import replace

import pytest

import fastps
from fastps.job import limits as config
from fastps.job import update_rules as rules
from fastps.job.layout import Layout, place
from tests.support import processes

MOMENTUM = rules.SGD(0.1, momentum=0.9).rule


@pytest.mark.parametrize(("rule", "sync", "millions", "workers", "streams"), [
    (MOMENTUM, "bsp", 1, 2, False),
    (MOMENTUM, "bsp", 2, 2, True),
    (MOMENTUM, "bsp", 1, 4, True),  # more gradients to read
    (rules.Adam().rule, "asp", 1, 2, True),  # more state to write
    (MOMENTUM, "bsp,ema=0.9", 2, 2, False),  # results go through a stage, which pays later
    (MOMENTUM, "bsp,ema=0.9", 16, 2, True),
    (rules.Adagrad().rule, "bsp", 2, 2, False),
    (rules.Adagrad().rule, "bsp", 25, 2, True),
    (rules.Adagrad().rule, "bsp", 25, 1, False),  # and only where two cores share the fold
])  # fmt: skip
def test_folds_that_the_caches_do_not_hold_store_past_them(
    rule: rules.Rule, sync: str, millions: int, workers: int, streams: bool
) -> None:
    layout = Layout(place([("w", (millions * 1_000_000,), (1,), 0)]), 1, rule, fastps.parse_policy(sync), workers)
    assert config.streams(layout, helpers=workers - 1) is streams


def test_an_optimizer_in_python_has_the_cores_of_the_workers_that_wait_and_a_server_those_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(place([("w", (4,), (1,), 0)]), 1, MOMENTUM, fastps.parse_policy("bsp"), 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert [config.fold_threads(layout, own) for own in (1, 2, 8)] == [4, 6, 8]
    fork = processes.ended(lambda: [config.fold_threads(layout, own) for own in (1, 2, 8)])
    assert fork.outcome == [1, 2, 8], "OpenMP waits for ever for threads that a fork does not have"
    served = replace(layout, server="process")
    for given, expected in (("3", 3), ("0", 2), ("many", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert config.fold_threads(served, 2) == expected
