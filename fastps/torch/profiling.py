"""The parts of a step as ranges of torch.profiler: fastps::push, fastps::fold, fastps::wait and fastps::pull.

While a profiler runs, a step replaces the methods that do these parts by ones that open a range around them. A step without a
profiler only reads torch's flag that says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.profiler import record_function

from fastps.store.worker import Worker

OF_WORKER = {"push": "fastps::push", "try_combine": "fastps::fold", "advance": "fastps::wait"}
OF_JOB = {"take_weights": "fastps::pull"}


@contextmanager
def ranges(worker: Worker, job: object) -> Iterator[None]:
    """Within it, what the worker and its attachment do are ranges: a push with the fold in it, the wait, and the pull.

    A wait has a fold for each time that the worker tries to fold meanwhile. A try that finds nothing to fold is short.
    """
    replaced = [(worker, *item) for item in OF_WORKER.items()] + [(job, *item) for item in OF_JOB.items()]
    worker.fold_apart(True)
    try:
        for owner, method, name in replaced:
            setattr(owner, method, _in_range(getattr(owner, method), name))
        yield
    finally:
        for owner, method, _ in replaced:
            owner.__dict__.pop(method, None)
        worker.fold_apart(False)


def _in_range(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def ranged(*arguments: Any, **named: Any) -> Any:
        with record_function(name):
            return method(*arguments, **named)

    return ranged
