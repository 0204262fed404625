"""Servers that take time: small cases by hand, and the plain-Python server of tests/oracles/serving.py."""

from typing import Any

import numpy as np
import pytest

from fastps.kernels.simulation.network import Network
from fastps.kernels.simulation.server_queue import ServerQueue
from fastps.simulation.simulate import TRACE_KINDS
from tests.oracles.asp import Asp
from tests.oracles.bsp import Bsp
from tests.oracles.serving import play
from tests.oracles.ssp import Ssp
from tests.support.virtual_runs import constant, lines_of, played, row_of


def lines(spec: str, *kinds: str, **options: Any) -> list[tuple[int, str, int]]:
    """The trace's lines of some kinds as (time, kind, worker)."""
    trace = played(spec, **options).trace
    assert trace is not None
    named = [(int(line["time_ns"]), TRACE_KINDS[line["kind"]], int(line["worker"])) for line in trace]
    return [line for line in named if line[1] in kinds]


# -- by hand ---------------------------------------------------------------------------------------


def test_messages_are_handled_one_after_the_other() -> None:
    """Pushes come at 10 and 12 and take 5 each: until 15 and 20. The first answer was in line at 15, behind the second push.

    It leaves at 25, and the second, in line since 20, at 30: the first worker computes until 35, the second until 42. Then the
    server is busy with the first push until 40, with its answer, in line before the second push, until 45, and then with that.
    """
    found = lines("asp", "receive", "pull", workers=2, steps=2, compute=constant(10, 12), service_ns=5)
    first = [(15, "receive", 0), (20, "receive", 1), (25, "pull", 0), (30, "pull", 1)]
    assert found == [*first, (40, "receive", 0), (45, "pull", 0), (50, "receive", 1)]


def test_an_update_keeps_the_server_busy_before_it_answers() -> None:
    """bsp: pushes are handled by 15 and 20; the update takes 100; then the answers take 5 each, the last pusher's first."""
    found = lines("bsp", "receive", "fold", "pull", workers=2, steps=2, compute=constant(10, 12), service_ns=5, update_ns=100)
    assert found[:4] == [(15, "receive", 0), (20, "receive", 1), (20, "fold", 0), (20, "fold", 1)]
    assert found[4:6] == [(125, "pull", 1), (130, "pull", 0)]


def test_bytes_take_time_and_an_answer_without_weights_has_none() -> None:
    """1,000 bytes at 1 byte a ns. softsync:1 of two: the first push makes no version, so its answer is a word."""
    options: dict[str, Any] = {"workers": 2, "steps": 2, "compute": constant(100, 5000), "model_bytes": 1000}
    found = lines("softsync:1", "receive", "pull", **options, service_ns=7, service_rate=1e9)
    assert found[:3] == [(1107, "receive", 0), (1114, "pull", 0), (2221, "receive", 0)]


def test_a_slow_server_takes_longer_and_each_shard_has_its_own_line() -> None:
    outcome = played("asp,shards=2", workers=1, steps=2, compute=constant(10), service_ns=5, slow_servers={1: 3.0})
    received = lines_of(outcome, "receive")
    assert [(int(line["time_ns"]), int(line["shard"])) for line in received[:2]] == [(15, 0), (25, 1)]


def test_a_full_server_bounds_the_steps_and_says_so() -> None:
    row = row_of("asp", workers=20, steps=200, compute=constant(*[1000] * 20), service_ns=100)
    assert row["steps_per_s"] == pytest.approx(1 / 200e-9, rel=0.01), "a push and an answer a step"
    assert row["server_share_max"] > 0.99 and row["server_line_max"] == 20
    free = row_of("asp", workers=20, steps=200, compute=constant(*[1000] * 20))
    assert free["steps_per_s"] == pytest.approx(20 / 1e-6, rel=0.01) and free["server_share_max"] == 0


def test_a_tree_has_a_line_before_each_leaf_and_holds_a_leaf_up_while_it_relays() -> None:
    """Two leaves of two, all push at 10. A leaf handles two pushes, by 15 and 20; the second is the one that is relayed.

    The root takes the first leaf's sum by 25 and answers it by 30, the second's by 35 and 40. At the leaves the answers to the
    first pushes have been in line since 15, before those to the second: 35 and 40 at the first leaf, 45 and 50 at the second.
    The first worker has computed by 45, so that its next push is handled by 50.
    """
    found = lines("adv:1,groups=2", "receive", "pull", workers=4, steps=2, compute=constant(*[10] * 4), service_ns=5)
    assert found[:4] == [(15, "receive", 0), (15, "receive", 2), (20, "receive", 1), (20, "receive", 3)]
    assert found[4:9] == [(35, "pull", 0), (40, "pull", 1), (45, "pull", 2), (50, "receive", 0), (50, "pull", 3)]


def test_overlapped_pulls_cost_no_server_any_time() -> None:
    row = row_of("adv*:1,groups=2", workers=4, steps=300, compute=constant(*[1000] * 4), service_ns=300)
    assert row["steps_per_s"] == pytest.approx(4 / 1e-6, rel=0.02)
    assert row["server_share_max"] == pytest.approx(0.6, abs=0.05), "two pushes a step at each leaf"


# -- the plain server ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "oracle"), [("asp", Asp), ("bsp", Bsp), ("ssp:2", lambda n: Ssp(n, 2))], ids=["asp", "bsp", "ssp"]
)
@pytest.mark.parametrize("seed", range(5))
def test_the_simulator_serves_as_the_plain_server_does(spec: str, oracle: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    workers = int(random.integers(2, 7))
    compute_ns = [int(each) for each in random.integers(50, 400, workers)]
    message_ns, update_ns = int(random.integers(1, 60)), int(random.integers(0, 80))
    job: dict[str, Any] = {"workers": workers, "steps": 60, "compute": constant(*compute_ns)}
    found = lines(spec, "receive", "pull", **job, service_ns=message_ns, update_ns=update_ns)
    expected = play(oracle(workers), compute_ns, 60 * workers, message_ns, update_ns)
    assert found == expected


# -- usage -----------------------------------------------------------------------------------------


def test_a_table_of_times_that_does_not_fit_is_refused() -> None:
    network = Network(np.zeros(1), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="expected 3 times for each shard, found 2"):
        ServerQueue(np.zeros((1, 2)), network, 4, 0)
    with pytest.raises(ValueError, match="expected times of a server of 0 to 1e15 ns, found -1"):
        ServerQueue(np.array([[0.0, -1.0, 0.0]]), network, 4, 0)
    with pytest.raises(IndexError, match="expected a station of 0 to 2, found 3"):
        ServerQueue(np.zeros((1, 3)), network, 4, 2).use(3, 1)
