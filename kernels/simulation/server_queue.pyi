import numpy as np
import numpy.typing as npt

from fastps.kernels.simulation.network import Network

class ServerQueue:
    n_stations: int
    def __init__(self, times_ns: npt.NDArray[np.float64], network: Network, workers: int, groups: int) -> None: ...
    def use(self, station: int, until_ns: int) -> dict[str, float]: ...
