"""What a function is told that folds in place of the core: on a device, or on another node."""

from typing import NamedTuple


class FoldedPush(NamedTuple):
    """One push of a fold: its slot, the factors of its gradient and of its learning rate, and its batch size."""

    lane: int
    slot: int
    scale: float
    rate_scale: float
    samples: int


class FoldCall(NamedTuple):
    """One fold: `mode` (FOLD_SUM or FOLD_EACH), the factors of the sum, the buffers to read and to write, and the pushes."""

    shard: int
    mode: int
    scale: float
    rate_scale: float
    weights_in: int
    weights_out: int
    state_in: int
    state_out: int
    pushes: list[FoldedPush]
