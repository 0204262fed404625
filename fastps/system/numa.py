"""Where an arena's pages lie on a machine with several memory nodes (NUMA).

Everyone reads the weights, so they are spread over all nodes; a gradient slot is written by one worker, so it lies on that
worker's node where the worker is bound to one. Refuses to bind workers to cores: that is `numactl`'s and the scheduler's.
"""

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from fastps.kernels.shm import numa as memory_nodes
from fastps.kernels.shm.mapping import SharedMapping

logger = logging.getLogger("fastps.memory_nodes")
_NODES = Path("/sys/devices/system/node")


def cpus_of(text: str) -> set[int]:
    """The numbers in a list as the kernel writes it.

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
    """The memory nodes to which any of the cores belongs, in order; an empty list where the machine does not say."""
    found = []
    for node in folder.glob("node[0-9]*"):
        try:
            if cpus_of((node / "cpulist").read_text()) & cores:
                found.append(int(node.name.removeprefix("node")))
        except OSError:
            continue
    return sorted(found)


def spread(descriptor: int, size: int, nodes: Sequence[int] | None = None) -> bool:
    """Spread the pages of a memfd that are not allocated yet over `nodes`, page by page; True if that was done.

    Default: the nodes of all cores of the machine that a job started here may use; nothing is done for a single one.
    """
    if nodes is None:
        nodes = nodes_of(set(range(os.cpu_count() or 1)))
        if len(nodes) < 2:
            return False
    with mmap.mmap(descriptor, size, mmap.MAP_SHARED) as memory:
        try:
            memory_nodes.interleave(memory, nodes)
        except OSError as error:  # a container may forbid it; the arena then lies where the kernel puts it
            logger.warning("the arena is not spread over the memory nodes %s: %s", nodes, error)
            return False
    logger.info("the arena is spread over the memory nodes %s", nodes)
    return True


def bring_slots(memory: SharedMapping, offset: int, length: int) -> bool:
    """Move a worker's slots to its node, if it is bound to one of several; True if that was done. Called by the worker."""
    own = nodes_of(os.sched_getaffinity(0))
    if len(own) != 1 or own == nodes_of(set(range(os.cpu_count() or 1))):
        return False
    try:
        memory_nodes.bring(memory, offset, length)
    except OSError as error:
        logger.warning("this worker's slots stay where they are: %s", error)
        return False
    return True
