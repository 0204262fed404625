from typing import Any

FLOAT32: int
FLOAT16: int
BFLOAT16: int
TILE_BYTES: int
COEFFICIENTS_BYTES: int
CLASS_BYTES: int
ENTRY_BYTES: int
ARGS_BYTES: int
CHECK_ARGS_BYTES: int
COPY_ARGS_BYTES: int
ARGUMENT_BYTES: int
COPY_RUNS: int

def coefficients_of(rule: int, hyper: tuple[float, ...], learning_rate: float, scale: float, steps: int) -> bytes: ...
def launch(kernel: str, argument: Any, blocks: int, threads: int = 256) -> None: ...
