"""Workers in Ray actors: each actor is a worker.

python examples/launchers/ray_actors.py
"""

import os

import ray
import task

import fastps

WORKERS = 2


@ray.remote(num_cpus=0.5)
class Trainer:
    """A worker of one job after the other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def train(self, job: str) -> float:
        """Train as a worker of this job; return the loss at its end."""
        model = task.make_model()
        inner = task.make_optimizer(model)
        with fastps.DistributedOptimizer(inner, sync="asp", model=model, job=job, rank=self.rank, workers=WORKERS) as optimizer:
            task.train(model, optimizer, self.rank, WORKERS)
            optimizer.wait_for_others()
            return task.loss(model)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actors = [Trainer.remote(rank) for rank in range(WORKERS)]
    for number in range(2):
        job = f"ray-{os.getpid()}-{number}"
        losses = ray.get([actor.train.remote(job) for actor in actors])
        print(f"job {number}: loss {losses[0]:.3f}, the same in all workers: {len(set(losses)) == 1}")
    ray.shutdown()
