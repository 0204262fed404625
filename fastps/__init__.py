"""fastps, the embedded parameter server for PyTorch: it is to a parameter server as SQLite is to a database server.

Several processes on one machine train one model. One shared-memory arena holds all state, and waiting workers do the server's
work. Three lines change a training loop:

    import fastps
    opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="dssp:3,15")
    loader = fastps.shard(loader)
    ...
    opt.close()

A public name imports its module when it is first used. The stub beside this module is the list of them, which type checkers
and editors read, too. The disciplines are not listed: their module's `__all__` names them.
"""

import importlib as _importlib
from pkgutil import get_data as _get_data
from typing import Any as _Any

from fastps import errors as _errors
from fastps.version import __version__ as __version__

_LINES = [line.split() for line in (_get_data(__name__, "__init__.pyi") or b"").decode().splitlines()]
_MODULE_OF = {words[3]: words[1] for words in _LINES if words[4:5] == ["as"]}  # from MODULE import NAME as NAME
_DISCIPLINES = "fastps.job.disciplines"
_OF_A_STORE = "fastps.job.update_rules"  # SGD and the others: rules of a job without torch, and no optimizers


def _discipline_names() -> list[str]:
    return _importlib.import_module(_DISCIPLINES).__all__  # type: ignore[no-any-return]


def __getattr__(name: str) -> _Any:
    value: _Any
    if name == "__all__":
        value = sorted([*_MODULE_OF, *_discipline_names()])
    else:
        module = _MODULE_OF.get(name)
        if module is None and not name.startswith("_") and name in _discipline_names():
            module = _DISCIPLINES
        if module is None:
            raise AttributeError(f"module 'fastps' has no attribute {name!r}")
        with _errors.naming_isa():
            value = getattr(_importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What a script needs: the public names, but for those of a store without torch."""
    return sorted({"__doc__", *_discipline_names(), *(name for name, module in _MODULE_OF.items() if module != _OF_A_STORE)})
