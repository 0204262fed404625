import numpy as np
import numpy.typing as npt

def update_rows(
    table: npt.NDArray[np.float32], numbers: npt.NDArray[np.int64], values: npt.NDArray[np.float32], learning_rate: float
) -> None: ...
