from typing import Any

def format_memory(
    memory: Any,
    header_bytes: bytes,
    segments: list[tuple[int, int, int]],
    *,
    shards: list[tuple[int, int]] | None = None,
    started: int = 0,
    tables: list[tuple[int, int, int, int, int]] | None = None,
    versions: list[int] | None = None,
    clocks: list[int] | None = None,
    drawn: int = 0,
    **policy_values: Any,
) -> None: ...
