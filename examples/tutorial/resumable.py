"""Tutorial, steps 6 and 7: a loop that begins at the job's step, so that it can be resumed and its workers replaced.

fastps run -n 4 --checkpoint runs/tutorial --every 50 examples/tutorial/resumable.py --steps 100
fastps run -n 4 --resume runs/tutorial examples/tutorial/resumable.py --steps 200
fastps run -n 4 --sync asp --restarts 1 examples/tutorial/resumable.py --die-at 80
"""

import argparse
import os
import signal

import torch
from task import accuracy, batch, network

import fastps

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200, help="batches of each worker")
parser.add_argument("--die-at", type=int, default=-1, help="worker 2 kills itself at this step, once")
parser.add_argument("--lr", type=float, default=0.004)
arguments = parser.parse_args()
rank, workers = fastps.rank(), fastps.world_size()

model = network()
inner = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.5)
optimizer = fastps.DistributedOptimizer(inner, model=model)
begun = optimizer.worker.steps  # 0, or the step of the checkpoint or of the running job
if begun:
    print(f"worker {rank} begins at step {begun}")
for step in range(begun, arguments.steps):
    if step == arguments.die_at and rank == 2 and begun == 0:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    points, labels = batch(step * workers + rank)  # the step's number determines the batch
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()
if rank == 0:
    optimizer.wait_for_others()
    weights = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
    print(f"the job: {optimizer.version} updates, accuracy {accuracy(model):.1%}, sum of weights {weights:.10f}")
optimizer.close()
