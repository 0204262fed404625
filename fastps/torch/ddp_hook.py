"""A communication hook for DistributedDataParallel that leaves the sum over processes to the store.

DDP calls a hook with each bucket of gradients. This one gives the bucket back as it is, so no process averages anything, and
each worker's own gradient reaches its slot through the optimizer's hooks. It knows no optimizer: the optimizer finds the
wrapper.
"""

from typing import Any

import torch


# Torch refuses a hook whose annotations are others than these. Its stubs do not have the class.
def push_hook(
    state: Any,
    bucket: torch.distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Let DDP average nothing, so that each worker pushes its own gradient. Register it before the optimizer is wrapped.

    `opt.step()` of the DistributedOptimizer then pushes it to the store, under any discipline. `state` is not used. All
    parameters that DDP synchronizes must be the optimizer's, and `broadcast_buffers` must be False if the model has buffers;
    the constructor of DistributedOptimizer raises UnsupportedError otherwise.

    Example::

        ddp_model = DistributedDataParallel(model)
        ddp_model.register_comm_hook(None, fastps.push_hook)
        opt = fastps.DistributedOptimizer(torch.optim.SGD(ddp_model.parameters(), lr=0.1), sync="asp")
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def pushes(wrapper: torch.nn.Module) -> bool:
    """Whether this hook is registered with a DDP wrapper. `_comm_hooks` is where torch keeps hooks; it has no public name."""
    return any(hook is push_hook for hook, _ in getattr(wrapper, "_comm_hooks", ()))
