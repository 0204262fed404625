"""The sides that four workers take part in: each makes one synchronization step at a time.

Without compute a step hands over gradients that are ready. With it a step has a real forward and backward pass of a stack of
linear layers, and each layer's backward also sleeps. The sleep stands for an accelerator that computes: it uses no core, so
what a side does meanwhile is not slowed. Spinning would fight with four workers for two cores.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastps.bench.two_nodes.order import Order
from fastps.job import environment
from fastps.torch.optimizer import DistributedOptimizer

_LAYERS, _BATCH, _RATE = 25, 8, 0.1
_CHUNKS, _CHUNK_FLOATS = 8, 1 << 20  # of the hierarchical all-reduce: the most chunks, and the least size of each
_LIMIT = timedelta(seconds=120)


class Side(Protocol):
    """One worker's side of a turn."""

    def step(self) -> float:
        """Make a step. Returns its seconds."""
        ...

    def finish(self) -> float:
        """Wait for the other workers. Returns a number by which results are compared."""
        ...


class _Steps:
    def __init__(self, step: Callable[[], float], finish: Callable[[], float]) -> None:
        self.step, self.finish = step, finish


def _timed(run: Callable[[], object]) -> float:
    began_ns = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - began_ns) / 1e9


# -- without compute ---------------------------------------------------------------------------------


@contextmanager
def _fastps(order: Order, store: Any) -> Iterator[Side]:
    """Steps with gradients of ones; the weights count them."""
    weights = torch.nn.Parameter(torch.zeros(order.parameters))
    with DistributedOptimizer(torch.optim.SGD([weights], lr=1.0)) as optimizer:
        optimizer.wait_for_start()

        def step() -> float:
            optimizer.expose_gradients()
            assert weights.grad is not None
            if float(weights.grad[-1]) != 1.0:  # another slot
                weights.grad.fill_(1.0)
            return _timed(optimizer.step)

        def finish() -> float:
            optimizer.wait_for_others()
            return float(weights.detach()[-1])

        yield _Steps(step, finish)


@contextmanager
def _gloo(order: Order, store: Any) -> Iterator[Side]:
    """All-reduces of ones, over and over."""
    with _process_group(store):
        yield _reducing(order, dist.all_reduce)


@contextmanager
def _hierarchical(order: Order, store: Any) -> Iterator[Side]:
    """A sum within each node, an all-reduce of the nodes' first workers, and a broadcast within each node, in chunks.

    While one chunk is summed, the one before it travels, and the one before that is broadcast. Each kind has its own group, so
    they do not wait for each other.
    """
    with _process_group(store):
        each = order.local_workers
        nodes = [list(range(first, first + each)) for first in range(0, environment.world_size(), each)]
        leader = environment.rank() // each * each
        sums, leaders, copies = [_group_of(nodes), _group_of([[ranks[0] for ranks in nodes]]), _group_of(nodes)]

        def all_reduce(gradient: torch.Tensor) -> None:
            chunks = gradient.chunk(max(1, min(_CHUNKS, len(gradient) // _CHUNK_FLOATS)))
            for stage in range(len(chunks) + 2):
                under_way = []
                if stage < len(chunks):
                    under_way.append(dist.reduce(chunks[stage], leader, group=sums, async_op=True))
                if 1 <= stage <= len(chunks) and leaders is not None:
                    under_way.append(dist.all_reduce(chunks[stage - 1], group=leaders, async_op=True))
                if stage >= 2:
                    under_way.append(dist.broadcast(chunks[stage - 2], leader, group=copies, async_op=True))
                for work in under_way:
                    work.wait()

        yield _reducing(order, all_reduce)


def _group_of(all_ranks: list[list[int]]) -> Any:
    """Make a group of each list of ranks. Returns that of this worker; None if it is in none."""
    groups = [(ranks, dist.new_group(ranks, timeout=_LIMIT)) for ranks in all_ranks]
    return next((group for ranks, group in groups if environment.rank() in ranks), None)


@contextmanager
def _process_group(store: Any) -> Iterator[None]:
    workers = environment.world_size()
    dist.init_process_group("gloo", store=store, rank=environment.rank(), world_size=workers, timeout=_LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _reducing(order: Order, reduce: Callable[[torch.Tensor], object]) -> _Steps:
    gradient = torch.ones(order.parameters)

    def step() -> float:
        gradient.fill_(1.0)
        dist.barrier()
        return _timed(lambda: reduce(gradient))

    return _Steps(step, lambda: float(gradient[-1]))


# -- with compute ------------------------------------------------------------------------------------


class _SlowBackward(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        time.sleep(context.seconds)
        return gradient, None


class Layers(torch.nn.Module):
    """Linear layers of one size. Each layer's share of `backward_s` passes before its gradient is ready."""

    def __init__(self, parameters: int, backward_s: float) -> None:
        super().__init__()
        width = max(2, math.isqrt(parameters // _LAYERS))
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS))
        for weights in self.parameters():
            torch.nn.init.normal_(weights, std=width**-0.5)  # keeps the length of activations
        self.width, self._layer_s = width, backward_s / _LAYERS

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """See torch.nn.Module."""
        for layer in self.layers:
            values = _SlowBackward.apply(layer(values), self._layer_s)  # type: ignore[no-untyped-call]
        return values


@contextmanager
def _fastps_training(order: Order, store: Any) -> Iterator[Side]:
    model = Layers(order.parameters, order.backward_s)
    with DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=_RATE)) as optimizer:
        optimizer.wait_for_start()
        yield _training(model, model, optimizer, optimizer.wait_for_others)


@contextmanager
def _ddp_training(order: Order, store: Any) -> Iterator[Side]:
    with _process_group(store):
        model = Layers(order.parameters, order.backward_s)
        wrapped = DistributedDataParallel(model)
        yield _training(model, wrapped, torch.optim.SGD(model.parameters(), lr=_RATE), dist.barrier)


def _training(model: Layers, wrapped: torch.nn.Module, optimizer: Any, wait: Callable[[], object]) -> _Steps:
    values = torch.randn(_BATCH, model.width, generator=torch.Generator().manual_seed(environment.rank()))

    def once() -> None:
        optimizer.zero_grad()
        wrapped(values).square().mean().backward()
        optimizer.step()

    def finish() -> float:
        wait()
        return sum(float(weights.detach().double().abs().sum()) for weights in model.parameters())

    return _Steps(lambda: _timed(once), finish)


SIDES: dict[str, Callable[[Order, Any], AbstractContextManager[Side]]] = {
    "fastps": _fastps,
    "gloo": _gloo,
    "hierarchical": _hierarchical,
    "fastps-training": _fastps_training,
    "ddp-training": _ddp_training,
}
