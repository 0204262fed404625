"""A worker of the GPU check: `python -m fastps.bench.gpu.worker JOBS.json`, started by fastps' own launcher.

It uses fixed gradients, which do not depend on the weights, so that runs on a GPU and on the CPU are comparable number by
number, or trains on real images. It runs several jobs, one after the other, because its start takes longer than a job. Its
results go to files beside that of the jobs.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastps
from fastps.lab.demo.data import load
from fastps.lab.demo.models import accuracy, inputs_of, model_for
from fastps.system.clock import SYSTEM_CLOCK

GRADIENT, LEARNING_RATE = 1 / 1024, 0.05
SHAPES = ((513, 300), (300,), (64, 3, 7, 7), (1,), (100_001,))


@dataclass(frozen=True)
class GpuJob:
    """One job of a run's workers."""

    device: str
    sync: str
    optimizer: str = "sgd"
    steps: int = 20
    data: str = ""  # a data set to train on; "" for fixed gradients
    epochs: int = 3
    scaler: bool = False
    dies_at: int = 0  # the step before which worker 1 is killed; 0: none
    constant: bool = False  # whether all gradients are GRADIENT


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Make one of the check's torch optimizers."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9 if name == "momentum" else 0.0)


def first_weights() -> list[torch.Tensor]:
    """The weights with which a job of fixed gradients begins."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def run_fixed(job: GpuJob) -> dict[str, Any]:
    """Take steps with gradients determined by rank and step; return the final weights."""
    generator = torch.Generator()
    parameters = [torch.nn.Parameter(values.to(job.device)) for values in first_weights()]
    with fastps.DistributedOptimizer(optimizer_of(job.optimizer, parameters), sync=job.sync) as optimizer:
        optimizer.wait_for_start()
        for step in range(job.steps):
            if job.dies_at == step and step and fastps.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            generator.manual_seed(1000 * fastps.rank() + step)
            for parameter in parameters:
                # Through backward, so that the optimizer's hooks place the gradients.
                drawn = torch.full(parameter.shape, GRADIENT) if job.constant else None
                gradient = torch.randn(parameter.shape, generator=generator) if drawn is None else drawn
                gradient = gradient.to(job.device)
                parameter.grad = None
                (parameter * gradient).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.wait_for_others()
        weights = torch.cat([parameter.detach().flatten() for parameter in parameters]).cpu().numpy()
        return {"kind": optimizer.placement, "version": optimizer.version, "weights": weights}


def run_training(job: GpuJob) -> dict[str, Any]:
    """Train on images, optionally with autocast and a GradScaler; return the accuracy of the final weights."""
    data = load(job.data)
    torch.manual_seed(0)
    model = model_for(data).to(job.device)
    inputs = inputs_of(data, data.train_images).to(job.device)
    labels = torch.from_numpy(data.train_labels).to(job.device)
    scaler = torch.amp.GradScaler(job.device.split(":")[0], enabled=job.scaler)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    with fastps.DistributedOptimizer(inner, sync=job.sync, model=model) as optimizer:
        optimizer.wait_for_start()
        began_ns, steps = SYSTEM_CLOCK.now_ns(), 0
        for epoch in range(job.epochs):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
            for chosen in order[fastps.rank() :: fastps.world_size()].split(16):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                with torch.autocast(job.device.split(":")[0], torch.float16, enabled=job.scaler):
                    loss = torch.nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                steps += 1
        optimizer.wait_for_others()
        seconds = (SYSTEM_CLOCK.now_ns() - began_ns) / 1e9
        found = accuracy(_on_cpu(model, data), data)
        return {"kind": optimizer.placement, "accuracy": found, "steps": steps, "seconds": seconds}


def _on_cpu(model: torch.nn.Module, data: Any) -> torch.nn.Module:
    """Copy the model to the CPU for evaluation; its optimizer needs the model itself unmoved."""
    judge = model_for(data)
    judge.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return judge


def save(jobs: Sequence[GpuJob], path: Path) -> None:
    """Write jobs as JSON."""
    path.write_text(json.dumps([asdict(job) for job in jobs]))


def main() -> None:
    """Run the jobs of a file, and write NUMBER-RANK.npz beside it for each."""
    path = Path(sys.argv[1])
    for number, options in enumerate(json.loads(path.read_text())):
        job = GpuJob(**options)
        np.savez(path.with_name(f"{number}-{fastps.rank()}.npz"), **(run_training(job) if job.data else run_fixed(job)))


if __name__ == "__main__":
    main()
