"""The name "fastps" for torch.distributed. An entry point of pyproject.toml lets torch call `register` when it is imported.

The file is small because every program that imports torch loads it. What a group needs is imported when one is made.
"""

from typing import Any


def register() -> None:
    """Make the backend known to `torch.distributed.init_process_group`. May be called twice; does nothing without it.

    >>> import torch.distributed
    >>> register()
    >>> torch.distributed.is_backend_available("fastps")
    True
    """
    import torch.distributed as distributed

    if distributed.is_available() and "fastps" not in distributed.Backend.backend_list:
        distributed.Backend.register_backend("fastps", _create, devices=["cpu"])


def _create(*arguments: Any) -> Any:
    from fastps.collectives import process_group

    return process_group.create(*arguments)
