"""Two optimizers of one model: Muon for its matrices, AdamW for the rest. Muon's step() runs in Python, AdamW's is compiled."""

import torch

import fastps

STEPS = 200

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)
)
matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
optimizers = [
    fastps.DistributedOptimizer(torch.optim.Muon(matrices, lr=0.02), model=model),
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
