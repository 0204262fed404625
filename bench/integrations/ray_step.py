"""A step of a loop that Ray Train runs, beside the same loop under fastps.spawn: what Ray adds to a step of 10 ms.

    python -m fastps.bench.integrations.ray_step --pairs 5

Runs alternate. A step waits for 10 ms, as if it computed, and then makes a gradient of 100,000 floats and pushes it. Ray is to
add nothing to a step, because its own threads only look at the worker now and then. A call of ray.train.report is timed apart.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fastps

_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}


def timed_steps(folder: str, steps: int, step_s: float) -> None:
    """Make the steps as one worker; leave the median seconds of a step in a file of this worker's."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(1000, 100)
    inputs = torch.ones(1, 1000)
    optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model=model)
    taken = []
    for _ in range(steps):
        begun = time.perf_counter()
        time.sleep(step_s)
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        taken.append(time.perf_counter() - begun)
    optimizer.wait_for_others()
    version = optimizer.version
    optimizer.close()
    Path(folder, f"{fastps.rank()}.json").write_text(json.dumps({"step_s": statistics.median(taken), "version": version}))


def _spawned(rank: int, folder: str, steps: int, step_s: float) -> None:
    timed_steps(folder, steps, step_s)


def _under_ray(config: dict[str, Any]) -> None:
    import ray.train

    timed_steps(config["folder"], config["steps"], config["step_s"])
    begun = time.perf_counter()
    ray.train.report({})
    Path(config["folder"], f"report{fastps.rank()}").write_text(str(time.perf_counter() - begun))


def _measured(folder: str, workers: int, steps: int) -> float:
    """The mean of the workers' medians, in seconds."""
    found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(workers)]
    assert {each["version"] for each in found} == {workers * steps}, "each push is an update, once"
    return statistics.mean(float(each["step_s"]) for each in found)


def measure(pairs: int, workers: int, steps: int, step_s: float, sync: str) -> list[dict[str, float]]:
    """The seconds of a step each way, and of a report, for each pair of runs."""
    import ray
    import ray.train

    from fastps.integrations.ray import FastpsTrainer

    os.environ.update({**_RAY, "FASTPS_SYNC": sync})
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    found = []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as rays:
            fastps.spawn(_spawned, (own, steps, step_s), workers=workers)
            FastpsTrainer(
                _under_ray,
                train_loop_config={"folder": rays, "steps": steps, "step_s": step_s},
                sync=sync,
                scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
                run_config=ray.train.RunConfig(storage_path=rays),
            ).fit()
            row = {"spawn_s": _measured(own, workers, steps), "ray_s": _measured(rays, workers, steps)}
            row["report_s"] = statistics.mean(float(Path(rays, f"report{rank}").read_text()) for rank in range(workers))
        found.append({**row, "ratio": row["ray_s"] / row["spawn_s"]})
    ray.shutdown()
    return found


def main() -> None:
    """Measure, and print a row for each pair and the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=10.0, help="what a step waits before its gradient")
    parser.add_argument("--sync", default="asp")
    given = parser.parse_args()
    rows = measure(given.pairs, given.workers, given.steps, given.step_ms / 1e3, given.sync)
    print("spawn, ms\tRay Train, ms\tratio\tone report, ms")
    for row in rows:
        print(f"{row['spawn_s'] * 1e3:.2f}\t{row['ray_s'] * 1e3:.2f}\t{row['ratio']:.3f}\t{row['report_s'] * 1e3:.1f}")
    ratios = sorted(row["ratio"] for row in rows)
    print(f"median ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
