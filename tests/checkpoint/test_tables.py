"""Checkpoints of jobs with tables: one version of all rows, and a resumed job has the bits of one that did not stop."""

from pathlib import Path

import pytest
import torch

import fastps
from tests.support.table_models import TableModel, batches_of, train_on, wrapped
from tests.support.torch_optimizers import alone, one_worker  # noqa: F401 - a fixture

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparse-adam", "row-wise-adagrad"])
def test_a_resumed_job_has_the_bits_of_one_that_did_not_stop(name: str, tmp_path: Path) -> None:
    batches = batches_of(12, 16)
    whole, half = TableModel(), TableModel()
    with wrapped(whole, name) as optimizers:
        train_on(whole, optimizers, batches)
    with wrapped(half, name) as optimizers:
        train_on(half, optimizers, batches[:6])
        folders = [fastps.save(optimizer, tmp_path / str(number)) for number, optimizer in enumerate(optimizers)]
    resumed = TableModel(seed=7)
    with wrapped(resumed, name, folders) as optimizers:
        train_on(resumed, optimizers, batches[6:])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_a_checkpoint_of_a_table_is_not_resumed_by_a_dense_layer(tmp_path: Path) -> None:
    with one_worker(TableModel(), sync="bsp", named=True) as (model, optimizer):
        folder = fastps.save(optimizer, tmp_path)
    model.bag.sparse = False
    with pytest.raises(fastps.CheckpointError, match=r"parameter 0: expected 'bag.weight' .* found 'bag.weight' .*, a table"):
        fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "bsp", model=model, resume=folder)
