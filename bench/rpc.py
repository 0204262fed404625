"""torch.distributed.rpc as a side of the benchmarks: a parameter server in worker 0's process, as in torch's own tutorial.

It follows "Implementing batch RPC processing using asynchronous executions" of torch's tutorials, with one flat tensor and the
fused optimizer, which are faster than 60 tensors.
"""

import threading
import warnings
from typing import Protocol

import torch
import torch.distributed.rpc as rpc

from fastps.bench.peers import LEARNING_RATE, Job, Peer, fused_sgd


def missing_reason() -> str | None:
    """Return why RPC cannot be measured here, or None."""
    return None if rpc.is_available() else "this build of torch has no torch.distributed.rpc"


class Server:
    """The weights and the sum of a step's gradients so far; the last gradient of a step updates and answers all workers."""

    def __init__(self, weights: torch.Tensor, optimizer: torch.optim.Optimizer, workers: int) -> None:
        self.workers = workers
        self.weights, self.optimizer = weights, optimizer
        self.total = weights.grad = torch.zeros_like(weights)
        self.count = 0
        self.lock = threading.Lock()
        self.updated: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def push(self, gradient: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        """Return a future of the weights after this step's update, which follows the last worker's push."""
        with self.lock:
            if self.count == 0:
                self.total.copy_(gradient)
            else:
                self.total.add_(gradient)
            self.count += 1
            updated = self.updated
            if self.count == self.workers:
                self.count = 0
                self.updated = torch.futures.Future()
                self.optimizer.step()
                updated.set_result(self.weights.detach())
        return updated


_servers: list[Server] = []  # in worker 0's process: its one server


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _push(gradient: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
    """Push a gradient, in worker 0's process."""
    return _servers[0].push(gradient)


def serve(weights: torch.Tensor, optimizer: torch.optim.Optimizer, workers: int) -> None:
    """Be the server of one flat tensor of weights, in worker 0's process. The optimizer's rate is that of a sum."""
    _servers.append(Server(weights, optimizer, workers))


def join(rank: int, workers: int, place: str) -> None:
    """Meet the other workers at a file. The transport polls all the time, so a crew must be paused between commands."""
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=max(4, 2 * workers), rpc_timeout=60.0, init_method=f"file://{place}"
    )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns about its own use of process groups
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def push(gradient: torch.Tensor) -> torch.Tensor:
    """Push a gradient; returns the weights after this step's update."""
    weights: torch.Tensor = rpc.rpc_sync("worker0", _push, args=(gradient,))
    return weights


def leave() -> None:
    """Leave together with the others."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        rpc.shutdown()


class Rpc(Peer):
    """A worker: one call a step, which carries the gradient there and the new weights back."""

    def __init__(self, job: Job, rank: int) -> None:
        if rank == 0:
            weights = torch.ones(job.size).requires_grad_()
            serve(weights, fused_sgd([weights], LEARNING_RATE / job.workers), job.workers)
        self.weights = torch.ones(job.size)
        self.gradient = torch.full((job.size,), job.gradient(rank))
        join(rank, job.workers, f"{job.folder}/{job.name}")

    def step(self) -> None:
        """Push, and take the returned weights."""
        self.weights = push(self.gradient)

    def close(self) -> None:
        """Leave together with the others."""
        leave()


class Steps(Protocol):
    """What a training loop uses of an optimizer."""

    def zero_grad(self) -> None:
        """Begin a step's gradients."""

    def step(self) -> object:
        """Update the weights."""


class Pushed:
    """The optimizer's place in a training loop: gradients go to the server in one flat tensor, new weights come back."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters, self.sizes = parameters, [parameter.numel() for parameter in parameters]
        self.gradient = torch.zeros(sum(self.sizes))
        for parameter, view in zip(parameters, torch.split(self.gradient, self.sizes), strict=True):
            parameter.grad = view.view_as(parameter)

    def zero_grad(self) -> None:
        """As torch's with set_to_none=False."""
        self.gradient.zero_()

    def step(self) -> None:
        """Push, and let the parameters be the new weights."""
        for parameter, view in zip(self.parameters, torch.split(push(self.gradient), self.sizes), strict=True):
            parameter.data = view.view_as(parameter)
