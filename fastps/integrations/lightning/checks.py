"""What a Trainer with FastpsStrategy cannot do is refused, in one sentence each, before anything has started."""

from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, DoublePrecision, FSDPPrecision, TransformerEnginePrecision

from fastps.errors import UnsupportedError, UsageError
from fastps.integrations import process_group
from fastps.integrations.lightning.launchers import FastpsEnvironment, is_launched
from fastps.job import environment
from fastps.job.nodes import nodes_of_environment
from fastps.job.options import value_of
from fastps.job.policy import Policy

_SHARDED = (DeepSpeedPrecision, FSDPPrecision, TransformerEnginePrecision)
_LATER = (
    "begin the run again from a checkpoint (trainer.fit(ckpt_path=...)), or write the loop by hand with a DistributedOptimizer"
)


def check_options(options: dict[str, Any]) -> None:
    """Raise UsageError for options that the strategy gives itself, or that a Trainer's barriers rule out."""
    own = sorted({"job", "rank", "workers", "model", "clock"} & set(options))
    if own:
        raise UsageError(
            f"FastpsStrategy({own[0]}=...): expected options of DistributedOptimizer that are alike in all workers, found"
            f" {own[0]!r}, which the strategy gives; leave it out"
        )


def check_faults(options: dict[str, Any]) -> None:
    """Raise UnsupportedError for jobs that go on without a lost worker, and for the replacement of one."""
    wanted = value_of("FASTPS_ON_WORKER_LOSS", options.get("on_worker_loss"))
    if wanted != "stop" or environment.joins():
        raise UnsupportedError(
            f"FastpsStrategy with on_worker_loss={wanted!r} (--on-worker-loss, --restarts): expected 'stop', because the"
            f" Trainer's barriers and metrics need every worker; {_LATER}"
        )


def check_nodes(count: int, sync: str | Policy | None) -> int:
    """The launcher's number of nodes, or 1. Raises UnsupportedError if they cannot train, UsageError if `count` differs."""
    nodes = nodes_of_environment()
    if nodes is None and count > 1:
        raise UnsupportedError(
            f"FastpsStrategy with num_nodes={count}: expected a launcher that has started the workers of all nodes, found none,"
            " and a Trainer starts workers on its own machine alone; run `fastps run --nnodes"
            f" {count} --rendezvous HOST:PORT` or torchrun on every node (docs/how-to/several-nodes.md)"
        )
    if nodes is None:
        return 1
    if nodes.count and count not in (1, nodes.count):
        raise UsageError(
            f"Trainer(num_nodes={count}) in a process that a launcher has started: expected num_nodes={nodes.count}, the"
            f" launcher's number of nodes, found {count}; leave num_nodes out"
        )
    process_group.check_launch(sync)
    return max(1, nodes.count)


def check_machine(accelerator: Any, devices: list[torch.device]) -> None:
    """Raise UnsupportedError for an accelerator other than the CPU."""
    if not isinstance(accelerator, CPUAccelerator) or any(device.type != "cpu" for device in devices):
        raise UnsupportedError(
            "FastpsStrategy trains on the CPU: expected Trainer(accelerator='cpu'), found"
            f" {type(accelerator).__name__}; on GPUs use a DistributedOptimizer in a loop of your own (docs/how-to/gpu.md), or"
            " Lightning's strategy='ddp'"
        )


def check_plugins(precision: Any, layer_sync: Any) -> None:
    """Raise UnsupportedError for precisions that the fold does not have, and for layers that meet in every forward."""
    if isinstance(precision, DoublePrecision):
        raise UnsupportedError(
            "precision='64-true': expected parameters in float32, bfloat16 or float16, found float64, in which fastps does not"
            " fold; take '32-true', 'bf16-true', '16-true' or 'bf16-mixed'"
        )
    if isinstance(precision, _SHARDED):
        raise UnsupportedError(
            f"FastpsStrategy with {type(precision).__name__}: expected a precision of whole parameters on the CPU, found one of"
            " another strategy or of GPUs; take precision='bf16-mixed' or 'bf16-true'"
        )
    if layer_sync is not None:
        raise UnsupportedError(
            "sync_batchnorm=True: expected layers that compute in one process, found ones that wait for all workers in every"
            " forward, and that torch has on GPUs alone; leave it out: fastps averages BatchNorm's statistics before each"
            " validation, checkpoint and at the end"
        )


def check_workers(cluster: Any, devices: list[torch.device]) -> int:
    """The number of workers on this node: the launcher's, else that of the devices. Raises UsageError if they differ."""
    count = len(devices)
    if not isinstance(cluster, FastpsEnvironment) or not is_launched():
        return count
    workers = cluster.local_world_size()
    if count not in (1, workers):
        raise UsageError(
            f"Trainer(devices={count}) in a process that a launcher has started: expected devices={workers}, the launcher's"
            f" number of workers here, found {count}; leave devices out, or start the script without a launcher"
        )
    return workers


def check_callbacks(trainer: Any, module: torch.nn.Module) -> None:
    """Raise UnsupportedError for callbacks that write into the weights while other workers train with them."""
    averages = any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks)
    if averages and any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        raise UnsupportedError(
            "StochasticWeightAveraging with BatchNorm layers: expected weights that only step() changes, found a callback that"
            ' writes the average into them for an epoch of its own; take WeightAveraging or EMAWeightAveraging, or sync="...,'
            ' ema=DECAY"'
        )
