"""A script that can be stopped and resumed, and whose workers can be replaced: it begins at the job's step, not at 0.

fastps run -n 2 --checkpoint runs/a --every 50 examples/resume.py 120
fastps run -n 2 --resume runs/a examples/resume.py 200
"""

import sys

import torch

import fastps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = fastps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)

begun = optimizer.worker.steps  # 0, or the checkpoint's step, or for a replacement the slowest worker's step
if begun:
    print(f"worker {fastps.rank()} goes on at step {begun}, version {optimizer.version}")
for group in optimizer.param_groups:
    group["lr"] = group.get("initial_lr", group["lr"])  # a checkpoint has the first learning rate, too
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
for _ in range(begun):
    schedule.step()

for step in range(begun, steps):
    # The step's number determines its batch, so a resumed step reads the same batch.
    order = torch.Generator().manual_seed(step * fastps.world_size() + fastps.rank())
    inputs = torch.randn(32, 8, generator=order)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    schedule.step()

optimizer.close()  # the parameters are now private copies of this worker
total = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
print(f"worker {fastps.rank()}: loss {loss.item():.6f}, weights {total:.12f}")
