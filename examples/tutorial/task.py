"""The tutorial's task: points around eight random centres, and a network that classifies them by centre.

Reading a batch takes 5 ms, like a disk or an image decoder. All data is synthetic, so nothing is downloaded.
"""

import time

import torch

READING_S = 0.005
CENTRES = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * 0.45


def batch(number: int, slow: float = 1.0, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return batch `number`: the points and the indices of their centres. `slow` multiplies the reading time."""
    time.sleep(READING_S * slow)
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(len(CENTRES), (size,), generator=generator)
    return CENTRES[labels] + torch.randn(size, CENTRES.shape[1], generator=generator), labels


def network() -> torch.nn.Module:
    """Return a small network with the same initial weights in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))


@torch.no_grad()
def accuracy(model: torch.nn.Module) -> float:
    """Return the share of 4,000 held-out points that the network classifies correctly."""
    points, labels = batch(-1, slow=0.0, size=4000)
    return float((model(points).argmax(1) == labels).float().mean())
