"""The parameter server of Ray's examples as a side of `fastps bench train`: an actor for the server, and one for each worker.

A loop in the driver's process hands the weights to all workers, and their gradients to the server, as references: the actors
pass them on through Ray's object store, in one flat array each.
"""

import os
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fastps.bench.measure import Floats

_OBJECT_STORE_BYTES = 3 << 30
_TIMEOUT_S = 100.0


class Computing(Protocol):
    """What a worker's actor drives."""

    model: nn.Module

    def compute(self) -> None:
        """Compute the gradients of the next batch."""

    def __call__(self, command: str) -> Any:
        """Return the "loss" on the images that judge."""


class Server:
    """The actor of the weights, one flat tensor."""

    def __init__(self, make: Callable[[], tuple[torch.Tensor, torch.optim.Optimizer]]) -> None:
        self.weights, self.optimizer = make()
        self.mean = self.weights.grad = torch.zeros_like(self.weights)

    def apply(self, *gradients: Floats) -> Floats:
        """Update with the mean of a step's gradients, if there are any; returns the weights."""
        if gradients:
            np.copyto(self.mean.numpy(), gradients[0])
            for gradient in gradients[1:]:
                np.add(self.mean.numpy(), gradient, out=self.mean.numpy())
            self.mean /= len(gradients)
            self.optimizer.step()
        weights: Floats = self.weights.detach().numpy()
        return weights


class Worker:
    """The actor of one worker, with a model and batches of its own."""

    def __init__(self, make: Callable[[int], Computing], rank: int) -> None:
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # as objects of the store are
        self.trainer = make(rank)
        self.parameters = list(self.trainer.model.parameters())

    def gradient(self, weights: Floats) -> Floats:
        """The gradient of the next batch."""
        nn.utils.vector_to_parameters(torch.from_numpy(weights), self.parameters)
        self.trainer.compute()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat: Floats = nn.utils.parameters_to_vector(gradients).numpy()
        return flat

    def loss(self, weights: Floats) -> float:
        """The loss on the images that judge."""
        nn.utils.vector_to_parameters(torch.from_numpy(weights), self.parameters)
        return float(self.trainer("loss"))


class Driver:
    """The only member of Ray's crew: it has the loop, and answers as the trainers of other crews do."""

    def __init__(
        self,
        workers: int,
        server: Callable[[], tuple[torch.Tensor, torch.optim.Optimizer]],
        worker: Callable[[int], Computing],
    ) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        self.ray: Any = ray
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        ray.init("local", num_cpus=workers, object_store_memory=_OBJECT_STORE_BYTES, **options)
        self.server = ray.remote(num_cpus=0)(Server).remote(server)
        self.workers = [ray.remote(num_cpus=0)(Worker).remote(worker, rank) for rank in range(workers)]
        self.weights = self.server.apply.remote()
        self.close = ray.shutdown

    def __call__(self, command: int | str) -> Any:
        """Take steps after one that aligns all workers: (begin, end) in ns. Or "loss", or "weights": float32, flat."""
        if command == "loss":
            return self._got(self.workers[0].loss.remote(self.weights))
        if command == "weights":
            return self._got(self.weights).copy()
        self.step()
        self._got(self.weights)
        began_ns = time.monotonic_ns()
        for _ in range(int(command)):
            self.step()
        self._got(self.weights)
        return began_ns, time.monotonic_ns()

    def step(self) -> None:
        """Let a step follow those that the actors still compute."""
        self.weights = self.server.apply.remote(*[worker.gradient.remote(self.weights) for worker in self.workers])

    def _got(self, reference: Any) -> Any:
        return self.ray.get(reference, timeout=_TIMEOUT_S)
