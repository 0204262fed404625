"""A model with BatchNorm and a moving average as a buffer, its data, a trainer's step, and its evaluation."""

from typing import Any

import torch

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))


class Judged(torch.nn.Module):
    """`average` is a moving average of a weight, which the forward pass of training keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(8, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.lerp_(self.first.weight.detach(), 0.1)
        found: torch.Tensor = self.last(torch.relu(self.norm(self.first(inputs))))
        return found


def build_model(seed: int = 0) -> Judged:
    torch.manual_seed(seed)
    return Judged()


@torch.no_grad()
def evaluate(model: Any) -> dict[str, Any]:
    training = model.training
    model.eval()
    found = (model(INPUTS) - INPUTS.sum(1, keepdim=True)).square().mean()
    model.train(training)
    return {"loss": found, "average": model.average.sum(), "batches": model.norm.num_batches_tracked}


def step(model: torch.nn.Module, optimizer: Any, generator: torch.Generator) -> None:
    inputs = torch.randn(16, 4, generator=generator)
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
