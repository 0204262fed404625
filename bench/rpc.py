"""torch.distributed.rpc as a side of the benchmark: a parameter server in worker 0's process, as in torch's own tutorial.

It follows "Implementing batch RPC processing using asynchronous executions" of torch's tutorials, with one flat tensor and the
fused optimizer, which are faster than 60 tensors.
"""

import threading
import warnings

import torch
import torch.distributed.rpc as rpc

from fastps.bench.peers import LEARNING_RATE, Job, Peer, fused_sgd


def missing_reason() -> str | None:
    """Return why RPC cannot be measured here, or None."""
    return None if rpc.is_available() else "this build of torch has no torch.distributed.rpc"


class Server:
    """The weights and the sum of a step's gradients so far; the last gradient of a step updates and answers all workers."""

    def __init__(self, size: int, workers: int) -> None:
        self.workers = workers
        self.weights = torch.ones(size).requires_grad_()
        self.total = self.weights.grad = torch.zeros(size)
        self.count = 0
        self.optimizer = fused_sgd([self.weights], LEARNING_RATE / workers)
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


class Rpc(Peer):
    """A worker: one call a step, which carries the gradient there and the new weights back.

    Its transport polls shared memory all the time, so its crew must be paused between commands.
    """

    def __init__(self, job: Job, rank: int) -> None:
        if rank == 0:
            _servers.append(Server(job.size, job.workers))
        self.weights = torch.ones(job.size)
        self.gradient = torch.full((job.size,), job.gradient(rank))
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=max(4, 2 * job.workers),
            rpc_timeout=60.0,
            init_method=f"file://{job.folder}/{job.name}",
        )
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns about its own use of process groups
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job.workers, rpc_backend_options=options)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Push, and take the returned weights."""
        self.weights = rpc.rpc_sync("worker0", _push, args=(self.gradient,))

    def close(self) -> None:
        """Leave together with the others."""
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            rpc.shutdown()
