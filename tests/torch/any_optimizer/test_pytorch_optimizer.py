"""The optimizers of the package pytorch_optimizer: one worker has the bits of the same optimizer without fastps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import fastps

pytest.importorskip("pytorch_optimizer", reason="the package pytorch-optimizer is not installed")
import pytorch_optimizer
from pytorch_optimizer.optimizer import get_supported_optimizers

STEPS = 20
REASONS = {
    "lomo": "takes the model, and steps in hooks of backward",
    "adalomo": "takes the model, and steps in hooks of backward",
    "demo": "needs the package einops, and exchanges gradients itself",
    "distributedmuon": "gathers over torch.distributed itself",
}
COMPILED = {"adam", "adamw", "nadam", "rmsprop", "adagrad", "adadelta", "adamax", "radam", "sgd"}  # if they are torch's own
OPTIONS: dict[str, dict[str, Any]] = {"ranger21": {"num_iterations": STEPS}, "bsam": {"num_data": 16}}
BY_KIND = {"muon", "adamuon", "adago", "normuon", "muonclip"}  # groups say which parameters are matrices
OF_MATRICES = {"spectralsphere"}
OF_CLOSURES = {"lbfgs", "alig", "bsam"}
OF_GRAPHS = {"adahessian", "sophiah"}  # of backward(create_graph=True)


def _weights(name: str, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    bias = name not in OF_MATRICES
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=bias), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=bias))
    parameters: Any = list(model.parameters())
    if name in BY_KIND:
        matrices, others = ([each for each in parameters if (each.ndim == 2) is is_matrix] for is_matrix in (True, False))
        parameters = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    elif name == "adammini":
        parameters = model
    torch.manual_seed(1)
    optimizer = wrap(pytorch_optimizer.load_optimizer(name)(parameters, **OPTIONS.get(name, {})))
    if hasattr(optimizer, "train"):
        optimizer.train()

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        inputs, wanted = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
        with torch.enable_grad():  # alig's step() disables it
            optimizer.zero_grad()
            found = (model(inputs) - wanted).square().mean()
            found.backward(create_graph=name in OF_GRAPHS)
        return found

    for step in range(STEPS):
        loss(step)
        torch.manual_seed(step)  # some draw
        np.random.seed(step)
        optimizer.step(*[partial(loss, step)][: name in OF_CLOSURES])
    if isinstance(optimizer, fastps.DistributedOptimizer):
        optimizer.close()
    return [each.detach().clone() for each in model.parameters()]


def _names() -> list[str]:
    return sorted(set(get_supported_optimizers()) - REASONS.keys())


@pytest.mark.slow
@pytest.mark.parametrize("name", _names())
@pytest.mark.filterwarnings("ignore")
def test_one_worker_has_the_bits_of_the_optimizer_alone(name: str) -> None:
    torch.set_num_threads(1)
    plain = _weights(name, lambda optimizer: optimizer)
    own = _weights(name, fastps.DistributedOptimizer)
    for one, other in zip(plain, own, strict=True):
        if name in COMPILED:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)
        else:
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_most_are_taken() -> None:
    assert len(REASONS) < 0.05 * len(get_supported_optimizers())
