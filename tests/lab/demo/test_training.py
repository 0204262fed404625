"""The main job: shares of the data, honest waits, merged rows, and that real images are learnt."""

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fastps.errors import UsageError
from fastps.lab.demo import runs as compare
from fastps.lab.demo.data import load
from fastps.lab.demo.models import accuracy, model_for
from fastps.lab.demo.options import TrainingOptions, extra_wait_ns
from fastps.lab.demo.worker_main import Batches, load_weights, save_weights

# 1,000 test images at 95 % have a standard error of 0.7 %; the bar of 94 % is widened by two of them.
BAR = 0.94 - 2 * math.sqrt(0.95 * 0.05 / 1000)


def test_workers_share_every_pass_without_overlap() -> None:
    data = load("digits")
    options = TrainingOptions(workers=3, batch_size=10, seed=4)
    all_batches = [Batches(data, options, rank) for rank in range(3)]
    labels = sorted(int(label) for batches in all_batches for _ in range(47) for label in batches.next()[1])
    drawn = np.bincount(labels, minlength=10)
    whole = np.bincount(data.train_labels, minlength=10)
    # 47 batches of 10 are nearly a worker's share of 479: nobody's sample is drawn twice, a few are left.
    assert (drawn <= whole).all()
    assert drawn.sum() == 1410


def test_batches_are_decided_by_the_seed() -> None:
    data = load("digits")
    first, again, other = (Batches(data, TrainingOptions(seed=seed), 1).next()[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("options", "rank", "expected_ns"), [
    (TrainingOptions(), 0, 0),
    (TrainingOptions(straggler={"0": 3.0}), 0, 2_000),
    (TrainingOptions(straggler={"0": 3.0}), 1, 0),
    (TrainingOptions(transfer_ms=2.0, compute_ms=1.0), 1, 1_000_000),
])  # fmt: skip
def test_a_stragglers_wait_is_its_own_time_times_the_factor_less_one(
    options: TrainingOptions, rank: int, expected_ns: int
) -> None:
    assert extra_wait_ns(options, rank, step_cpu_ns=1_000) == expected_ns


def test_an_untrained_model_guesses() -> None:
    data = load("digits")
    torch.manual_seed(0)
    assert accuracy(model_for(data), data) < 0.3


def _result(rank: int, **changes: Any) -> dict[str, Any]:
    row = {"rank": rank, "steps": 10, "samples": 160, "began_ns": 10**9, "ended_ns": 3 * 10**9, "wait_ns": 25, "compute_ns": 75}
    row |= {"folded": 10, "dropped": 0, "staleness_sum": 5, "staleness_max": 2, "stale_blocks": 1}
    row["histograms"] = [{"average_staleness": 0.5, "staleness": [(0, 1), (2, 1)], "gaps_ns": [(0, 3), (10**9, 1)]}]
    return row | {"accuracy_over_time": [], "final_accuracy": 0.9, "sync": "softsync:1"} | changes


def test_a_runs_row_spans_all_workers() -> None:
    rows = [_result(0), _result(1, steps=30, ended_ns=5 * 10**9, staleness_max=7, staleness_sum=15)]
    merged = compare.merged(TrainingOptions(sync="asp", workers=2), rows)
    assert (merged["seconds"], merged["steps"], merged["steps_per_s"], merged["samples_per_s"]) == (4.0, 40, 10.0, 80.0)
    assert (merged["sync"], merged["chosen"]) == ("asp", "softsync:1")
    assert (merged["stale_blocks"], merged["sigma_mean"], merged["zero_gap_share"]) == (2, 0.5, 0.75)
    assert (merged["staleness_mean"], merged["staleness_max"], merged["wait_share"]) == (1.0, 7, 0.25)
    replaced = compare.merged(TrainingOptions(sync="asp", workers=2), rows, began_ns=0)
    assert (replaced["seconds"], replaced["steps_per_s"]) == (5.0, 8.0), "a replacement counts the steps before it, too"


def _accuracy(sync: str, seed: int, epochs: int = 10, workers: int = 4) -> float:
    options = TrainingOptions(sync=sync, workers=workers, epochs=epochs, seed=seed)
    row = compare.train(options, load("mnist5k"), Console(quiet=True), progress=False)
    return float(row["test_accuracy"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("sync", "epochs", "workers", "least"), [
    ("bsp", 3, 2, 0.88),
    *((sync, 4, 3, 0.85) for sync in ("backup:1", "psp:3,0.75", "softsync:3", "adv*:1", "r2sp:0.8,tune=true")),
])  # fmt: skip
def test_every_system_of_the_papers_learns_real_images(sync: str, epochs: int, workers: int, least: float) -> None:
    """One system of each kind. What a discipline decides is compared with its oracle elsewhere."""
    assert _accuracy(sync, 1, epochs, workers) >= least, "ten epochs of four workers reach 0.94, and chance is 0.1"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_median_of_three_seeds_reaches_94_percent() -> None:
    """Of the discipline with the most staleness: bsp is one process, to the bit, and ssp waits earlier."""
    found = [_accuracy("dssp:3,15", seed) for seed in (1, 2)]
    if min(found) < BAR:  # where two reach it, the third decides nothing
        found.append(_accuracy("dssp:3,15", 3))
    assert statistics.median_high(found) >= BAR


def test_weights_that_were_saved_are_begun_with_and_others_are_refused(tmp_path: Path) -> None:
    data, other = load("digits"), load("mnist5k")
    torch.manual_seed(1)
    model = model_for(data)
    save_weights(model, tmp_path / "weights.npz")
    torch.manual_seed(2)
    again = model_for(data)
    load_weights(again, tmp_path / "weights.npz")
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(UsageError, match="expected the weights of this model"):
        load_weights(model_for(other), tmp_path / "weights.npz")
