"""One synchronization step of workers on GPUs: `fastps bench step --device cuda --against nccl,ddp,limit`.

It uses the crews, checks and rows of the benchmark on the CPU. Gradients are ready on the GPU, and a repeat ends when the GPU
is done. Workers are assigned to the GPUs round robin. fastps keeps its shards there unless FASTPS_PLACEMENT says otherwise. The
starting process never initializes CUDA, because workers are forked from it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fastps.bench import step
from fastps.bench.gpu.device_fold import DeviceFold
from fastps.bench.measure import BenchOptions, Row
from fastps.bench.member import load_torch
from fastps.bench.peers import LEARNING_RATE, MOMENTUM, Fastps, Job, Peer, averaging_sgd, bucketed, reduce_buckets
from fastps.bench.step import Kind
from fastps.device.interface import DeviceError
from fastps.device.placement import gpu_variables
from fastps.kernels.cuda import launch_args
from fastps.kernels.update import fold

_DEVICES = Path("/dev")


def gpus() -> int:
    """Count this machine's GPUs without CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(_DEVICES.glob("nvidia[0-9]*")))


def settle(job: Job, rank: int) -> None:
    """Assign this process its GPU, as the launcher does, before it first uses CUDA."""
    os.environ["FASTPS_GPUS"] = ",".join(str(gpu) for gpu in range(min(job.workers, gpus())))
    os.environ.update(gpu_variables(rank, os.environ))
    os.environ.setdefault("FASTPS_PLACEMENT", "device")


class FastpsCuda(Fastps):
    """fastps with its parameters on a GPU; its placement decides where the shards are."""

    def __init__(self, job: Job, rank: int, sync: str) -> None:
        settle(job, rank)
        super().__init__(job, rank, sync, device="cuda")
        self.is_exposed = self.optimizer.placement == "device"
        if not self.is_exposed:
            for parameter in self.parameters:
                parameter.grad = torch.full_like(parameter, self.gradient)

    def step(self) -> None:
        """Step: on the device the slots are written once; staged, each step copies the gradients, as after a backward."""
        if self.is_exposed:
            super().step()
        else:
            self.optimizer.step()

    def run(self, steps: int) -> None:
        """Take steps, and wait until the GPU is done."""
        super().run(steps)
        torch.cuda.synchronize()


class _OverNccl(Peer):
    """A peer on GPUs whose processes are a group of NCCL."""

    def run(self, steps: int) -> None:
        """Take steps, and wait until the GPU is done."""
        super().run(steps)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class Nccl(_OverNccl):
    """torch.distributed: one flat tensor, all_reduce by NCCL, and one fused step that makes the mean. Needs a GPU a worker."""

    def __init__(self, job: Job, rank: int) -> None:
        settle(job, rank)
        dist.init_process_group("nccl", init_method=f"file://{job.folder}/{job.name}", rank=rank, world_size=job.workers)
        self.weights = torch.ones(job.size, device="cuda").requires_grad_()
        self.gradient = torch.full((job.size,), job.gradient(rank), device="cuda")
        self.weights.grad = self.gradient
        self.optimizer = averaging_sgd(self.weights, job.workers)
        self.optimizer.grad_scale = self.optimizer.grad_scale.cuda()  # type: ignore[attr-defined]

    def step(self) -> None:
        """Take one step; the mean stays in the gradient, so the next step's mean is the same."""
        dist.all_reduce(self.gradient)
        self.optimizer.step()


class DdpCuda(_OverNccl):
    """DistributedDataParallel's work after backward: NCCL's all_reduce of its buckets at once, then a step on 60 tensors."""

    def __init__(self, job: Job, rank: int) -> None:
        settle(job, rank)
        dist.init_process_group("nccl", init_method=f"file://{job.folder}/{job.name}", rank=rank, world_size=job.workers)
        self.workers = job.workers
        self.weights = torch.ones(job.size, device="cuda")
        self.gradient = torch.full((job.size,), job.gradient(rank), device="cuda")
        self.buckets, self.optimizer = bucketed(job, self.weights, self.gradient)

    def step(self) -> None:
        """Reduce all buckets, then take one optimizer step; the mean stays in the gradient, so the next mean is the same."""
        reduce_buckets(self.buckets, self.workers)
        self.optimizer.step()


class RooflineCuda:
    """The fold's kernel alone, in one process, without a step around it, on the share of one GPU: no step can be faster.

    With several GPUs each folds its part of the model, and the gradients lie here in the GPU's own memory.
    """

    def __init__(self, job: Job, rank: int) -> None:
        from fastps.device.cuda import CudaDevice

        settle(job, 0)
        self.device = CudaDevice()
        hyper = (LEARNING_RATE, MOMENTUM, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
        size = -(-job.size // max(1, min(job.workers, gpus())))
        gradients = [np.full(size, job.gradient(each), np.float32) for each in range(job.workers)]
        self.fold = DeviceFold(
            self.device,
            launch_args.Shape(fold.RULE_SGD, 1, 0.0, ((0, size, 0),)),
            fold.FOLD_SUM,
            [(gradient, [hyper], [True], 1.0, 1.0) for gradient in gradients],
            np.ones(size, np.float32),
            np.zeros((1, size), np.float32),
            np.ones(1, np.int64),  # a first step, without dampening, is one on momentum of zeros
            "float32",
            1.0 / job.workers,
            in_place=True,
        )

    def run(self, steps: int) -> None:
        """Fold `steps` times, each from the results of the one before."""
        self.fold.run_often(steps)

    @property
    def weights(self) -> torch.Tensor:
        """The fold's weights."""
        return torch.from_numpy(self.fold.results()[0])

    def close(self) -> None:
        """Free the memory."""
        self.fold.close()
        self.device.shut()


OURS = {
    "fastps": Kind(lambda job, rank: FastpsCuda(job, rank, "bsp")),
    "fastps-asp": Kind(lambda job, rank: FastpsCuda(job, rank, "asp")),
}
PEERS = {"limit": {"limit": Kind(RooflineCuda, members=1)}, "nccl": {"nccl": Kind(Nccl)}, "ddp": {"ddp": Kind(DdpCuda)}}


def missing_reason(workers: int) -> Callable[[str], str | None]:
    """Return the function that says why a peer cannot be measured here with this many workers, or None."""

    def reason(name: str) -> str | None:
        if name not in PEERS:
            return "it is no peer on a GPU"
        if name in ("nccl", "ddp") and gpus() < workers:
            return f"NCCL needs a GPU a worker, and there are {gpus()} for {workers}"
        return None

    return reason


def measure(options: BenchOptions) -> list[Row]:
    """Return the rows as step.measure does. Raises DeviceError without a GPU."""
    if not gpus():
        raise DeviceError("expected a GPU for --device cuda, found none on this machine: `fastps doctor` shows what there is")
    load_torch()
    pairs = [(workers, size) for size in options.parameters for workers in options.workers]
    return [
        row for workers, size in pairs for row in step.rows_of(workers, size, options, OURS, PEERS, missing_reason(workers))
    ]
