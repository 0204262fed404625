"""Ray Train: `FastpsTrainer`, a TorchTrainer whose workers train with fastps in place of torch's process group.

Ray starts the workers, ranks them node by node, restarts them after a failure, and keeps metrics and checkpoints. This module
tells each group of workers, by the variables that fastps' own launcher sets, which job it is. It uses Ray's documented names:
TorchTrainer and TorchConfig (stable), and Backend and its group of workers (Ray's interface for developers). Without the extra
the module can be imported, and its first use says what to install.
"""

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from fastps.errors import Error, NodeLostError, UnsupportedError, UsageError, WorkerDiedError
from fastps.job.specs import parse_policy
from fastps.network.tcp_store import host_store, limit_name_lookups
from fastps.system import exit_handlers
from fastps.system.extras import how_to_install
from fastps.torch.optimizer import DistributedOptimizer
from fastps.version import __version__

_missing = ""  # why Ray Train cannot be used
try:
    import ray.train
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.torch import prepare_data_loader as _ray_prepare_data_loader
    from ray.train.torch import prepare_model as _ray_prepare_model

    if not hasattr(ray.train, "WorkerGroupError"):
        _missing = (
            f"expected Ray Train V2, found V1 (Ray {ray.__version__}): set RAY_TRAIN_V2_ENABLED=1 before the import of ray"
        )
except ImportError as error:
    Backend = TorchConfig = TorchTrainer = object
    _missing = f"expected Ray Train 2.50 or newer, found {type(error).__name__}: {error}; {how_to_install('ray')}"

__all__ = ["DistributedOptimizer", "FastpsTrainer", "prepare_data_loader", "prepare_model"]

_stores: list[TCPStore] = []  # the rendezvous that this process keeps while it lives


class FastpsTrainer(TorchTrainer):  # type: ignore[misc]  # Ray has no types that are always there
    """Run a training loop on Ray's workers, as TorchTrainer does; the workers of a node share one arena.

    The loop wraps its optimizer by `fastps.DistributedOptimizer(inner, model=model)`, and nothing else: the rank, the number of
    workers and the job come from Ray. What is still open when the loop ends is closed. `ray.train.report`,
    `ray.train.get_context`, `ray.train.get_checkpoint` and `ray.train.get_dataset_shard` work as under TorchTrainer. There is
    no process group of torch, so take `prepare_model` and `prepare_data_loader` from this module.

    Each group of workers that Ray starts is a new job: at the beginning, after a failure (`FailureConfig(max_failures=...)`)
    and after an elastic group has changed its size.

    Args:
        train_loop_per_worker: the loop, a function without arguments or of one dict.
        train_loop_config: that dict.
        sync: a spec such as "dssp:3,15"; default: FASTPS_SYNC of the workers, else "bsp".
        scaling_config, run_config, datasets, dataset_config, validation_config: as in TorchTrainer.

    Raises:
        UsageError: Ray Train is missing or too old.
        PolicyError: `sync` is not a valid spec.
        UnsupportedError: Workers on TPUs.

    >>> def loop(config):
    ...     model = torch.nn.Linear(4, 1)
    ...     optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=config["lr"]), model=model)
    ...     for _ in range(10):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).sum().backward()
    ...         optimizer.step()
    ...         ray.train.report({"version": optimizer.version})
    >>> scaling = ray.train.ScalingConfig(num_workers=4)  # doctest: +SKIP
    >>> trainer = FastpsTrainer(loop, train_loop_config={"lr": 0.1}, sync="asp", scaling_config=scaling)  # doctest: +SKIP
    >>> result = trainer.fit()  # doctest: +SKIP
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        sync: str | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: Any = None,
        validation_config: Any = None,
    ) -> None:
        if _missing:
            raise UsageError(f"FastpsTrainer: {_missing}")
        if sync is not None:
            parse_policy(sync)
        if getattr(scaling_config, "use_tpu", False):
            raise UnsupportedError("FastpsTrainer: expected workers on CPUs or GPUs, found ScalingConfig(use_tpu=True)")
        super().__init__(
            train_loop_per_worker, train_loop_config=train_loop_config, torch_config=FastpsConfig(sync),
            scaling_config=scaling_config, run_config=run_config,
            datasets=datasets, dataset_config=dataset_config, validation_config=validation_config,
        )  # fmt: skip

    def fit(self) -> Any:
        """Train, and return Ray's Result.

        Raises ray.train.WorkerGroupError if workers fail more often than `FailureConfig` allows. If a worker or node was lost,
        its `__cause__` is the WorkerDiedError or NodeLostError that names it.
        """
        try:
            return super().fit()
        except ray.train.WorkerGroupError as failed:
            if (loss := loss_of(failed.worker_failures)) is None:
                raise
            raise failed from loss


def loss_of(failures: Mapping[int, Exception]) -> Error | None:
    """The error that names a lost worker or node, from what Ray saw of each rank; None if none was lost.

    Ray may see a dead process before the other workers have raised their own error, and then knows of nothing else.
    """
    for _, failure in sorted(failures.items()):
        if isinstance(failure, WorkerDiedError | NodeLostError):
            return failure
    for rank, failure in sorted(failures.items()):
        if isinstance(getattr(failure, "health_check_failure", failure), ray.exceptions.RayActorError):
            return WorkerDiedError(
                f"worker {rank} died: expected it to end its loop, found its process gone; see its own output for the reason",
                rank,
            )
    return None


class FastpsConfig(TorchConfig):  # type: ignore[misc]
    """The configuration of the backend: the discipline, None for the one of the workers' environment."""

    def __init__(self, sync: str | None) -> None:
        super().__init__()
        self.sync = sync

    @property
    def backend_cls(self) -> type:
        return FastpsBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """See ray.train.BackendConfig: what surrounds the loop on each worker."""
        return partial(_closes_optimizers, super().train_func_context, self.sync)

    def to_dict(self) -> dict[str, Any]:
        return {"sync": self.sync}


