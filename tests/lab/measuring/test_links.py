"""fastps doctor over nodes: every node prints the same report, and the bound of a step follows from what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.cli.options import parameters_of
from fastps.cli.report import links_table
from fastps.errors import UsageError
from fastps.lab.measuring.links import MeasuredLink, bound_of, fold_seconds
from fastps.lab.measuring.rates import LinkRates
from fastps.lab.measuring.simulated_links import read_links
from fastps.system.ports import free_port


def _link(node: int, rate: float, together: float = 0.0) -> MeasuredLink:
    rates = LinkRates(2 * rate, 4 * rate, rate, together or rate, 1_000_000, 2_000_000, 3_000_000)
    return MeasuredLink(node, f"machine{node}", f"10.0.0.{node}", rates)


def test_a_large_model_uses_both_directions_at_once_and_hides_its_fold() -> None:
    bound = bound_of([_link(1, 100e6)], 25_000_000, "float32", 0.02)
    assert bound.parts > 1
    assert bound.link_ns == pytest.approx(1.001e9)
    assert bound.step_ns == bound.link_ns
    assert (
        "1 s on the link of node 1, both ways at once; the fold 0.02 s; a step takes about 1 s or more, link-bound"
        in bound.shown
    )


def test_a_small_model_goes_up_then_folds_then_comes_down() -> None:
    bound = bound_of([_link(1, 100e6)], 200_000, "bfloat16", 0.02)
    assert bound.parts == 1
    assert bound.link_ns == pytest.approx(1e9 * (300e3 / 200e6 + 300e3 / 400e6 + 0.003)), "100 kB take 3 ms"
    assert bound_of([_link(1, 100e6)], 25_000, "bfloat16", 0.0).link_ns == pytest.approx(2e6), "50 kB, half of the way to 3 ms"
    assert bound.step_ns == pytest.approx(bound.link_ns + 0.02e9)
    assert bound.row()["bound_by"] == "fold"


def test_sums_of_two_nodes_carry_half_a_model_twice_and_of_three_two_thirds() -> None:
    """Both ways at once. The sum of a small model is folded after it."""
    small = bound_of([_link(1, 100e6)], 100_000, "float32", 0.02)
    assert small.link_ns == pytest.approx(1e9 * (2 * 100e3 / 100e6 + 0.003))
    assert small.step_ns == pytest.approx(small.link_ns + 0.02e9)
    large = bound_of([_link(1, 100e6, 50e6), _link(2, 60e6, 60e6)], 25_000_000, "float32", 0.0)
    assert (large.node, large.step_ns) == (2, pytest.approx(1e9 * (4 / 3 * 100e6 / 60e6), rel=1e-3))


def test_the_slowest_of_several_links_counts_with_all_in_use() -> None:
    bound = bound_of([_link(1, 100e6, 50e6), _link(2, 60e6, 60e6)], 50_000_000, "bfloat16", 0.0)
    assert (bound.node, bound.nodes) == (1, 3)
    assert bound.link_ns == pytest.approx(2.001e9)


def test_rounded_floats_take_their_bytes() -> None:
    exact, half, byte = (bound_of([_link(1, 100e6)], 25_600_000, name, 0.0) for name in ("float32", "bfloat16", "int8"))
    assert half.link_ns == pytest.approx(exact.link_ns / 2, rel=0.01)
    assert byte.link_ns == pytest.approx(exact.link_ns / 4, rel=0.03)


def test_a_fold_is_measured_and_grows_with_the_model() -> None:
    small, large = fold_seconds(10_000, 2), fold_seconds(16_000_000, 2)
    assert 0 < small < large


def test_a_model_is_a_number_or_a_checkpoint(tmp_path: Path) -> None:
    assert parameters_of("25e6") == 25_000_000
    weights = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=0.1), workers=1) as store:
        with store.attach(0) as worker:
            saved = fastps.save(worker, tmp_path)
    assert parameters_of(str(saved)) == 22
    for text in ("0", "2.5", "many"):
        with pytest.raises(UsageError, match="--parameters: expected"):
            parameters_of(text)


@pytest.mark.slow
def test_every_node_prints_the_same_report(tmp_path: Path) -> None:
    """The command itself, on two nodes on loopback."""
    command = [sys.executable, "-m", "fastps", "doctor", "--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    files = [tmp_path / f"{node}.json" for node in (0, 1)]
    started = [
        subprocess.Popen([*command, "--parameters", "25e6", "--output", str(file)], stdout=subprocess.PIPE, text=True)
        for file in files
    ]
    shown = [process.communicate(timeout=90)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert shown[0] == shown[1]
    reports = [json.loads(file.read_text())["rows"] for file in files]
    assert reports[0] == reports[1]
    link, home, step = reports[0]
    assert home["kind"] == "home" and 0 < home["fold_bytes_s"] < 1e12 and 0 < home["sum_bytes_s"] < 1e12
    assert len(read_links(files[1]).edges) == 1
    assert (link["kind"], link["node"], link["address"], step["kind"]) == ("link", 1, "127.0.0.1", "step")
    assert step["link_ns"] == pytest.approx(1e9 * 2 * (50e6 - 1e5) / link["both_bytes_s"] + link["small_round_trip_ns"])
    assert links_table([_link(1, 100e6)]).cells[0][3:6] == ["200.0", "400.0", "100.0"]
