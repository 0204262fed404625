"""The choices that fastps makes by a job's size."""

import pytest

import fastps
from fastps.job import limits as config
from fastps.job import update_rules as rules
from fastps.job.layout import Layout, place

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
