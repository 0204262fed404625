"""The name "fastps" for torch.distributed. torch calls `register` when it is imported: an entry point of pyproject.toml names it.

The file is small because every program that imports torch loads it. What a group needs is imported when one is made.
"""

from typing import Any


def register() -> None:
    """Make `torch.distributed.init_process_group("fastps")` known. May be called twice, and does nothing without torch.distributed.

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
