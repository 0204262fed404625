from collections.abc import Sequence
from typing import Any

ELEMENTS: dict[str, int]
REDUCTIONS: dict[str, int]
KINDS: dict[str, int]
MAX_RANKS: int
MAX_DEPTH: int
LIVE: int
FAILED: int
LEFT: int
DONE: int
WAITING: int
DIFFERS: int
NO_REDUCTION: int
SMALL_BYTES: int
PIECES: int
STREAMED_BYTES: int
LEAST_PIECE: int

def can_reduce(element: int, reduction: int) -> bool: ...
def memory_bytes(size: int, depth: int, block_bytes: int) -> int: ...
def reduce_arrays(
    element: int,
    reduction: int,
    addresses: Sequence[int],
    elements: int,
    out: int,
    second: int = 0,
    isa: int | None = None,
) -> None: ...
def described(what: int, bytes: int) -> str: ...

class Exchange:
    def __init__(
        self, memory: Any, rank: int, size: int, block_bytes: int, depth: int, spins: int = 0, yields: int = 0
    ) -> None: ...
    def start(
        self, kind: int, element: int, reduction: int, root: int, bytes: int, inputs: Sequence[int], outputs: Sequence[int]
    ) -> None: ...
    def set_streams(self, streams: bool) -> None: ...
    def advance(self, slice_ns: int, first: bool = False) -> int: ...
    @property
    def other(self) -> int: ...
    def own_words(self) -> tuple[int, int]: ...
    def words_of(self, rank: int) -> tuple[int, int]: ...
    def state_of(self, rank: int) -> tuple[int, int, str, bool]: ...
    def fail(self, message: str) -> None: ...
    def leave(self) -> None: ...
