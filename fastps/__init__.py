"""fastps, the embedded parameter server for PyTorch: what SQLite is to a database server, fastps is to a parameter server.

Several processes on one machine train one model; all state lives in one shared-memory arena; whoever has to wait does the
server's work. Two lines change a training loop:

    import fastps
    opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="dssp:3,15")

This module is the public list and nothing else. What needs torch is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from fastps.disciplines import ASP, BSP, DSSP, PSP, R2SP, SSP, BackupWorkers, HardSync, RudraAdv, RudraAdvStar, SoftSync
from fastps.environment import rank, world_size
from fastps.errors import (
    ArenaError,
    AttachError,
    Error,
    LayoutError,
    ParameterChangedError,
    PolicyError,
    ProtocolError,
    TimeoutExceededError,
    UnsupportedError,
    UsageError,
    WorkerDiedError,
)
from fastps.policy import Policy
from fastps.rules import SGD, Adam
from fastps.specs import parse_policies, parse_policy
from fastps.statistics import Look, Observer, ShardStatistics, WorkerStatistics, observe
from fastps.store import Store
from fastps.version import __version__
from fastps.worker import Worker

if TYPE_CHECKING:
    from fastps.torch import DistributedOptimizer

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "PSP",
    "R2SP",
    "SGD",
    "SSP",
    "Adam",
    "ArenaError",
    "AttachError",
    "BackupWorkers",
    "DistributedOptimizer",
    "Error",
    "HardSync",
    "LayoutError",
    "Look",
    "Observer",
    "ParameterChangedError",
    "Policy",
    "PolicyError",
    "ProtocolError",
    "RudraAdv",
    "RudraAdvStar",
    "ShardStatistics",
    "SoftSync",
    "Store",
    "TimeoutExceededError",
    "UnsupportedError",
    "UsageError",
    "Worker",
    "WorkerDiedError",
    "WorkerStatistics",
    "__version__",
    "observe",
    "parse_policies",
    "parse_policy",
    "rank",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name == "DistributedOptimizer":
        from fastps.torch import DistributedOptimizer

        return DistributedOptimizer
    raise AttributeError(f"module 'fastps' has no attribute {name!r}")
