"""Tutorial, step 1: a plain torch loop in one process.

python examples/tutorial/plain.py
"""

import argparse
import time

import torch
from task import accuracy, batch, network

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=800)
arguments = parser.parse_args()
torch.set_num_threads(1)  # the network is too small to gain from more threads

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.5)
began = time.perf_counter()
for step in range(arguments.steps):
    points, labels = batch(step)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()
seconds = time.perf_counter() - began
print(f"{arguments.steps} batches in {seconds:.1f} s, accuracy {accuracy(model):.1%}")
