"""fastps bench nodes: every side runs on two real nodes, its result is right, and what it counts is there. Nothing is timed."""

import io
import subprocess
import sys
import time

import pytest
from rich.console import Console

from fastps.bench import nodes
from fastps.bench.measure import BenchOptions, Row, WrongResultError
from fastps.bench.two_nodes.namespaces import ADDRESSES, Link, missing_reason, two_nodes
from fastps.bench.two_nodes.turns import Crew, Side
from fastps.cli.bench_report import show_benchmarks

PARAMETERS = 1_000_000
COMPARED = {"fastps", "fastps int8", "fastps local_steps", "bound", "edge"}
PEERS = {"gloo", "gloo hierarchical", "ddp"}

needs_namespaces = pytest.mark.skipif(bool(missing_reason()), reason=missing_reason())


def _check(rows: list[Row]) -> None:
    assert {row["backend"] for row in rows} == {"1000 Mbit/s, 1 ms"}
    for row in rows:
        assert 0.99 < row["bytes_ratio"] < 1.05, row["name"]
        assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
        assert 1.02 < row["packet_bytes_ratio"] < 1.1  # each packet has its headers
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    costs = {row["name"]: row["cpu_ratio"] for row in rows}
    assert costs["bound"] == 1.0
    assert costs["edge"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1000)  # nearly thirty processes, each of which imports torch
@needs_namespaces
def test_every_side_runs_and_is_in_the_report_and_none_of_fastps_sends_more_than_a_step_must_carry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sides are crews of one worker a node, but for plain fastps, whose nodes send the sum of two."""
    monkeypatch.delitem(nodes.SLOW, "fastps bfloat16")  # int8 is a narrower link, too
    monkeypatch.setattr(nodes, "LOCAL", 1)
    monkeypatch.setattr(Side, "local", property(lambda side: 2 if side == nodes.FASTPS["fastps"] else 1))
    rows = nodes.measure(BenchOptions(smoke=True, repeats=1, parameters=(PARAMETERS,), against=("limit", "gloo", "ddp")))
    assert {row["name"] for row in rows} == COMPARED | PEERS
    assert {row["name"] for row in rows if row["backward_s"]} == {"fastps", "ddp"}
    report = io.StringIO()
    show_benchmarks(rows, Console(file=report))
    for name in COMPARED | PEERS:
        assert name in report.getvalue()
    _check([row for row in rows if row["name"] in COMPARED and not row["backward_s"]])


@needs_namespaces
def test_a_round_trip_takes_what_was_asked_for() -> None:
    program = (
        "import socket, sys, time\n"
        "own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "own.bind((sys.argv[1], 4000))\n"
        "if len(sys.argv) > 2:\n"
        "    own.settimeout(5)\n"
        "    for _ in range(20):\n"
        "        began = time.perf_counter()\n"
        "        own.sendto(b'1', (sys.argv[2], 4000))\n"
        "        own.recv(1)\n"
        "        print(time.perf_counter() - began)\n"
        "else:\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        own.sendto(*own.recvfrom(1))\n"
    )
    with two_nodes(Link(0, 4.0)) as pair:
        echo = subprocess.Popen(pair.command(1, [sys.executable, "-c", program, ADDRESSES[1]]), stdout=subprocess.PIPE)
        try:
            assert echo.stdout is not None
            assert echo.stdout.readline() == b"ready\n"
            asking = pair.command(0, [sys.executable, "-c", program, *ADDRESSES])
            found = subprocess.run(asking, capture_output=True, text=True, check=True).stdout.split()
        finally:
            echo.kill()
            echo.communicate()
    assert len(found) == 20
    assert 0.004 <= min(map(float, found)) < 0.008


@pytest.mark.slow
@needs_namespaces
def test_a_process_that_fails_is_named_by_its_error_and_the_end_of_any_is_noticed_at_once() -> None:
    with two_nodes(Link()) as pair, Crew(Side("sockets"), pair, 1000) as crew:
        with Crew(Side("sockets"), pair, -1) as failing, pytest.raises(WrongResultError, match="negative"):
            failing.turn(1)
        assert crew.turn(2).sent > 4000
        began = time.monotonic()
        crew._processes[1].kill()
        with pytest.raises(WrongResultError, match="an answer of each process of sockets"):
            crew.turn(1)
        assert time.monotonic() - began < 150, "an end that is not noticed takes 300 s"


def test_without_namespaces_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "missing_reason", lambda: "run as root")
    assert nodes.measure(BenchOptions()) == [{"bench": "nodes", "name": "fastps", "missing": "run as root"}]
