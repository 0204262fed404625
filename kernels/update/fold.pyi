from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_Push: TypeAlias = (
    tuple[Any, Sequence[tuple[float, ...]], Sequence[bool], float]
    | tuple[Any, Sequence[tuple[float, ...]], Sequence[bool], float, float]
)

RULES: dict[str, int]  # the number of each rule of kernels/update/rules.h, also as RULE_ and its name
MOST_PLANES: dict[int, int]
RULE_SGD: int
RULE_ADAM: int
RULE_ADAGRAD: int
RULE_RMSPROP: int
RULE_NADAM: int
RULE_RADAM: int
RULE_ADAMAX: int
RULE_ADADELTA: int
RULE_USER: int
RULE_SUMMING: int
FOLD_SUM: int
FOLD_EACH: int
FLOAT32: int
FLOAT16: int
BFLOAT16: int
FLOAT64: int
HYPER_NESTEROV: int
HYPER_MAXIMIZE: int
HYPER_DECOUPLED: int
HYPER_CENTERED: int
HYPER_AMSGRAD: int
HYPER_DOUBLE_PRODUCT: int
MAX_PUSHES: int
MAX_USER_PLANES: int
MAX_SUMS: int
TILE: int

CHOSEN_ISA: int  # the number of the instruction set that the folds use

def instruction_sets() -> list[str]: ...
def narrow(
    weights: npt.NDArray[np.float32], halves: npt.NDArray[np.uint16], shown_type: int, *, instruction_set: str | None = None
) -> None: ...
def planes_needed(rule: int, hyper: tuple[float, ...]) -> int: ...
def mu_product(beta1: float, decay: float, steps: int, is_double: bool = False) -> float: ...

class Folding:
    def __init__(
        self,
        rule: int,
        mode: int,
        segments: list[tuple[int, int, int]],
        pushes: Sequence[_Push],
        weights: npt.NDArray[np.float32],
        state: npt.NDArray[np.float32],
        steps: npt.NDArray[np.int64],
        weights_out: npt.NDArray[np.float32],
        state_out: npt.NDArray[np.float32],
        steps_out: npt.NDArray[np.int64],
        *,
        scale: float = 1.0,
        rate_scale: float = 1.0,
        ema_plane: int = -1,
        ema_decay: float = 0.0,
        user_rule: int = 0,
        gradient_type: int = ...,
        shown_type: int = ...,
        halves_out: npt.NDArray[np.uint16] | None = None,
        streaming: bool = False,
        instruction_set: str = "auto",
    ) -> None: ...
    def run(self, first: int, last: int, times: int = 1) -> None: ...

def fold(
    rule: int,
    mode: int,
    segments: list[tuple[int, int, int]],
    pushes: Sequence[_Push],
    weights: npt.NDArray[np.float32],
    state: npt.NDArray[np.float32],
    steps: npt.NDArray[np.int64],
    *,
    ranges: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]: ...
