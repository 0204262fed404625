from typing import Any, TypedDict

ABI: int
MAX_LANES: int
MAX_BUFFERS: int
LINE_FLOATS: int
LANE_FREE: int
LANE_LIVE: int
LANE_LEFT: int
LANE_FAILED: int

class Counters(TypedDict):
    posted: int
    done: int
    steps: int
    wait_ns: int
    compute_ns: int
    samples: int
    folded: int
    dropped: int
    staleness_sum: int
    staleness_max: int
    loss: float

def plan(
    *,
    lanes: int,
    slots: int,
    ring_size: int,
    groups: int,
    parameters: int,
    buffer_floats: int,
    rule: int,
    state_planes: int,
    extra_bytes: int,
    buffers: int,
) -> tuple[bytes, int]: ...
def format_memory(
    memory: Any,
    header_bytes: bytes,
    segments: list[tuple[int, int, int]],
    *,
    fold: str,
    grant: str,
    low: int,
    high: int,
    release: str,
    hard_bound: bool,
) -> None: ...

class Arena:
    def __init__(self, memory: Any) -> None: ...
    def weights_offset(self, buffer: int) -> int: ...
    def gradient_offset(self, lane: int, slot: int) -> int: ...
    def steps_offset(self, buffer: int) -> int: ...
    def plane_offset(self, buffer: int, plane: int) -> int: ...
    def extra_offset(self, lane: int) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def buffers(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def buffer_floats(self) -> int: ...
    @property
    def state_planes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def version(self) -> int: ...
    def committed(self) -> tuple[int, int, int]: ...
    def pins(self) -> list[int]: ...
    def claim(self, lane: int, process_id: int) -> bool: ...
    def finish(self, lane: int, failure: str | None = None) -> None: ...
    def lane_state(self, lane: int) -> int: ...
    def lane_states(self) -> bytes: ...
    def failure(self, lane: int) -> str: ...
    def process_id(self, lane: int) -> int: ...
    def counters(self, lane: int) -> Counters: ...
