from typing import Any

SIZES: dict[str, int]
OFFSETS: dict[str, int]

def header_of(memory: Any) -> dict[str, Any]: ...
