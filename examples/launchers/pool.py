"""Workers in a pool of processes: each task of the pool is a worker.

python examples/launchers/pool.py --method forkserver
"""

import argparse
import multiprocessing
import os

import task

import fastps

WORKERS = 2


def work(job: str, rank: int) -> float:
    """Train as worker `rank` of a job; return the loss at its end."""
    model = task.make_model()
    inner = task.make_optimizer(model)
    with fastps.DistributedOptimizer(inner, sync="asp", model=model, job=job, rank=rank, workers=WORKERS) as optimizer:
        task.train(model, optimizer, rank, WORKERS)
        optimizer.wait_for_others()  # so that all see the last weights
        return task.loss(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=("fork", "forkserver", "spawn"), default="forkserver")
    method = parser.parse_args().method
    with multiprocessing.get_context(method).Pool(WORKERS) as pool:
        for number in range(2):  # the processes live on; each job has a name of its own
            job = f"pool-{os.getpid()}-{number}"
            losses = pool.starmap(work, [(job, rank) for rank in range(WORKERS)], chunksize=1)
            print(f"job {number}: loss {losses[0]:.3f}, the same in all workers: {len(set(losses)) == 1}")
