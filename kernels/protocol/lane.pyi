from fastps.kernels.protocol.shard_locks import ShardLocks
from fastps.kernels.shm.arena import Arena

DONE: int
BUSY: int
AWAITING: int
FENCED: int
BAD_DESCRIPTOR: int
NO_BUFFER: int
BAD_FOLD: int
BAD_STATE: int
UNSERVED: int
KIND_PUSH: int
KIND_NULL: int
KIND_LEAVE: int

class Lane(ShardLocks):
    weight: int
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
    def set_versions(self, slot: int) -> None: ...
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
    def is_expelled(self) -> bool: ...
    served: bool
    def leave_to_server(self, served: bool) -> None: ...
    def event(self) -> int: ...
    def sleep(self, seen: int, slice_ns: int) -> None: ...
    def begin_steps(self) -> int: ...
    def granted(self, shard: int = 0) -> int: ...
    def batch(self) -> int: ...
    def due_ns(self) -> int: ...
    def wait(self, granted: int, done: int, spins: int, slice_ns: int, shards: int = 0) -> bool: ...
    def wait_awake(self, granted: int, done: int, polls: int, shards: int = 0) -> bool: ...
