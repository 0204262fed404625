"""The check of Muon on images: what each optimizer has, what the table shows, and that a run learns."""

import pytest

from fastps.bench import muon_on_images as bench
from fastps.lab.demo import data, models


def test_muon_has_the_matrices_of_the_inner_layers_and_adamw_the_rest() -> None:
    model = models.model_for(data.load("mnist5k"))
    muon, adamw = bench.optimizers_of(model, "muon", 0.01)
    assert [tuple(each.shape) for each in muon.param_groups[0]["params"]] == [(16, 8, 3, 3), (64, 784)]
    assert len(adamw.param_groups[0]["params"]) == 6
    assert len(bench.optimizers_of(model, "adamw", 0.01)[0].param_groups[0]["params"]) == 8


def test_the_table_has_each_sides_best_rate() -> None:
    row = {"sync": "asp", "muon": {"0.01": 0.9, "0.02": 0.96}, "adamw": {"0.001": 0.97, "0.002": 0.4}}
    assert bench.table([row]).endswith("| `asp` | 96.0 | 0.02 | 97.0 | 0.001 | -1.0 |")


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_muon_learns_the_images(sync: str) -> None:
    assert bench.accuracy(sync, "muon", 0.02, 5, epochs=2) > 0.9
