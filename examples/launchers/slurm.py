"""Tasks of SLURM on one node: the first half is one job, the second half another one with a larger learning rate.

srun --nodes 1 --ntasks 4 python examples/launchers/slurm.py
"""

import os

import task
import torch

import fastps

step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
number, workers = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"]) // 2
half, rank = divmod(number, workers)
learning_rate = (0.02, 0.08)[half]

model = task.make_model()
inner = torch.optim.SGD(model.parameters(), lr=learning_rate)
job = f"{step}-lr{learning_rate}"  # the same in all workers of a job, and in no other job of this machine
with fastps.DistributedOptimizer(inner, sync="asp", model=model, job=job, rank=rank, workers=workers) as optimizer:
    task.train(model, optimizer, rank, workers)
    optimizer.wait_for_others()
    if rank == 0:
        print(f"learning rate {learning_rate}: loss {task.loss(model):.3f}, {optimizer.version} updates by {workers} workers")
