"""A lane between two processes on two cores: a descriptor's latency from post to seen, and descriptors per second.

The roofline is one number in one cache line, passed back and forth. Wake-ups from sleep, and processes that share a core, are
not measured.
"""

import mmap
import os
from collections.abc import Callable

from fastps.bench.crew import Crew, ForkedCrew
from fastps.bench.measure import BenchOptions, Row, elapsed, interleaved
from fastps.kernels.baseline import roofline
from fastps.kernels.combining.ring import Ring

RING_SIZE = 16
_PAGE = mmap.PAGESIZE


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each of the lane's two figures, and one for the roofline."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return [{"bench": "lane", "name": "post-to-seen", "missing": f"needs 2 cores, found {len(cores)}", "checked": False}]
    count = 200 if options.smoke else 200_000
    memory = mmap.mmap(-1, 4 * _PAGE)

    def begin(rank: int) -> Callable[[str], float]:
        os.sched_setaffinity(0, {cores[rank]})
        works = _works(memory, first=rank == 0, count=count)
        return lambda name: elapsed(works[name], 1)

    with ForkedCrew(2, begin) as crew:
        for name in ("post-to-seen", "throughput", "limit"):
            crew.call(name)
        sides = {name: _side(crew, name, count) for name in ("post-to-seen", "throughput", "limit")}
        spreads = interleaved(sides, options.repeats)
    shares = {name: spreads["limit"].median / spreads[name].median for name in ("post-to-seen", "limit")}
    return [
        {
            "bench": "lane",
            "name": name,
            "size": RING_SIZE,
            "backend": "spin" if name == "limit" else "ring",
            **spread.row(),
            "ns_per_op": spread.median * 1e9,
            "limit_share": shares.get(name),
            "checked": True,  # the receiver compares every descriptor with the one sent, and raises
        }
        for name, spread in spreads.items()
    ]


def _works(memory: mmap.mmap, first: bool, count: int) -> dict[str, Callable[[int], None]]:
    """Return one process's work for each figure."""
    size = Ring.bytes_for(RING_SIZE)
    there, back, stream = (Ring(memoryview(memory)[_PAGE * at : _PAGE * at + size], RING_SIZE) for at in range(3))
    mine, theirs = (there, back) if first else (back, there)
    word = memoryview(memory)[3 * _PAGE : 3 * _PAGE + 2 * roofline.LINE]

    def pass_through(_times: int) -> None:
        if first:
            stream.produce(count, seed=1)
        else:
            stream.consume(count, seed=1)

    return {
        "post-to-seen": lambda _times: mine.echo(theirs, first, count),
        "throughput": pass_through,
        "limit": lambda _times: roofline.spin(word, first, count),
    }


def _side(crew: Crew, name: str, count: int) -> Callable[[], float]:
    """Return a function for the seconds of one way. For round trips the first process's clock counts."""
    ways = 1 if name == "throughput" else 2
    return lambda: crew.call(name)[1 if name == "throughput" else 0] / count / ways
