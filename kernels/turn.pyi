from fastps.kernels.arena import Arena

DONE: int
BUSY: int
LOST: int
BAD_DESCRIPTOR: int
NO_BUFFER: int
BAD_FOLD: int
KIND_PUSH: int
KIND_NULL: int
KIND_LEAVE: int

class Lane:
    arena: Arena
    index: int
    bad_lane: int
    version: int
    def __init__(self, arena: Arena, index: int) -> None: ...
    def set_hyper(
        self,
        slot: int,
        group: int,
        learning_rate: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        learning_rate_decay: float,
        flags: int,
    ) -> None: ...
    def set_presence(self, slot: int, words: bytes) -> None: ...
    def post(
        self,
        kind: int,
        step: int,
        slot: int,
        read_version: int,
        post_ns: int,
        scale: float = 1.0,
        loss: float = ...,
        samples: int = 0,
    ) -> bool: ...
    def posted(self) -> int: ...
    def done(self) -> int: ...
    def granted(self) -> int: ...
    def wait(self, granted: int, done: int, spins: int, slice_ns: int) -> bool: ...
    def pull(self) -> int: ...
    def unpin(self) -> None: ...
    def count(self, steps: int, wait_ns: int, compute_ns: int, samples: int, loss: float) -> None: ...
    def try_turn(self) -> int: ...
    def owner(self) -> int: ...
    def break_turn(self, dead_lane: int) -> int: ...
    def hold(self) -> bool: ...
    def spare(self) -> tuple[int, int]: ...
    def release(self, publish: bool) -> int: ...
