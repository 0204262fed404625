"""fastps, the embedded parameter server for PyTorch: it is to a parameter server as SQLite is to a database server.

Several processes on one machine train one model. One shared-memory arena holds all state, and waiting workers do the server's
work. Two lines change a training loop:

    import fastps
    opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="dssp:3,15")

This module is the public list and nothing else. A public name imports its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fastps.errors import (
    ArenaError,
    AttachError,
    CheckpointError,
    Error,
    LayoutError,
    NonFiniteGradientError,
    ParameterChangedError,
    PolicyError,
    ProtocolError,
    TimeoutExceededError,
    UnsupportedError,
    UsageError,
    WorkerDiedError,
)
from fastps.version import __version__

if TYPE_CHECKING:
    from fastps.checkpoint.format import Checkpoint, load
    from fastps.checkpoint.snapshot import save
    from fastps.job.disciplines import ASP, BSP, DSSP, PSP, R2SP, SSP, BackupWorkers, HardSync, RudraAdv, RudraAdvStar, SoftSync
    from fastps.job.environment import rank, world_size
    from fastps.job.policy import Policy
    from fastps.job.specs import parse_policies, parse_policy
    from fastps.job.update_rules import SGD, Adagrad, Adam, RMSProp
    from fastps.job.user_rules import UserRule, rule
    from fastps.processes.spawn import spawn
    from fastps.store.observer import Look, Observer, ShardStatistics, WorkerStatistics, observe
    from fastps.store.store import Store
    from fastps.store.worker import Worker
    from fastps.torch.checkpoint import optimizer_state_dict
    from fastps.torch.optimizer import DistributedOptimizer
    from fastps.torch.rule_optimizer import RuleOptimizer
    from fastps.torch.sampler import BatchSampler
    from fastps.torch.schedules import GlobalStepLR, exponential_decay
    from fastps.tracing.recorder import trace

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "PSP",
    "R2SP",
    "SGD",
    "SSP",
    "Adagrad",
    "Adam",
    "ArenaError",
    "AttachError",
    "BackupWorkers",
    "BatchSampler",
    "Checkpoint",
    "CheckpointError",
    "DistributedOptimizer",
    "Error",
    "GlobalStepLR",
    "HardSync",
    "LayoutError",
    "Look",
    "NonFiniteGradientError",
    "Observer",
    "ParameterChangedError",
    "Policy",
    "PolicyError",
    "ProtocolError",
    "RMSProp",
    "RudraAdv",
    "RudraAdvStar",
    "RuleOptimizer",
    "ShardStatistics",
    "SoftSync",
    "Store",
    "TimeoutExceededError",
    "UnsupportedError",
    "UsageError",
    "UserRule",
    "Worker",
    "WorkerDiedError",
    "WorkerStatistics",
    "__version__",
    "exponential_decay",
    "load",
    "observe",
    "optimizer_state_dict",
    "parse_policies",
    "parse_policy",
    "rank",
    "rule",
    "save",
    "spawn",
    "trace",
    "world_size",
]

_NAMES_OF = {
    "fastps.checkpoint.format": ("Checkpoint", "load"),
    "fastps.checkpoint.snapshot": ("save",),
    "fastps.job.disciplines": (
        "ASP",
        "BSP",
        "BackupWorkers",
        "DSSP",
        "HardSync",
        "PSP",
        "R2SP",
        "RudraAdv",
        "RudraAdvStar",
        "SSP",
        "SoftSync",
    ),
    "fastps.job.environment": ("rank", "world_size"),
    "fastps.job.policy": ("Policy",),
    "fastps.job.specs": ("parse_policies", "parse_policy"),
    "fastps.job.update_rules": ("Adagrad", "Adam", "RMSProp", "SGD"),
    "fastps.job.user_rules": ("UserRule", "rule"),
    "fastps.processes.spawn": ("spawn",),
    "fastps.store.observer": ("Look", "Observer", "ShardStatistics", "WorkerStatistics", "observe"),
    "fastps.store.store": ("Store",),
    "fastps.store.worker": ("Worker",),
    "fastps.torch.checkpoint": ("optimizer_state_dict",),
    "fastps.torch.optimizer": ("DistributedOptimizer",),
    "fastps.torch.rule_optimizer": ("RuleOptimizer",),
    "fastps.torch.sampler": ("BatchSampler",),
    "fastps.torch.schedules": ("GlobalStepLR", "exponential_decay"),
    "fastps.tracing.recorder": ("trace",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'fastps' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
