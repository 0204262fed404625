from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import Arena

FULL: int
EARLY: int
EXPELLED: int

class WorkerLane(Lane):
    steps: int
    earlier_steps: int
    posts: int
    slot: int
    awaits: bool
    granted_ns: int
    wait_ns: int
    compute_ns: int
    push_ns: int
    pushed_ns: int
    samples: int
    stale_blocks: int
    loss: float
    def __init__(self, arena: Arena, index: int) -> None: ...
    @property
    def slot_free_at(self) -> int: ...
    def push(self, now_ns: int, scale: float, samples: int, null: bool) -> int: ...
    def begin_push(self, now_ns: int, samples: int, null: bool) -> tuple[int, int, int]: ...
    def advance(self, now_ns: int, at_once: bool) -> bool: ...
    def choose_slot(self) -> bool: ...
    def advance_late(self, now_ns: int) -> None: ...
    def publish(self) -> None: ...
