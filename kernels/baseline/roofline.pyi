from typing import Any

import numpy as np
import numpy.typing as npt

LINE: int

class Loop:
    def __init__(
        self,
        gradients: list[npt.NDArray[np.float32]],
        weights: npt.NDArray[np.float32],
        state: npt.NDArray[np.float32],
        weights_out: npt.NDArray[np.float32],
        state_out: npt.NDArray[np.float32],
        *,
        learning_rate: float,
        momentum: float,
        beta2: float = 0.0,
        epsilon: float = 0.0,
    ) -> None: ...
    def run(self, first: int, last: int, streaming: bool, times: int = 1, back: Loop | None = None) -> None: ...

def spin(memory: Any, first: bool, count: int, polls: int = ...) -> None: ...
def update_rows(
    table: npt.NDArray[np.float32], numbers: npt.NDArray[np.int64], values: npt.NDArray[np.float32], learning_rate: float
) -> None: ...
