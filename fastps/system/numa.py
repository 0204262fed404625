"""Placement of an arena's pages on a machine with several NUMA nodes.

All workers read the weights, so the pages of the weights are spread over all nodes. One worker writes a gradient slot, so the
slot lies on that worker's node if the worker is bound to one. Binding workers to cores is left to `numactl` and the OS.
"""

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from fastps.kernels.memory import numa
from fastps.kernels.memory.mapping import SharedMapping

logger = logging.getLogger("fastps.memory_nodes")
_NODES = Path("/sys/devices/system/node")


def cpus_of(text: str) -> set[int]:
    """The numbers in a list in the kernel's format.

    >>> sorted(cpus_of("0-2,5\\n"))
    [0, 1, 2, 5]
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def nodes_of(cores: set[int], folder: Path = _NODES) -> list[int]:
    """The NUMA nodes of these cores, in order. Empty if the machine does not report nodes."""
    found = []
    for node in folder.glob("node[0-9]*"):
        try:
            if cpus_of((node / "cpulist").read_text()) & cores:
                found.append(int(node.name.removeprefix("node")))
        except OSError:
            continue
    return sorted(found)


def spread(descriptor: int, size: int, nodes: Sequence[int] | None = None) -> bool:
    """Interleave the unallocated pages of a memfd over `nodes`. Return whether that was done.

    The default is the nodes of all cores of the machine. A machine with a single node is left as it is.
    """
    if nodes is None:
        nodes = nodes_of(set(range(os.cpu_count() or 1)))
        if len(nodes) < 2:
            return False
    with mmap.mmap(descriptor, size, mmap.MAP_SHARED) as memory:
        try:
            numa.interleave(memory, nodes)
        except OSError as error:  # a container may forbid the call; the kernel then places the pages
            logger.warning("the arena is not spread over the memory nodes %s: %s", nodes, error)
            return False
    logger.info("the arena is spread over the memory nodes %s", nodes)
    return True


def bring_slots(memory: SharedMapping, offset: int, length: int) -> bool:
    """Move the calling worker's slots to its node if it is bound to one of several. Return whether that was done."""
    own = nodes_of(os.sched_getaffinity(0))
    if len(own) != 1 or own == nodes_of(set(range(os.cpu_count() or 1))):
        return False
    try:
        numa.bring(memory, offset, length)
    except OSError as error:
        logger.warning("this worker's slots stay where they are: %s", error)
        return False
    return True
