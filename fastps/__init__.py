"""fastps, the embedded parameter server for PyTorch: it is to a parameter server as SQLite is to a database server.

Several processes on one machine train one model. One shared-memory arena holds all state, and waiting workers do the server's
work. Two lines change a training loop:

    import fastps
    opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="dssp:3,15")

This module is the public list and nothing else. A public name imports its module when it is first used. Type checkers and
editors read the same names in the stub beside it. The disciplines are not listed: their module's `__all__` names them.
"""

import importlib
from typing import Any

from fastps import errors
from fastps.version import __version__ as __version__

_NAMES_OF = {
    errors.__name__: "ArenaError AttachError CheckpointError Error ExpelledError LayoutError NodeLostError"
    " NonFiniteGradientError NonFiniteWeightsError ParameterChangedError PolicyError ProtocolError TimeoutExceededError"
    " UnsupportedError UsageError WorkerDiedError",
    "fastps.checkpoint.format": "Checkpoint",
    "fastps.checkpoint.loading": "load",
    "fastps.checkpoint.snapshot": "save",
    "fastps.job.environment": "rank world_size",
    "fastps.job.policy": "Policy",
    "fastps.job.specs": "parse_policies parse_policy",
    "fastps.job.update_rules": "Adadelta Adagrad Adam Adamax NAdam RAdam RMSProp RowWiseAdagrad SGD SparseAdam",
    "fastps.job.user_rules": "UserRule rule",
    "fastps.membership.node_board": "NodeStatistics",
    "fastps.processes.spawn": "spawn",
    "fastps.store.observer": "Look Observer ShardStatistics WorkerStatistics observe",
    "fastps.store.store": "Store",
    "fastps.store.worker": "Worker",
    "fastps.torch.checkpoint": "optimizer_state_dict",
    "fastps.torch.foreign": "push_hook",
    "fastps.torch.optimizer": "DistributedOptimizer",
    "fastps.torch.own_optimizers": "RowWiseAdagradOptimizer RuleOptimizer",
    "fastps.torch.reader": "Reader reader",
    "fastps.torch.sampler": "BatchSampler",
    "fastps.torch.schedules": "GlobalStepLR exponential_decay",
    "fastps.tracing.recorder": "trace",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_DISCIPLINES = "fastps.job.disciplines"


def _discipline_names() -> list[str]:
    return importlib.import_module(_DISCIPLINES).__all__  # type: ignore[no-any-return]


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__all__":
        value = sorted([*_MODULE_OF, *_discipline_names(), "__version__"])
    else:
        module = _MODULE_OF.get(name)
        if module is None and not name.startswith("_") and name in _discipline_names():
            module = _DISCIPLINES
        if module is None:
            raise AttributeError(f"module 'fastps' has no attribute {name!r}")
        with errors.naming_isa():
            value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_discipline_names()})
