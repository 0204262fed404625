"""The time line's data: lanes, marks, shares and steps, also of traces that are too long to draw."""

import base64
import json
import re
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastps.report import timeline as module
from fastps.report.findings import facts_of, findings_of
from fastps.report.timeline import timeline
from fastps.tracing.file import Trace
from fastps.tracing.series import PHASES
from tests.report.traces import BEGIN, MS, asp, bsp, with_end


def _extra(trace: Trace) -> Any:
    facts = facts_of(trace)
    return timeline(facts, findings_of(facts)).extra


def _array(packed: dict[str, str]) -> Any:
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])


def test_steps_have_their_numbers_and_times() -> None:
    trace = bsp([10, 30], 40)
    extra = _extra(trace)
    assert extra["whole"] and [lane["name"] for lane in extra["lanes"]] == ["worker 0", "worker 1"]
    times = _array(extra["steps"][1]["times"]).reshape(-1, 6) * extra["unit"]
    assert _array(extra["steps"][1]["numbers"]).tolist() == list(range(40))
    assert times[3, 0] == pytest.approx((trace.steps_of(1)["begin_ns"][3] - BEGIN) / 1e9, abs=2 * extra["unit"])
    assert (np.diff(times, axis=1) >= 0).all()


def test_shares_of_an_interval_add_up_to_one_where_the_worker_is_at_work() -> None:
    extra = _extra(bsp([10, 30], 40))
    shares = _array(extra["shares"][0]).reshape(len(PHASES), extra["intervals"]) / 255
    assert shares.sum(axis=0) == pytest.approx(np.ones(extra["intervals"]), abs=0.02)
    wait = shares[PHASES.index("wait")].mean()
    assert wait == pytest.approx(20 / 30, abs=0.05), "it waits for the worker that takes three times as long"


def test_the_straggler_and_the_lost_worker_are_marked_in_their_lanes() -> None:
    extra = _extra(with_end(bsp([10, 30, 10], 40, {2: 10}), 2, -signal.SIGKILL, BEGIN + 400 * MS))
    assert re.fullmatch(r"straggler, (2\.9|3\.0) times", extra["lanes"][1]["straggler"])
    assert extra["lanes"][2]["lost"] == {"at": 0.4, "text": "killed at 400 ms"}
    assert "straggler" not in extra["lanes"][0] and "lost" not in extra["lanes"][0]
    (window,) = [each for each in extra["windows"] if each["name"] == "worker 2 killed"]
    assert window["begin"] < 0.4 < window["end"]


def test_a_long_run_keeps_its_shares_and_the_steps_of_some_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = asp([5, 6], 3000)
    whole = timeline(facts_of(trace), [])
    monkeypatch.setattr(module, "MOST_STEPS", 1000)
    figure = timeline(facts_of(trace), [])
    assert whole.extra["whole"] and not figure.extra["whole"]
    assert "too many to draw each" in figure.sentence and "too many" not in whole.sentence
    numbers = _array(figure.extra["steps"][0]["numbers"])
    assert 0 < len(numbers) <= 500 and numbers[0] == 0
    for window in figure.extra["windows"]:
        times = _array(figure.extra["steps"][0]["times"]).reshape(-1, 6) * figure.extra["unit"]
        assert ((times[:, 0] < window["end"]) & (times[:, 5] > window["begin"])).sum() > 10, window
    assert len(json.dumps(figure.extra)) < len(json.dumps(whole.extra))


def test_of_very_many_workers_those_that_a_finding_names_are_drawn() -> None:
    trace = bsp([5.0] * 99 + [15.0], 8)
    facts = facts_of(trace)
    figure = timeline(facts, findings_of(facts))
    workers = [lane["worker"] for lane in figure.extra["lanes"]]
    assert len(workers) == module.MOST_LANES and workers[-1] == 99
    assert "64 of the 100 workers are drawn" in figure.sentence


def test_the_size_of_the_data_is_bounded() -> None:
    trace = asp([5.0] * 4, 15_000)
    assert len(trace.steps) == module.MOST_STEPS
    assert len(json.dumps(_extra(trace))) < 2_500_000
    header = {**trace.header, "workers": 4}
    assert len(json.dumps(_extra(replace(trace, header=header, steps=trace.steps[:200])))) < 100_000
