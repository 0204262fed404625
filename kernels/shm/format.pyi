from typing import Any

def format_memory(
    memory: Any,
    described: bytes,
    segments: list[tuple[int, int, int]],
    *,
    shards: list[tuple[int, int]] | None = None,
    started: int = 0,
    versions: list[int] | None = None,
    clocks: list[int] | None = None,
    drawn: int = 0,
    **policy_values: Any,
) -> None: ...
