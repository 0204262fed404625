"""The ten-line example. It runs unchanged alone, under `fastps run -n 4 examples/train.py`, and under torchrun."""

import torch

import fastps

torch.manual_seed(0)
inputs, truth = torch.randn(512, 8), torch.randn(8, 1)
targets = inputs @ truth
mine = slice(fastps.rank(), None, fastps.world_size())

model = torch.nn.Linear(8, 1)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine])
    loss.backward()
    optimizer.step()
print(f"worker {fastps.rank()} of {fastps.world_size()}: loss {loss.item():.2e} after {optimizer.version} updates")
optimizer.close()
