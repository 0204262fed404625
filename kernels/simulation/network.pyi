import numpy as np
import numpy.typing as npt

class Network:
    n_links: int
    def __init__(
        self,
        bandwidth: npt.NDArray[np.float64],
        latency_ns: npt.NDArray[np.int64],
        *,
        most: float | npt.NDArray[np.float64] = 0.0,
        late_pushes: tuple[float, int] = (0.0, 0),
        late_pulls: tuple[float, int] = (0.0, 0),
        half_duplex: bool = False,
        seed: int = 0,
    ) -> None: ...
    def use(self, port: int, duration_ns: int) -> dict[str, float]: ...
