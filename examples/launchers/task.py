"""The task of the examples in this folder: a small network learns a function of 16 numbers from samples that have noise."""

import torch

SAMPLES, EPOCHS, BATCH = 4096, 6, 32


def make_model() -> torch.nn.Sequential:
    """The network. Each worker builds it; the job begins with the weights of worker 0."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def make_optimizer(model: torch.nn.Module) -> torch.optim.SGD:
    """The torch optimizer of the plain loop."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; another seed draws other samples of the same function."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 16, generator=random)
    targets = torch.sin(inputs[:, :8].sum(1, keepdim=True)) + inputs[:, 8:].mean(1, keepdim=True)
    return inputs, targets + 0.1 * torch.randn(SAMPLES, 1, generator=random)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, workers: int = 1) -> None:
    """The plain loop, over this worker's share of the samples."""
    inputs, targets = data()
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))[rank::workers]
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()


def loss(model: torch.nn.Module) -> float:
    """The mean squared error over samples that no worker trains on."""
    inputs, targets = data(seed=2)
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(inputs), targets))
