import numpy as np
import numpy.typing as npt

LONGEST_NS: int

class ComputeTimes:
    def __init__(
        self,
        kind: str,
        location_ns: float,
        spread: float,
        factors: npt.NDArray[np.float64],
        seed: int,
        *,
        bursts: tuple[float, float, float] | None = None,
        replay: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,
        blocked: npt.NDArray[np.int64] | None = None,
    ) -> None: ...
    def draw(self, worker: int, now_ns: int = 0) -> int: ...

def random_word(key: int, counter: int) -> int: ...
def uniform(key: int, counter: int) -> float: ...
def logarithm(x: float) -> float: ...
def exponential(x: float) -> float: ...
def normal_quantile(p: float) -> float: ...
