FLOAT32: int
FLOAT16: int
BFLOAT16: int
TILE_BYTES: int
COEFFICIENTS_BYTES: int
CLASS_BYTES: int
ENTRY_BYTES: int
ARGS_BYTES: int
CHECK_ARGS_BYTES: int

def launch(rule: int, dtype: int, args: int, tiles: int, blocks: int, threads: int = 256) -> None: ...
def launch_check(dtype: int, args: int, tiles: int, blocks: int, threads: int = 256) -> None: ...
