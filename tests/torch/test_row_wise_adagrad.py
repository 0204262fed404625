"""Row-wise Adagrad as a plain torch optimizer, against its formula and against fastps without torch."""

import numpy as np
import pytest
import torch

import fastps

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def _gradients(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [(rng.integers(0, 20, 15), rng.standard_normal((15, 11)).astype(np.float32)) for _ in range(steps)]


def _formula(table: np.ndarray, sign: float = 1.0) -> np.ndarray:
    weights, sums = table.astype(np.float64), np.zeros((len(table), 1))
    for rows, values in _gradients(30):
        gradient = np.zeros_like(weights)
        np.add.at(gradient, rows, values)
        touched = np.unique(rows)
        sums[touched] += (gradient[touched] ** 2).mean(1, keepdims=True)
        weights[touched] -= sign * 0.1 * gradient[touched] / (np.sqrt(sums[touched]) + 1e-8)
    return weights


@pytest.mark.parametrize("maximize", [False, True])
def test_torchs_and_the_stores_row_wise_adagrad_follow_the_formula(maximize: bool) -> None:
    table = np.random.default_rng(0).standard_normal((20, 11)).astype(np.float32)
    weight = torch.nn.Parameter(torch.tensor(table))
    optimizer = fastps.RowWiseAdagradOptimizer([weight], lr=0.1, eps=1e-8, maximize=maximize)
    update = fastps.RowWiseAdagrad(lr=0.1, eps=1e-8, maximize=maximize)
    with fastps.Store.create({"t": table}, update, tables=["t"]) as store, store.attach(0) as worker:
        for rows, values in _gradients(30):
            weight.grad = torch.sparse_coo_tensor(torch.tensor(rows)[None], torch.tensor(values), weight.shape)
            optimizer.step()
            worker.put_rows("t", rows, values)
            worker.step()
        expected = _formula(table, -1.0 if maximize else 1.0)
        assert np.abs(weight.detach().numpy() - expected).max() < 1e-5
        assert np.abs(worker.weights["t"] - expected).max() < 1e-5


def test_wrong_options_and_dense_gradients_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="expected lr and eps of 0 or more, found -1"):
        fastps.RowWiseAdagradOptimizer([weight], lr=-1)
    optimizer = fastps.RowWiseAdagradOptimizer([weight])
    weight.sum().backward()
    with pytest.raises(fastps.UnsupportedError, match="expected a sparse gradient"):
        optimizer.step()
