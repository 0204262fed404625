"""Ray actors: workers that Ray starts, and that outlive a job."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastps
from tests.clients import digits
from tests.support import ray_cluster

ray = pytest.importorskip("ray", reason="the extra fastps[clients] is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "launchers" / "ray_actors.py"


class Actor:
    """A worker of a job."""

    def train(self, job: str, rank: int) -> tuple[float, int, int]:
        """The plain program with its optimizer wrapped: accuracy, own steps, version."""
        model = digits.make_model()
        with fastps.DistributedOptimizer(digits.make_sgd(model), sync="asp", job=job, rank=rank, workers=2) as optimizer:
            steps = digits.train(model, optimizer, rank, 2)
            optimizer.wait_for_others()
            return digits.accuracy(model), steps, optimizer.version

    def lose(self, job: str, rank: int) -> None:
        """Take part in a job that loses worker 1."""
        digits.lose_a_worker(job, rank)


def test_example_of_the_page_trains_one_job_after_the_other() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^job \d: loss ([\d.]+), the same in all workers: True$", done.stdout, re.M)]
    assert len(losses) == 2
    assert max(losses) < 0.5, "the first weights have 0.64"


def test_actors_that_live_on_and_fresh_ones_meet_in_each_job_and_a_lost_worker_is_named_at_the_driver() -> None:
    with ray_cluster.cluster(ray):
        kind: Any = ray.remote(num_cpus=0.5)(Actor)
        actors = [kind.remote(), kind.remote()]
        for name, pair in (("first", actors), ("second", [actors[0], kind.remote()])):
            job = f"ray-{name}-{os.getpid()}"
            found = ray.get([actor.train.remote(job, rank) for rank, actor in enumerate(pair)], timeout=120)
            assert found[0][2] == found[1][2] == found[0][1] + found[1][1], "every push is an update, once"
            assert min(found[0][0], found[1][0]) >= digits.least_accuracy()
        waiting = [actor.lose.remote(f"ray-lost-{os.getpid()}", rank) for rank, actor in enumerate(actors)]
        with pytest.raises(fastps.WorkerDiedError, match="it had to"):
            ray.get(waiting[0], timeout=120)
        ray.get(waiting[1], timeout=120)
