"""Measured links in the simulation: times worked out by hand, and a report that is read again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fastps.errors import PolicyError, UsageError
from fastps.job.specs import parse_policy
from fastps.lab.measuring.links import LinksReport, bound_of
from fastps.lab.measuring.links import MeasuredLink as Link
from fastps.lab.measuring.rates import LinkRates
from fastps.lab.measuring.simulated_links import MeasuredEdge, MeasuredHome, MeasuredLinks, ModelOnNodes, on_links, read_links
from fastps.simulation.simulate import ComputeModel, Simulation, simulate
from fastps.system.json_report import write_json
from tests.support import commands

MS = 1_000_000
RATE = 100e6


def _edge(both: float = RATE, together: float = 0.0, one_way: float = 0.0, latency_ns: int = 0) -> MeasuredEdge:
    rate = one_way or both
    return MeasuredEdge(rate, rate, both, together or both, 2 * latency_ns, round(2 * latency_ns + 2e14 / rate))


def _step_s(spec: str, links: MeasuredLinks, model: ModelOnNodes, compute_ms: float = 100.0, **options: Any) -> float:
    """The time in which every node makes a step."""
    simulation = Simulation(workers=model.nodes, steps=200, compute=ComputeModel("constant", compute_ms * MS), **options)
    row = simulate(*on_links(simulation, parse_policy(spec), links, model)).row
    return model.nodes / float(row["steps_per_s"])


ONE, TWO = MeasuredLinks((_edge(),)), MeasuredLinks((_edge(), _edge()))
HALF_DUPLEX = MeasuredLinks((_edge(both=RATE / 2, one_way=RATE),))
SHARED = MeasuredLinks((_edge(together=RATE / 2), _edge(together=RATE / 2)))
SMALL, LARGE = 250_000, 25_000_000  # parameters: 1 MB, which takes 10 ms each way and has one part, and 100 MB in 32 parts
ROUNDED = ModelOnNodes(LARGE, 2, "bfloat16")


@pytest.mark.parametrize(("spec", "links", "model", "seconds"), [
    # Replicas: (N - 1)/N of the model twice, each way at once.
    pytest.param("bsp", MeasuredLinks((_edge(latency_ns=MS),)), ModelOnNodes(SMALL, 2), 0.112, id="half a model twice"),
    pytest.param("bsp", HALF_DUPLEX, ModelOnNodes(LARGE, 2), 0.1 + 2, id="a link that carries half each way"),
    pytest.param("bsp", ONE, ModelOnNodes(SMALL, 64), 0.1 + 2 * 0.01 * 63 / 64, id="64 replicas"),
    pytest.param("bsp", MeasuredLinks((_edge(), _edge(RATE / 10))), ModelOnNodes(SMALL, 3), 0.1 + 0.4 / 3, id="a slow edge"),
    # A home, for rounded floats: half the bytes, 0.5 s both ways at once, and a 32nd of it for the last part to return.
    pytest.param("bsp", ONE, ROUNDED, 0.1 + 0.5 + 0.5 / 32, id="parts return while others travel"),
    pytest.param("bsp,shards=2", ONE, ModelOnNodes(LARGE, 2), 0.1 + 2, id="a model that has no parts"),
    pytest.param("bsp", HALF_DUPLEX, ROUNDED, 0.1 + 1, id="a home's link that carries half each way"),
    # From one edge 64 nodes are predicted: 63 models each way on node 0's port.
    pytest.param("bsp,shards=2", ONE, ModelOnNodes(SMALL, 64), 0.1 + 2 * 63 * 0.01, id="the port of node 0 is shared"),
    pytest.param("bsp,shards=2", TWO, ModelOnNodes(SMALL, 3), 0.12, id="edges that reach their own rates together"),
    pytest.param("bsp,shards=2", TWO, ModelOnNodes(SMALL, 5), 0.14, id="four share what two carried"),
    pytest.param("bsp,shards=2", SHARED, ModelOnNodes(SMALL, 3), 0.14, id="edges that share"),
])  # fmt: skip
def test_a_step_takes_what_was_worked_out_by_hand(spec: str, links: MeasuredLinks, model: ModelOnNodes, seconds: float) -> None:
    assert _step_s(spec, links, model) == pytest.approx(seconds, rel=0.01)
    assert links.is_half_duplex == (links == HALF_DUPLEX)


def test_small_messages_take_what_was_measured() -> None:
    """100 kB and back take 3 ms on a link that would carry them in 2 ms, besides a round trip of 0.4 ms."""
    edge = MeasuredEdge(RATE, RATE, RATE, RATE, 400_000, 3_400_000)
    assert edge.latency_ns == 200_000 + 500_000


def test_one_transfer_on_a_wide_port_is_as_slow_as_its_edge() -> None:
    """Under asp with long computing, transfers meet seldom: 20 ms each way, though the port has room for four."""
    links = MeasuredLinks((_edge(RATE / 2, RATE / 2), _edge(RATE / 2, RATE / 2)))
    model = ModelOnNodes(250_000, 4)
    simulation = Simulation(workers=4, steps=40, compute=ComputeModel("constant", 100 * MS, factors={2: 1e3, 3: 1e3}))
    outcome = simulate(*on_links(simulation, parse_policy("asp"), links, model), trace=True)
    assert outcome.trace is not None
    began = [int(each["time_ns"]) for each in outcome.trace if each["worker"] == 1 and each["kind"] == 0]
    assert began[1] - began[0] == pytest.approx(140 * MS, rel=0.01)
    own = [int(each["time_ns"]) for each in outcome.trace if each["worker"] == 0 and each["kind"] == 0]
    assert own[1] - own[0] == 100 * MS, "node 0 has the weights"


def test_a_slow_edge_does_not_hold_up_asp() -> None:
    assert _step_s("asp", MeasuredLinks((_edge(), _edge(RATE / 10))), ModelOnNodes(SMALL, 3)) < 0.15


def test_the_home_sums_and_folds() -> None:
    """Sums of 1 ms for three pushes and three answers, some of them while others compute, and a fold of 5 ms.

    Each replica adds a third of the pushes, and folds all.
    """
    links = MeasuredLinks((_edge(1e12), _edge(1e12)), MeasuredHome(fold_bytes_s=200e6, sum_bytes_s=1e9))
    for model, least, most in ((ModelOnNodes(250_000, 3, "bfloat16"), 0.107, 0.111), (ModelOnNodes(250_000, 3), 0.105, 0.107)):
        found = _step_s("bsp", links, model)
        assert least < found <= most
        assert _step_s("bsp", links, model, update_ns=10 * MS) == pytest.approx(found + 0.01, rel=1e-3)


def test_what_does_not_bound_is_hidden_by_parts() -> None:
    links = MeasuredLinks((_edge(),), MeasuredHome(fold_bytes_s=1e9, sum_bytes_s=1e9))
    found = _step_s("bsp", links, ModelOnNodes(25_000_000, 2))
    assert found == pytest.approx(0.1 + 1 + 3 * 0.1 / 32, rel=0.01), "the 0.3 s of sums and a fold count 1/32"


def test_rounded_floats_take_less() -> None:
    links = MeasuredLinks((_edge(),))
    seconds = [_step_s("bsp", links, ModelOnNodes(2_560_000, 2, name), 1) for name in ("float32", "bfloat16", "int8")]
    assert seconds[0] > seconds[1] > seconds[2]


def test_a_step_under_bsp_takes_at_least_what_the_doctor_says() -> None:
    rates = LinkRates(119.6e6, 119.6e6, 119.4e6, 119.4e6, 340_000, 410_000, 840_000)
    links = MeasuredLinks((MeasuredEdge(119.6e6, 119.6e6, 119.4e6, 119.4e6, 340_000, 840_000),))
    for parameters in (250_000, 2_500_000, 25_000_000):
        bound = bound_of([Link(1, "m", "10.0.0.2", rates)], parameters, "float32", 0.0)
        found = _step_s("bsp", links, ModelOnNodes(parameters, 2), 0.001)
        assert 0.9 * bound.step_ns < 1e9 * found < 1.4 * bound.step_ns, parameters


@pytest.mark.parametrize("spec", ["adv*:1", "adv:1", "softsync:1", "backup:1", "r2sp:0.8", "psp:2,0.5", "dssp:1,3"])
@pytest.mark.parametrize("measured", [1, 2, 4])
def test_every_discipline_between_nodes_is_played(spec: str, measured: int) -> None:
    links = MeasuredLinks(tuple(_edge(latency_ns=MS) for _ in range(measured)), MeasuredHome(4e9, 8e9))
    assert 0.1 < _step_s(spec, links, ModelOnNodes(250_000, 4)) < 1


def test_what_makes_no_sense_between_nodes_is_refused() -> None:
    links = MeasuredLinks((_edge(),))
    with pytest.raises(PolicyError, match="leave tune=true out"):
        _step_s("bsp,tune=true", links, ModelOnNodes(1000, 2))
    with pytest.raises(UsageError, match="2 nodes or more, found 1"):
        ModelOnNodes(1000, 1)
    with pytest.raises(UsageError, match="int4"):
        ModelOnNodes(1000, 2, "int4")
    with pytest.raises(UsageError, match="--model-bytes: the measured links say this"):
        _step_s("bsp", links, ModelOnNodes(1000, 2), model_bytes=1.0)


def _report() -> LinksReport:
    rates = LinkRates(RATE, 1.1 * RATE, 0.9 * RATE, RATE, 1_000_000, 2_000_000, 3_000_000)
    links = [Link(node, "machine", f"10.0.0.{node}", rates) for node in (1, 2)]
    return LinksReport(links, MeasuredHome(4e9, 8e9), [bound_of(links, 1000, "float32", 0.01)])


def test_a_report_of_the_doctor_is_read_again(tmp_path: Path) -> None:
    report, file = _report(), tmp_path / "links.json"
    write_json("doctor", report.rows(), str(file))
    found = read_links(file)
    assert found.home is not None and asdict(found.home) == asdict(report.home)
    for edge, link in zip(found.edges, report.links, strict=True):
        assert {name: getattr(link.rates, name) for name in asdict(edge)} == asdict(edge)


def _without(name: str) -> str:
    rows = [dict(row) for row in _report().rows()]
    rows[0].pop(name)
    return json.dumps({"rows": rows})


@pytest.mark.parametrize(("text", "message"), [
    ("", "JSONDecodeError"),
    ("[]", "TypeError"),
    ('{"rows": []}', "found no links in it"),
    ('{"rows": [{"kind": "machine"}]}', "found no links in it"),
    (_without("both_bytes_s"), "KeyError: 'both_bytes_s'"),
    (json.dumps({"rows": [{**_report().rows()[0], "up_bytes_s": -1}]}), "up_bytes_s of -1"),
])  # fmt: skip
def test_another_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_links(file)
    with pytest.raises(UsageError, match="FileNotFoundError"):
        read_links(tmp_path / "nothing.json")


@pytest.mark.slow
def test_the_command_predicts_64_nodes_from_two_edges(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    write_json("doctor", _report().rows(), str(file))
    options = ["--links", str(file), "--parameters", "250e3", "--compute", "constant:100ms", "--steps", "20"]
    bsp, asp = commands.rows("simulate", "-n", "64", "--sync", "bsp,asp", *options)
    assert 64 / bsp["steps_per_s"] == pytest.approx(0.123, rel=0.05), "two messages of 63/64 of 1 MB, and what a message takes"
    assert 100 < asp["steps_per_s"] < 200, "models of 1 MB; node 0's port carries 200 MB/s each way"
