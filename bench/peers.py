"""The ways to synchronize one step that `fastps bench step` compares: each a class that a forked worker makes and steps.

SGD with momentum on 60 tensors of equal size, gradients ready before the step. Every worker's gradient is constant (1, 2, ...
by rank; 1 under asynchronous ones), so that the weights can be foretold. Refuses straw men: peers get flat tensors, fused
optimizers and the threads that are theirs. Refuses to time anything.
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
    """What the workers of one side agree on: the size of the model, each worker's gradient, and a folder to meet in."""

    def __init__(self, name: str, workers: int, parameters: int, folder: str) -> None:
        self.name = name
        self.workers = workers
        self.size = TENSORS * whole_lines(math.ceil(parameters / TENSORS))  # a little more, so that tensors fill lines
        self.folder = folder
        self.is_level = name not in ASYNCHRONOUS

    def gradient(self, rank: int) -> float:
        """Every element of a worker's gradient."""
        return rank + 1.0 if self.is_level else 1.0

    def part(self, rank: int, parts: int) -> slice:
        """One of `parts` runs of whole cache lines."""
        lines = self.size // 16
        return slice(16 * (lines * rank // parts), 16 * (lines * (rank + 1) // parts))

    def tensors_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The model's tensors as views of one flat tensor."""
        return list(flat.view(TENSORS, -1).unbind())


class ForkedJob(Job):
    """A job whose workers are forked from the process that makes it: `shared`, float32[rows, size], and a barrier."""

    def __init__(self, name: str, workers: int, parameters: int, folder: str, rows: int) -> None:
        super().__init__(name, workers, parameters, folder)
        self.barrier = multiprocessing.get_context("fork").Barrier(workers)
        self.memory = mmap.mmap(-1, max(1, rows) * self.size * 4 + mmap.PAGESIZE)
        self.shared = aligned(rows, self.size, self.memory)


def fused_sgd(tensors: list[torch.Tensor], learning_rate: float = LEARNING_RATE) -> torch.optim.SGD:
    """The optimizer of every peer."""
    return torch.optim.SGD(tensors, lr=learning_rate, momentum=MOMENTUM, fused=True)


def averaging_sgd(flat: torch.Tensor, workers: int) -> torch.optim.SGD:
    """The same on a sum of gradients: it divides in its own pass, as if to undo a loss' scale, and leaves the mean there."""
    optimizer = fused_sgd([flat])
    optimizer.grad_scale = torch.tensor(float(workers))  # type: ignore[attr-defined]
    return optimizer


def add_up(gradients: list[torch.Tensor], total: torch.Tensor) -> None:
    """Their sum, in as few passes as torch makes."""
    if len(gradients) == 1:
        total.copy_(gradients[0])
        return
    torch.add(gradients[0], gradients[1], out=total)
    for gradient in gradients[2:]:
        total.add_(gradient)


class Limit:
    """One pass over memory, by as many processes as there are cores, which never wait for each other: no step can be faster.

    Each pass reads what the one before has written, as steps do. Rows of shared: gradients, weights, momentum, and both once
    more, to write.
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
        """From one pair of weights and momentum, `read` rows behind the gradients, to another."""
        weights, weights_out = rows[count + read], rows[count + written]
        momentum, momentum_out = (rows[count + pair + 1 : count + pair + 2] for pair in (read, written))
        gradients = [rows[row] for row in range(count)]
        rates = {"learning_rate": LEARNING_RATE / count, "momentum": MOMENTUM}
        return roofline.Loop(gradients, weights, momentum, weights_out, momentum_out, **rates)

    def run(self, steps: int) -> None:
        """So many passes, without Python in between."""
        there, back = self.loops
        there.run(self.part.start, self.part.stop, self.streaming, steps, back)
        if steps % 2:
            self.loops.reverse()
            self.read.reverse()

    @property
    def weights(self) -> torch.Tensor:
        """This process' part of what was written last: the next pass reads it."""
        return self.read[0]


class Peer:
    """A worker of a side: `step` is one synchronization step, `weights` what it holds then."""

    weights: torch.Tensor

    def step(self) -> None:
        """One synchronization step."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """So many steps, from Python, as a training script takes them."""
        for _ in range(steps):
            self.step()

    def close(self) -> None:
        """The end."""


def fold_alone(lane: Lane) -> None:
    """Who has the turn folds by itself."""
    lane.share_folds(0)


def store_plainly(lane: Lane) -> None:
    """Folds store into the caches, whatever their size."""
    lane.stream_folds(False)


def store_past_caches(lane: Lane) -> None:
    """Folds store past the caches, whatever their size."""
    lane.stream_folds(True)


class Fastps(Peer):
    """fastps: gradients in the slot, step() with its swap of 60 tensors; `choose` makes one of its choices otherwise."""

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
        self.gradient = job.gradient(rank)
        self.unwritten = self.optimizer.worker.store.arena.slots

    def step(self) -> None:
        """As a training script's, less the backward: the first steps write the slots, which then stay as they are."""
        self.optimizer.expose_gradients()
        if self.unwritten:
            self.unwritten -= 1
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad.fill_(self.gradient)
        self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:  # type: ignore[override]
        """The weights taken last."""
        return torch.cat([parameter.detach() for parameter in self.parameters])

    def close(self) -> None:
        """Leave the job."""
        self.optimizer.close()


class Gloo(Peer):
    """torch.distributed: one flat tensor, all_reduce, one fused step on it that makes the mean."""

    def __init__(self, job: Job, rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{job.folder}/{job.name}", rank=rank, world_size=job.workers)
        self.workers = job.workers
        self.weights = torch.ones(job.size).requires_grad_()
        self.gradient = torch.full((job.size,), job.gradient(rank))
        self.prepare(job)

    def prepare(self, job: Job) -> None:
        """What is left to do once: the optimizer."""
        self.weights.grad = self.gradient
        self.optimizer = averaging_sgd(self.weights, self.workers)

    def step(self) -> None:
        """The mean stays in the gradient, so that the next step's mean is the same."""
        dist.all_reduce(self.gradient)
        self.optimizer.step()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class Ddp(Gloo):
    """What DistributedDataParallel does after backward: all its buckets' all_reduce at once, then a step on 60 tensors."""

    def prepare(self, job: Job) -> None:
        """Gradients are views of the buckets, as with gradient_as_bucket_view."""
        parameters = [torch.nn.Parameter(tensor) for tensor in job.tensors_of(self.weights.detach())]
        for parameter, gradient in zip(parameters, job.tensors_of(self.gradient), strict=True):
            parameter.grad = gradient
        cuts = [0, *range(min(FIRST_BUCKET_FLOATS, job.size), job.size, BUCKET_FLOATS), job.size]
        self.buckets = [self.gradient[begin:end] for begin, end in itertools.pairwise(cuts) if end > begin]
        self.optimizer = fused_sgd(list(parameters))

    def step(self) -> None:
        """All buckets, then one optimizer step."""
        works = [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]
        for work, bucket in zip(works, self.buckets, strict=True):
            work.wait()
            bucket.div_(self.workers)
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
        """One update of the shared weights."""
        self.optimizer.step()


class Handmade(Peer):
    """What is written by hand first: gradients in shared memory, and between two barriers one torch fused step for all.

    Worker 0 takes it, with all cores, while the others wait. Rows of shared: weights, then a gradient a worker.
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
        """Everyone's gradients are there; worker 0 sums them and updates the weights."""
        self.barrier.wait()
        if self.leads:
            add_up(self.gradients, self.total)
            self.optimizer.step()
        self.barrier.wait()


class HandmadeParts(Peer):
    """The best that is written by hand: all in shared memory, each worker sums and updates its part between two barriers.

    Rows of shared: weights, then a gradient a worker, then room for the barrier. Where every worker has a core, the barrier
    spins on counters (x86 only: other machines may reorder its plain stores); else it is multiprocessing's.
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
        """Wait until everyone is here."""
        if not self.spins:
            self.barrier.wait()
            return
        self.phase += 1
        self.phases[self.rank] = self.phase
        while self.phases.min() < self.phase:
            pass

    def step(self) -> None:
        """Everyone's gradients are there; sum one's part, update it, and wait for the others'."""
        self.meet()
        add_up(self.gradients, self.total)
        self.optimizer.step()
        self.meet()
