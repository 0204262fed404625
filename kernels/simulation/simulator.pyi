from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.kernels.simulation.compute_time import ComputeTimes
from fastps.kernels.simulation.network import Network
from fastps.kernels.simulation.server_queue import ServerQueue

KINDS: tuple[str, ...]

class Simulator:
    network: Network
    server_queue: ServerQueue
    n_workers: int
    n_shards: int
    now_ns: int
    ended_ns: int
    events: int
    received: int
    samples: int
    asked: int
    def __init__(
        self,
        values: dict[str, Any],
        compute: ComputeTimes,
        network: Network,
        link_of: npt.NDArray[np.int32],
        *,
        shards: int = 1,
        shard_bytes: float = 0.0,
        needed: int = 0,
        pull_timeout_ns: int = -1,
        slots: int = 2,
        overlap: bool = False,
        batch: int = 1,
        steps: int = 1,
        leave: bool = False,
        asks: bool = False,
        trace: bool = False,
        service_ns: npt.NDArray[np.float64] | None = None,
        cores: float = 0.0,
        slice_ns: int = 1,
        hop_ns: int = -1,
        changes: npt.NDArray[np.int64] = ...,
    ) -> None: ...
    def run(self, events: int) -> bool: ...
    def tell(self, samples: int, leaves: bool = False) -> None: ...
    def totals(self) -> dict[str, int]: ...
    def shard_totals(self, shard: int) -> dict[str, Any]: ...
    def staleness_counts(self) -> list[tuple[int, int]]: ...
    def trace(self, forget: bool = False) -> bytes: ...
