"""The table of figures: names are sound and unique, and values are those of the observer."""

import re
from dataclasses import replace

import fastps
from fastps.telemetry.scalars import COUNTER, OWNERS, SCALARS, STALENESS, updates_of, values_of
from tests.telemetry.jobs import look_at, step, stepping


def test_names_are_unique_have_units_and_a_help_text() -> None:
    tags = [scalar.tag for scalar in (*SCALARS, STALENESS)] + [f"{each.owner}/{each.rate}" for each in SCALARS if each.rate]
    assert len(tags) == len(set(tags))
    units = "updates|steps|samples|loss|ratio|versions|pushes|workers|seconds|shards|live|bytes|rows"
    for scalar in (*SCALARS, STALENESS):
        assert re.fullmatch(rf"([a-z_]+_)?({units})", scalar.name), scalar.name
        assert re.fullmatch(r"[A-Z0-9].+\.", scalar.help)
        assert scalar.owner in OWNERS
        assert not scalar.rate or scalar.kind == COUNTER


def test_values_are_those_of_the_observer() -> None:
    with stepping() as worker:
        step(worker, 3, loss=0.25)
        look = look_at(worker.store.job)
    row = look.workers[0]
    found = {(scalar.tag, number): value for scalar, number, value in values_of(look)}
    assert found["job/updates", 0] == found["shard/updates", 0] == updates_of(look) == 3
    assert found["job/steps", 0] == found["worker/steps", 0] == found["worker/folded_pushes", 0] == 3
    assert found["job/loss", 0] == found["worker/loss", 0] == 0.25
    assert found["worker/wait_seconds", 0] == row.wait_ns / 1e9
    assert found["worker/compute_seconds", 0] == row.compute_ns / 1e9 > 0
    assert found["worker/push_seconds", 0] == row.push_ns / 1e9 > 0
    assert found["job/live_workers", 0] == 1 and found["job/lost_workers", 0] == found["job/late_workers", 0] == 0


def test_a_figure_that_is_not_known_has_no_value() -> None:
    """No loss was reported before the first step, and nodes that are not home know nothing of pushes and clocks."""
    with stepping() as worker:
        look = replace(look_at(worker.store.job), nodes=[fastps.NodeStatistics(1, state="live", sent_bytes=7)])
    found = {(scalar.tag, number): value for scalar, number, value in values_of(look)}
    assert ("job/loss", 0) not in found and ("worker/loss", 0) not in found
    assert ("node/pushes", 1) not in found and ("node/round_trip_seconds", 1) not in found
    assert ("node/clock_offset_seconds", 1) not in found
    assert found["node/sent_bytes", 1] == 7 and found["node/live", 1] == 1
