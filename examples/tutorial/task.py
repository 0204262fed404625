"""The tutorial's task: points around eight random centres, and a network that tells the centres apart.

Reading a batch takes 5 ms, as a disk or an image decoder would. All of it is synthetic, so nothing is downloaded.
"""

import time

import torch

READING_S = 0.005
CENTRES = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * 0.45


def batch(number: int, slow: float = 1.0, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return batch `number`: the points and the numbers of their centres. `slow` stretches the reading."""
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
    """Return the share of 4,000 points that were never trained on and that the network gets right."""
    points, labels = batch(-1, slow=0.0, size=4000)
    return float((model(points).argmax(1) == labels).float().mean())
