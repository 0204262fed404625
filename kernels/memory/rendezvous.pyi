from typing import Self

PREFIX_BYTES: int
OFFER_BYTES: int
NAME_BYTES: int
MAX_LAYOUT_BYTES: int
OK: int
ABI_DIFFERS: int
LAYOUT_DIFFERS: int
BAD_HELLO: int
REFUSED: int

class Listener:
    def __init__(
        self,
        name: bytes,
        memfd: int,
        pidfd: int,
        abi: int,
        layout_hash: bytes,
        layout: bytes,
        place: int,
        user: int,
    ) -> None: ...
    def close(self) -> None: ...
    def foreign_layout(self) -> str | None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

def pack_hello(abi: int, layout_hash: bytes, layout_length: int, observer: bool) -> bytes: ...
def abi_of(data: bytes) -> int | None: ...
def unpack_offer(data: bytes) -> tuple[int, int, int]: ...
