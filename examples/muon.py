"""Two optimizers of one model: Muon for its matrices, AdamW for the rest. Muon's step() runs in Python, AdamW's is compiled."""

import torch

import fastps

STEPS = 200


def orthogonal(matrix):
    """Return the nearest matrix whose rows or columns are orthonormal, roughly: five steps of Newton-Schulz."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.775 * gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


class Muon(torch.optim.Optimizer):
    """Muon that multiplies in float32. torch.optim.Muon does in bfloat16, for which many processors have no instructions."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        """Make one step along the orthogonalized momentum."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                buffer = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                buffer.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonal(matrix.grad.lerp(buffer, group["momentum"]))
                matrix.add_(direction, alpha=-group["lr"] * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)


torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)
)
matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
optimizers = [
    fastps.DistributedOptimizer(Muon(matrices), model=model),
    fastps.DistributedOptimizer(torch.optim.AdamW(others, lr=0.01), model=model),
]
generator = torch.Generator().manual_seed(fastps.rank())
for _ in range(STEPS):
    points = torch.randn(64, 2, generator=generator)
    labels = (points.norm(dim=1) > 1.2).long()
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(points), labels).backward()
    for optimizer in optimizers:
        optimizer.step()
for optimizer in optimizers:
    optimizer.close()
points = torch.randn(10_000, 2, generator=torch.Generator().manual_seed(99))
right = model(points).argmax(1) == (points.norm(dim=1) > 1.2)
print(
    f"worker {fastps.rank()} of {fastps.world_size()}: {100 * right.float().mean():.1f} % inside or outside the circle are told"
)
