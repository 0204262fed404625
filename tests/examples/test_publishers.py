"""The examples whose trainers publish: actors with the newest weights, an evaluator that stops, TorchRL's collectors."""

from pathlib import Path

import pytest
import torch

from tests.support import example_programs


@pytest.mark.slow
def test_actors_learn_catch_with_weights_that_they_read() -> None:
    figures, shown = example_programs.figures("alone", "actors_and_learner.py", "--solved", "0.5")
    assert figures["solved"] and "solved in" in shown, "it begins at about -0.6"
    assert figures["updates"] > 20 and figures["lag"] < 100


@pytest.mark.slow
def test_the_evaluator_keeps_the_best_weights_and_ends_the_training(tmp_path: Path) -> None:
    arguments = ("--patience", "2", "--no-idle", "--out", str(tmp_path))
    figures, shown = example_programs.figures("alone", "early_stopping.py", *arguments)
    assert figures["was_asked"] and shown.startswith("asked to stop after")
    rows = figures["rows"]
    assert rows[-1]["version"] == figures["steps"]
    assert figures["best"]["accuracy"] == max(row["accuracy"] for row in rows) == figures["loaded"]["accuracy"]
    assert {each.name for each in tmp_path.iterdir()} == {"rows.jsonl", "best.pt"}
    assert torch.load(tmp_path / "best.pt")["1.num_batches_tracked"].item() == figures["best"]["version"]


@pytest.mark.slow
def test_collectors_of_torchrl_play_with_the_newest_weights() -> None:
    pytest.importorskip("torchrl", reason="the extra fastps[peers] is not installed")
    lines = example_programs.run("alone", "torchrl_scheme.py").stdout.splitlines()
    assert [line for line in lines if line.startswith("batch")] == [
        f"batch {number}: the newest weights were played with" for number in range(5)
    ]
