"""Tutorial, steps 2 to 5: the same loop for any number of workers.

fastps run -n 4 examples/tutorial/workers.py
fastps run -n 4 examples/tutorial/workers.py --slow 3 --seconds 4
"""

import argparse
import time

import torch
from task import accuracy, batch, network

import fastps

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=800, help="batches of all workers together")
parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time instead")
parser.add_argument("--slow", type=float, default=1.0, help="worker 0 reads its batches this many times as slowly")
parser.add_argument("--lr", type=float, default=0.004)
arguments = parser.parse_args()
rank = fastps.rank()
slow = arguments.slow if rank == 0 else 1.0
steps = arguments.steps if arguments.seconds == float("inf") else 10**9

model = network()
inner = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.5)
optimizer = fastps.DistributedOptimizer(inner, model=model)
own = fastps.shard(range(steps))  # other batches in each worker
began, made = time.perf_counter(), 0
for step in own:
    if time.perf_counter() - began >= arguments.seconds:
        break
    points, labels = batch(step, slow)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()
    made += 1
print(f"worker {rank}: {made} batches in {time.perf_counter() - began:.1f} s")
if rank == 0:
    optimizer.wait_for_others()  # takes the weights that include every worker's last push
    print(f"the job: {optimizer.version} updates, accuracy {accuracy(model):.1%}")
optimizer.close()
