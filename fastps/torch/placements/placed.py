"""The choice of a model's placement, by the devices of its parameters and the launcher's variables."""

import torch

from fastps.device.placement import check_own_gpu, placement
from fastps.errors import UnsupportedError
from fastps.job import limits
from fastps.job.nodes import nodes_of_environment
from fastps.torch.placements.host import HostPlacement


def placed(tensors: list[torch.Tensor], push_dtype: torch.dtype, *, is_told: bool = False) -> HostPlacement:
    """The placement of a model. Raises UnsupportedError if its parameters are on several devices.

    `is_told`: whether the script gives the number of workers. The launcher's nodes then do not count.
    """
    nodes = None if is_told else nodes_of_environment()
    if nodes is not None:
        from fastps.network.meeting import join_meeting
        from fastps.torch.placements.on_nodes import NodePlacement

        return NodePlacement(tensors, push_dtype, join_meeting(nodes, limits.timeout_s(None)))
    devices = {tensor.device for tensor in tensors}
    if all(device.type != "cuda" for device in devices):
        return HostPlacement(tensors, push_dtype)
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        raise UnsupportedError(
            "a model on a GPU: expected float32, bfloat16 or float16 parameters, found float64; keep the model on the CPU, or"
            " use model.float()"
        )
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise UnsupportedError(f"expected all parameters of a worker on one device, found {names}: use a GPU a worker")
    check_own_gpu(tensors[0].device.index or 0)
    # Imported here, because a model on the CPU needs neither module.
    if placement() == "device":
        from fastps.torch.placements.on_device import DevicePlacement

        return DevicePlacement(tensors, push_dtype)
    from fastps.torch.placements.staged import StagedPlacement

    return StagedPlacement(tensors, push_dtype)
