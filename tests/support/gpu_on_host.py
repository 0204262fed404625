"""The processes of the GPU check where CUDA is simulated in host memory, and models are on the CPU.

`python -m tests.support.gpu_on_host part|worker|reader ARGUMENTS` is a part of the check, a worker of its jobs, and the other
process of the check of CUDA IPC.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import fastps
from fastps.bench import peers
from fastps.bench.gpu import check as gpu_check
from fastps.bench.gpu import step_cuda
from fastps.bench.gpu import worker as gpu_worker
from fastps.device import cuda, sharing
from fastps.device.placement import gpus_of_workers, placement
from fastps.lab.gpus.cuda_on_host import HostCuda, HostDevice
from fastps.lab.measuring import doctor
from fastps.lab.measuring.doctor import Finding
from tests.torch.placements.test_staged import SeveralDevicesPlacement, StagedOptimizer, placed_by

HERE = (sys.executable, "-m", "tests.support.gpu_on_host")
GPUS = ["gpu 0", "gpu 1"]


class Placement(SeveralDevicesPlacement):
    """On the device of host memory that the launcher gave to this worker."""

    def make_device(self) -> cuda.CudaDevice:
        gpus = gpus_of_workers()
        if "#" in "".join(gpus):  # several devices on one GPU
            return cuda.CudaDevice()
        return HostDevice(f"gpu {gpus[fastps.rank()]}" if gpus else GPUS[0])


OnDevice = placed_by(Placement)


def optimizer(*arguments: Any, **more: Any) -> fastps.DistributedOptimizer:
    """The optimizer of a model whose tensors would be on a GPU."""
    return (OnDevice if placement() == "device" else StagedOptimizer)(*arguments, **more)


def job(device: str, **more: Any) -> gpu_worker.GpuJob:
    """A job on a GPU, with its model on the CPU."""
    if device == "cuda":
        fastps.DistributedOptimizer = optimizer  # type: ignore[misc,assignment]
    return GpuJob("cpu", **more)


class StepOfFastps(step_cuda.FastpsCuda):
    """fastps' side of the benchmark of a step."""

    def __init__(self, job: peers.Job, rank: int, sync: str) -> None:
        step_cuda.settle(job, rank)
        os.environ["FASTPS_GPUS"] = ""
        peers.Fastps.__init__(self, job, rank, sync)
        self.is_exposed = True

    def run(self, steps: int) -> None:
        peers.Fastps.run(self, steps)


def findings() -> list[Finding]:
    """What doctor finds of the devices."""

    def read(reader: int, handles: Sequence[sharing.Handles]) -> list[str]:
        command = [*HERE, "reader", str(reader), *(handle.hex() for pair in handles for handle in pair)]
        found: list[str] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return found

    works, said = sharing.try_sharing([cuda.CudaDevice(number) for number in range(len(GPUS))], read)
    return [Finding("CUDA IPC", "works" if works else "no", said)]


GpuJob = gpu_worker.GpuJob

if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    cuda.CudaDevice.granularity = 1  # as HostDevice's
    cuda.CupyCuda = functools.cache(lambda: HostCuda(GPUS))  # type: ignore[misc,assignment]
    if kind == "worker":
        gpu_worker.GpuJob = job  # type: ignore[misc,assignment]
        sys.argv[1:] = arguments
        gpu_worker.main()
    elif kind == "reader":
        sharing._main(arguments)
    else:
        gpu_check.WORKER = (*HERE, "worker")  # type: ignore[assignment]
        gpu_check.CASES = gpu_check.CASES[1:2]  # the others run the same code with other rules and disciplines
        gpu_check.faults = lambda device, gpus: gpu_check.check_going_on(device, "device", gpus)  # not on one GPU, too
        doctor.gpu_findings = findings
        step_cuda.gpus = lambda: 1  # fewer than workers, so that NCCL is not asked
        step_cuda.FastpsCuda = StepOfFastps  # type: ignore[misc]
        peers.DistributedOptimizer = OnDevice  # type: ignore[misc]
        gpu_check.main(arguments)
