"""fastps, the embedded parameter server for PyTorch: what SQLite is to a database server, fastps is to a parameter server.

Several processes on one machine train one model; all state lives in one shared-memory arena; whoever has to wait does the
server's work. Two lines change a training loop:

    import fastps
    opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="dssp:3,15")

This module is the public list and nothing else. What needs torch is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fastps.checkpoint import Checkpoint, load, save
from fastps.disciplines import ASP, BSP, DSSP, PSP, R2SP, SSP, BackupWorkers, HardSync, RudraAdv, RudraAdvStar, SoftSync
from fastps.environment import rank, world_size
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
from fastps.policy import Policy
from fastps.recording import trace
from fastps.rules import SGD, Adagrad, Adam, RMSProp
from fastps.spawned import spawn
from fastps.specs import parse_policies, parse_policy
from fastps.statistics import Look, Observer, ShardStatistics, WorkerStatistics, observe
from fastps.store import Store
from fastps.user_rules import UserRule, rule
from fastps.version import __version__
from fastps.worker import Worker

if TYPE_CHECKING:
    from fastps.rule_optimizer import RuleOptimizer
    from fastps.sampler import BatchSampler
    from fastps.schedules import GlobalStepLR, exponential_decay
    from fastps.torch import DistributedOptimizer

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
    "parse_policies",
    "parse_policy",
    "rank",
    "rule",
    "save",
    "spawn",
    "trace",
    "world_size",
]


_NEED_TORCH = {
    "BatchSampler": "fastps.sampler",
    "DistributedOptimizer": "fastps.torch",
    "GlobalStepLR": "fastps.schedules",
    "RuleOptimizer": "fastps.rule_optimizer",
    "exponential_decay": "fastps.schedules",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'fastps' has no attribute {name!r}")
