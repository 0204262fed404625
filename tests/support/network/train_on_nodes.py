"""A script that launchers start on one node or several: it trains a few steps and says where it ran."""

import torch

import fastps
from fastps.job.nodes import nodes_of_environment
from fastps.network.meeting import join_meeting

model = torch.nn.Linear(5, 2)
with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=30) as optimizer:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    optimizer.wait_for_others()
    nodes = nodes_of_environment()
    nodes = nodes and join_meeting(nodes, 30.0)
    place = f"node{nodes.number}:{nodes.local_workers}" if nodes else "here"
    weights = sum(float(value.detach().sum()) for value in model.parameters())
    print(f"{fastps.rank()} of {fastps.world_size()} {place} {optimizer.version} {weights:.6f}")