class FastpsBackend(Backend):  # type: ignore[misc]
    """Tells the workers of a group that starts that they are a new job."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: FastpsConfig) -> None:
        """See ray.train.backend.Backend. Raises UnsupportedError for workers that cannot be one job."""
        places: list[Place] = worker_group.execute(_own_place)
        check_places(places, uses_gpus=worker_group.get_resources_per_worker().get("GPU", 0) > 0)
        rendezvous = ""
        if places[-1].node > 0:
            port = worker_group.execute_single(0, _keep_rendezvous, places[0].address)
            host = f"[{places[0].address}]" if ":" in places[0].address else places[0].address
            rendezvous = f"{host}:{port}"
        job = secrets.token_hex(8)
        variables = variables_of(places, job, rendezvous)
        ray.get([worker_group.execute_single_async(rank, _set_variables, own) for rank, own in enumerate(variables)])


@dataclass(frozen=True)
class Place:
    """The place of one worker, as Ray and its machine see it."""

    host: str  # the machine's name
    address: str  # in Ray's cluster
    node: int  # its number
    local_rank: int  # the worker's number on its node
    local_workers: int  # of the node
    namespaces: tuple[str, str]  # of the network and of process ids: processes that see others cannot share an arena
    version: str  # of fastps
    has_gpu: bool  # whether torch finds one


def check_places(places: Sequence[Place], *, uses_gpus: bool) -> None:
    """Raise UnsupportedError, in one sentence, for workers that cannot be one job. `places` are in the order of ranks."""
    versions = sorted({place.version for place in places})
    if len(versions) > 1:
        raise UnsupportedError(f"expected the same version of fastps on all workers, found {' and '.join(versions)}")
    if uses_gpus and places[-1].node > 0:
        raise UnsupportedError(
            f"use_gpu=True: expected all workers on one node, found {places[-1].node + 1} nodes: a job of several nodes keeps"
            ' its model in host memory; give placement_strategy="STRICT_PACK", or leave use_gpu out'
        )
    without = sorted({place.host for place in places if not place.has_gpu})
    if uses_gpus and without:
        raise UnsupportedError(
            f"use_gpu=True: expected torch to find a GPU in every worker, found none on {', '.join(without)}: install a torch"
            " with CUDA there, or leave use_gpu out"
        )
    for before, place in pairwise(places):
        if place.node == before.node and place.namespaces != before.namespaces:
            raise UnsupportedError(
                f"expected the workers on {place.address} to see each other's processes and sockets, found them in several"
                " containers: start one Ray node for each machine or pod"
            )
        if (place.node, place.local_rank) not in ((before.node, before.local_rank + 1), (before.node + 1, 0)):
            raise UnsupportedError(
                "expected ranks that fill one machine after the other, found several Ray nodes that take turns on one address:"
                " start one Ray node for each machine"
            )


def variables_of(places: Sequence[Place], job: str, rendezvous: str = "") -> list[dict[str, str | None]]:
    """The environment variables of each worker, in the order of ranks; None removes one.

    `rendezvous` is HOST:PORT, where the agents of several nodes meet.

    >>> place = Place("a", "10.0.0.1", 0, 0, 1, ("", ""), "1", False)
    >>> variables_of([place], "j")[0]["FASTPS_WORKERS"]
    '1'
    """
    nodes = places[-1].node + 1
    return [
        {
            "FASTPS_RANK": str(rank),
            "FASTPS_WORKERS": str(len(places)),
            "FASTPS_JOB": job,
            "FASTPS_LOCAL_RANK": str(place.local_rank),
            "FASTPS_LOCAL_WORKERS": str(place.local_workers),
            "FASTPS_NNODES": str(nodes),
            "FASTPS_NODE_RANK": str(place.node),
            "FASTPS_RENDEZVOUS": rendezvous or None,
            "FASTPS_JOINS": None,
        }
        for rank, place in enumerate(places)
    ]


def _own_place() -> Place:
    context = ray.train.get_context()
    return Place(
        socket.gethostname(),
        ray.util.get_node_ip_address(),
        context.get_node_rank(),
        context.get_local_rank(),
        context.get_local_world_size(),
        (str(Path("/proc/self/ns/net").readlink()), str(Path("/proc/self/ns/pid").readlink())),
        __version__,
        torch.cuda.is_available(),
    )


def _keep_rendezvous(address: str) -> int:
    """Open the store in which the agents of all nodes meet, for as long as this process lives. Returns its port."""
    limit_name_lookups()
    _stores.append(host_store(address, 0, 300.0))
    return int(_stores[-1].port)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    limit_name_lookups()
    for name in variables:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in variables.items() if value is not None})


@contextmanager
def _closes_optimizers(device: Callable[[], AbstractContextManager[None]], sync: str | None) -> Iterator[None]:
    """Close the loop's optimizers at its end. If the loop fails, the other workers end with an error that quotes why.

    The loop has its discipline from here, because Ray's local mode, `num_workers=0`, starts no backend.
    """
    before = os.environ.get("FASTPS_SYNC")
    with device():
        try:
            if sync is not None:
                _set_variables({"FASTPS_SYNC": sync})
            yield
        except BaseException as error:
            exit_handlers.close_all(f"{type(error).__name__}: {error}")
            raise
        finally:
            _set_variables({"FASTPS_SYNC": before})
        exit_handlers.close_all()


def prepare_model(model: torch.nn.Module, move_to_device: bool | torch.device = True) -> torch.nn.Module:
    """Move a model to this worker's device, as Ray's own prepare_model does, and wrap it in nothing."""
    prepared: torch.nn.Module = _ray_prepare_model(model, move_to_device=move_to_device, parallel_strategy=None)
    return prepared


def prepare_data_loader(
    data_loader: "DataLoader[Any]", add_dist_sampler: bool = True, move_to_device: bool = True, auto_transfer: bool = True
) -> Any:
    """Give this worker its share of a loader's samples, and move them to its device, as Ray's own prepare_data_loader does.

    Ray's asks torch's process group for the rank, and this one asks Ray. Call `loader.sampler.set_epoch(epoch)` before each
    epoch of a loader that shuffles.

    Args:
        data_loader: a DataLoader with a batch size. If it has an IterableDataset or a DistributedSampler, it keeps its samples.
        add_dist_sampler: whether to take a share.
        move_to_device, auto_transfer: as in ray.train.torch.prepare_data_loader.

    Raises:
        UnsupportedError: The loader has a sampler of its own.
    """
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    keeps = isinstance(data_loader.dataset, IterableDataset) or isinstance(data_loader.sampler, DistributedSampler)
    if add_dist_sampler and workers > 1 and not keeps:
        data_loader = _shared_loader(data_loader, rank, workers)
    return _ray_prepare_data_loader(data_loader, False, move_to_device, auto_transfer)


def _shared_loader(loader: "DataLoader[Any]", rank: int, workers: int) -> "DataLoader[Any]":
    if loader.batch_size is None or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise UnsupportedError(
            "prepare_data_loader: expected a DataLoader with a batch size and shuffle=True or False, found one with"
            f" {'a batch_sampler' if loader.batch_size is None else type(loader.sampler).__name__}: take a DistributedSampler"
            " with Ray's rank and world size, or give add_dist_sampler=False"
        )
    shuffles = isinstance(loader.sampler, RandomSampler)
    names = (
        *("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn"),
        *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
    )
    kept = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, workers, rank, shuffle=shuffles)
    return DataLoader(loader.dataset, sampler=sampler, **kept)
