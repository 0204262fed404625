"""The ways to synchronize one step that `fastps bench step` compares: each is a class that a forked worker makes and steps.

The job is SGD with momentum on 60 tensors of equal size, with gradients ready before the step. Every worker's gradient is
constant (1, 2, ... by rank; 1 in asynchronous jobs), so that the weights are predictable. No peer is a straw man: each gets
flat tensors, fused optimizers and its share of the threads.
"""

import itertools
import math
import mmap
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fastps.bench.measure import aligned, whole_lines
from fastps.kernels.baseline import roofline
from fastps.kernels.protocol.lane import Lane
from fastps.torch.optimizer import DistributedOptimizer

TENSORS = 60
ASYNCHRONOUS = ("fastps-asp", "fastps-server-asp", "hogwild")  # sides whose workers do not wait for each other
LEARNING_RATE, MOMENTUM = 0.01, 0.9
BUCKET_FLOATS, FIRST_BUCKET_FLOATS = 25 * 2**18, 2**18  # DDP's 25 MiB, and 1 MiB for the first


class Job:
    """Facts shared by the workers of one side: the model's size, each worker's gradient, and a folder for rendezvous."""

    def __init__(self, name: str, workers: int, parameters: int, folder: str) -> None:
        self.name = name
        self.workers = workers
        self.size = TENSORS * whole_lines(math.ceil(parameters / TENSORS))  # rounded up, so that tensors fill lines
        self.folder = folder
        self.is_level = name not in ASYNCHRONOUS

    def gradient(self, rank: int) -> float:
        """Return the value of every element of a worker's gradient: another for each, and nearly 1 where updates race."""
        return rank + 1.0 if self.is_level else 1.0 + 1e-6 * rank

    def part(self, rank: int, parts: int) -> slice:
        """Return one of `parts` runs of whole cache lines."""
        lines = self.size // 16
        return slice(16 * (lines * rank // parts), 16 * (lines * (rank + 1) // parts))

    def tensors_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the model's tensors as views of one flat tensor."""
        return list(flat.view(TENSORS, -1).unbind())


class ForkedJob(Job):
    """A job of workers forked from its creator, with `shared`, float32[rows, size], and a barrier."""

    def __init__(self, name: str, workers: int, parameters: int, folder: str, rows: int) -> None:
        super().__init__(name, workers, parameters, folder)
        self.barrier = multiprocessing.get_context("fork").Barrier(workers)
        self.memory = mmap.mmap(-1, max(1, rows) * self.size * 4 + mmap.PAGESIZE)
        self.shared = aligned(rows, self.size, self.memory)


def fused_sgd(tensors: list[torch.Tensor], learning_rate: float = LEARNING_RATE) -> torch.optim.SGD:
    """Make every peer's optimizer."""
    return torch.optim.SGD(tensors, lr=learning_rate, momentum=MOMENTUM, fused=True)


def averaging_sgd(flat: torch.Tensor, workers: int) -> torch.optim.SGD:
    """Make the optimizer for a sum of gradients: it divides in its own pass, like undoing a loss scale, and stores the mean."""
    optimizer = fused_sgd([flat])
    optimizer.grad_scale = torch.tensor(float(workers))  # type: ignore[attr-defined]
    return optimizer


def add_up(gradients: list[torch.Tensor], total: torch.Tensor) -> None:
    """Sum gradients in as few passes as torch allows."""
    if len(gradients) == 1:
        total.copy_(gradients[0])
        return
    torch.add(gradients[0], gradients[1], out=total)
    for gradient in gradients[2:]:
        total.add_(gradient)


class Roofline:
    """One pass over memory by one process a core, without any waiting: no step can be faster.

    Each pass reads the results of the one before, as steps do. Rows of shared: gradients, weights, momentum, and a second pair
    of weights and momentum to write.
    """

    def __init__(self, job: ForkedJob, rank: int, streaming: bool) -> None:
        count = job.workers
        rows = job.shared
        rows[rank] = job.gradient(rank)
        self.part = job.part(rank, min(count, len(os.sched_getaffinity(0))))
        for row in range(count + 4):
            rows[row, self.part] = job.gradient(row) if row < count else 0.0
        rows[count, self.part] = 1.0
        self.loops = [self._loop(rows, count, read, 2 - read) for read in (0, 2)]
        self.read = [torch.from_numpy(rows[count + read])[self.part] for read in (0, 2)]
        self.streaming = streaming

    def _loop(self, rows: npt.NDArray[np.float32], count: int, read: int, written: int) -> roofline.Loop:
        """Make the loop from one pair of weights and momentum, `read` rows after the gradients, to another."""
        weights, weights_out = rows[count + read], rows[count + written]
        momentum, momentum_out = (rows[count + pair + 1 : count + pair + 2] for pair in (read, written))
        gradients = [rows[row] for row in range(count)]
        rates = {"learning_rate": LEARNING_RATE / count, "momentum": MOMENTUM}
        return roofline.Loop(gradients, weights, momentum, weights_out, momentum_out, **rates)

    def run(self, steps: int) -> None:
        """Run `steps` passes without Python in between."""
        there, back = self.loops
        there.run(self.part.start, self.part.stop, self.streaming, steps, back)
        if steps % 2:
            self.loops.reverse()
            self.read.reverse()

    @property
    def weights(self) -> torch.Tensor:
        """This process's part of the weights written last."""
        return self.read[0]


class Peer:
    """A worker of a side: `step` is one synchronization step, and `weights` its weights after it."""

    weights: torch.Tensor

    def step(self) -> None:
        """Take one synchronization step."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """Take steps from Python, as a training script does."""
        for _ in range(steps):
            self.step()

    def close(self) -> None:
        """Release resources."""


def fold_alone(lane: Lane) -> None:
    """Ablation: the combiner folds without helpers."""
    lane.share_folds(0)


def store_plainly(lane: Lane) -> None:
    """Ablation: folds use normal stores at every size."""
    lane.stream_folds(False)


def store_past_caches(lane: Lane) -> None:
    """Ablation: folds use non-temporal stores at every size."""
    lane.stream_folds(True)


class Fastps(Peer):
    """fastps: gradients in the slot, step() with its swap of 60 tensors; `choose` applies an ablation."""

    def __init__(
        self,
        job: Job,
        rank: int,
        sync: str,
        choose: Callable[[Lane], None] | None = None,
        device: str = "cpu",
        server: str = "workers",
        tensor_loops: str = "auto",
    ) -> None:
        os.environ.update(FASTPS_TENSOR_LOOPS=tensor_loops)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.workers), FASTPS_JOB=f"{Path(job.folder).name}-{job.name}")
        self.parameters = [tensor.clone().requires_grad_() for tensor in job.tensors_of(torch.ones(job.size, device=device))]
        plain = torch.optim.SGD(self.parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
        self.optimizer = DistributedOptimizer(plain, sync, server=server)
        if choose is not None:
            choose(self.optimizer.worker.lane)
        self.rank, self.gradient = rank, job.gradient(rank)
        self.written: set[int] = set()  # slots, which then stay unchanged

    def step(self) -> None:
        """Step like a training script without backward, which writes its gradients once into each slot."""
        self.optimizer.expose_gradients()
        if (slot := self.optimizer.worker.lane.slot) not in self.written:
            self.written.add(slot)
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad.fill_(self.gradient)
        self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:  # type: ignore[override]
        """The weights pulled last."""
        return torch.cat([parameter.detach() for parameter in self.parameters])

    def close(self) -> None:
        """Leave the job, worker 0 as the last."""
        if self.rank == 0:
            self.optimizer.wait_for_others()
        self.optimizer.close()


class Gloo(Peer):
    """torch.distributed: one flat tensor, all_reduce, and one fused step on it that divides by the number of workers."""

    def __init__(self, job: Job, rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{job.folder}/{job.name}", rank=rank, world_size=job.workers)
        self.workers = job.workers
        self.weights = torch.ones(job.size).requires_grad_()
        self.gradient = torch.full((job.size,), job.gradient(rank))
        self.prepare(job)

    def prepare(self, job: Job) -> None:
        """Make the optimizer."""
        self.weights.grad = self.gradient
        self.optimizer = averaging_sgd(self.weights, self.workers)

    def step(self) -> None:
        """Take one step; the mean stays in the gradient, so the next step's mean is the same."""
        dist.all_reduce(self.gradient)
        self.optimizer.step()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def bucketed(job: Job, weights: torch.Tensor, gradient: torch.Tensor) -> tuple[list[torch.Tensor], torch.optim.SGD]:
    """DDP's buckets of a flat gradient, and a fused step on the job's tensors, whose gradients are views of the buckets."""
    parameters = [torch.nn.Parameter(tensor) for tensor in job.tensors_of(weights.detach())]
    for parameter, part in zip(parameters, job.tensors_of(gradient), strict=True):
        parameter.grad = part
    cuts = [0, *range(min(FIRST_BUCKET_FLOATS, job.size), job.size, BUCKET_FLOATS), job.size]
    buckets = [gradient[begin:end] for begin, end in itertools.pairwise(cuts) if end > begin]
    return buckets, fused_sgd(list(parameters))


def reduce_buckets(buckets: list[torch.Tensor], workers: int) -> None:
    """Make every bucket the workers' mean, all at once."""
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
    for work, bucket in zip(works, buckets, strict=True):
        work.wait()
        bucket.div_(workers)


class Ddp(Gloo):
    """DistributedDataParallel's work after backward: all_reduce of all its buckets at once, then a step on 60 tensors."""

    def prepare(self, job: Job) -> None:
        """Make gradients views of the buckets, as with gradient_as_bucket_view."""
        self.buckets, self.optimizer = bucketed(job, self.weights, self.gradient)

    def step(self) -> None:
        """Reduce all buckets, then take one optimizer step."""
        reduce_buckets(self.buckets, self.workers)
        self.optimizer.step()


class Hogwild(Peer):
    """Weights in shared memory, each worker's own fused step in place: no aggregation, no consistency. Row 0 of shared."""

    def __init__(self, job: ForkedJob, rank: int) -> None:
        if rank == 0:
            job.shared[0] = 1.0
        job.barrier.wait()
        self.weights = torch.from_numpy(job.shared[0]).requires_grad_()
        self.weights.grad = torch.full((job.size,), job.gradient(rank))
        self.optimizer = fused_sgd([self.weights])

    def step(self) -> None:
        """Update the shared weights once."""
        self.optimizer.step()


class Handmade(Peer):
    """A simple handwritten way: gradients in shared memory, and between two barriers one torch fused step for all.

    Worker 0 takes the step with all cores while the others wait. Rows of shared: weights, then a gradient a worker.
    """

    def __init__(self, job: ForkedJob, rank: int) -> None:
        self.barrier, self.leads = job.barrier, rank == 0
        job.shared[1 + rank] = job.gradient(rank)
        if self.leads:
            job.shared[0] = 1.0
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        job.barrier.wait()
        self.weights = torch.from_numpy(job.shared[0]).requires_grad_()
        self.gradients = [torch.from_numpy(row) for row in job.shared[1 : 1 + job.workers]]
        self.total = self.weights.grad = torch.empty_like(self.weights, requires_grad=False)
        self.optimizer = fused_sgd([self.weights], LEARNING_RATE / job.workers)

    def step(self) -> None:
        """Wait for all gradients; worker 0 sums them and updates the weights."""
        self.barrier.wait()
        if self.leads:
            add_up(self.gradients, self.total)
            self.optimizer.step()
        self.barrier.wait()


class HandmadeParts(Peer):
    """The best handwritten way: all in shared memory; each worker sums and updates its part between two barriers.

    Rows of shared: weights, then a gradient a worker, then room for the barrier. If every worker has a core, the barrier spins
    on counters (x86 only: other machines may reorder its plain stores); otherwise it is multiprocessing's.
    """

    def __init__(self, job: ForkedJob, rank: int) -> None:
        self.barrier, self.rank, self.phase = job.barrier, rank, 0
        part = job.part(rank, job.workers)
        job.shared[1 + rank] = job.gradient(rank)
        job.shared[0, part] = 1.0
        self.phases = job.shared[1 + job.workers].view("int64")[: 8 * job.workers : 8]
        self.phases[rank] = 0
        job.barrier.wait()
        self.spins = job.workers <= len(os.sched_getaffinity(0)) and os.uname().machine == "x86_64"
        self.weights = torch.from_numpy(job.shared[0])
        own = torch.from_numpy(job.shared[0, part]).requires_grad_()
        self.gradients = [torch.from_numpy(job.shared[1 + worker, part]) for worker in range(job.workers)]
        self.total = own.grad = torch.empty_like(own, requires_grad=False)
        self.optimizer = fused_sgd([own], LEARNING_RATE / job.workers)

    def meet(self) -> None:
        """Wait at the barrier."""
        if not self.spins:
            self.barrier.wait()
            return
        self.phase += 1
        self.phases[self.rank] = self.phase
        while self.phases.min() < self.phase:
            pass

    def step(self) -> None:
        """Wait for all gradients, sum and update this worker's part, and wait for the other parts."""
        self.meet()
        add_up(self.gradients, self.total)
        self.optimizer.step()
        self.meet()
