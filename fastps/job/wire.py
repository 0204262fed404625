"""What a model takes on the links between nodes: the bytes of each type of float, and the parts that travel in turn."""

CHUNK_BYTES = 1 << 20  # of one message of floats
BLOCK_FLOATS = 256  # int8 has a float32 scale for each block
_LEAST_CHUNKS = 3  # of a part
_MOST_PARTS = 50


def wire_bytes(link_dtype: str, floats: int) -> int:
    """The bytes of so many floats as `link_dtype`.

    >>> [wire_bytes(name, 1000) for name in ("float32", "bfloat16", "int8")]
    [4000, 2000, 1016]
    """
    if link_dtype == "int8":
        return floats + 4 * -(-floats // BLOCK_FLOATS)
    return (4 if link_dtype == "float32" else 2) * floats


def part_count(floats: int) -> int:
    """The parts into which a home cuts so many floats under bsp and hardsync.

    >>> part_count(1_000_000), part_count(25_000_000)
    (1, 32)
    """
    return max(1, min(_MOST_PARTS, -(-4 * floats // CHUNK_BYTES) // _LEAST_CHUNKS))


def sum_ranges(numbers: int) -> list[tuple[int, int]]:
    """The parts in which replicas sum so many numbers, in the order in which backward makes them: the last first.

    >>> sum_ranges(100)
    [(0, 100)]
    """
    count = part_count(numbers)
    edges = [round(numbers * part / count / 16) * 16 for part in range(count)] + [numbers]
    return [(edges[part], edges[part + 1]) for part in reversed(range(count))]
