"""Memory nodes: what the kernel is told, as the kernel itself shows it, on whatever nodes this machine has."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastps.kernels.memory import numa as words
from fastps.system import numa as memory_nodes

SIZE = 64 * mmap.PAGESIZE


def _policy_of(memory: mmap.mmap) -> str:
    """What /proc/self/numa_maps says of the mapping."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line.split()[1] for line in lines if int(line.split()[0], 16) == address)


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("fastps-test-nodes")
    os.ftruncate(made, SIZE)
    yield made
    os.close(made)


needs_nodes = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel is built without memory nodes (CONFIG_NUMA)"
)


@needs_nodes
def test_pages_that_are_not_there_yet_are_spread_over_the_nodes(descriptor: int) -> None:
    nodes = memory_nodes.nodes_of(os.sched_getaffinity(0))
    assert memory_nodes.spread(descriptor, SIZE, nodes)
    os.posix_fallocate(descriptor, 0, SIZE)
    with mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED) as memory:
        assert _policy_of(memory).startswith("interleave:")


@needs_nodes
def test_pages_are_brought_to_the_node_of_this_core() -> None:
    with mmap.mmap(-1, SIZE) as memory:
        memory[:] = b"\x01" * SIZE
        words.bring(memory, mmap.PAGESIZE, SIZE - mmap.PAGESIZE)
        assert memory[:] == b"\x01" * SIZE


def test_a_machine_with_one_node_is_left_alone(descriptor: int) -> None:
    several = len(memory_nodes.nodes_of(set(range(os.cpu_count() or 1)))) > 1
    assert memory_nodes.spread(descriptor, SIZE) == several


def test_the_nodes_of_cores_are_read_from_the_kernels_lists(tmp_path: Path) -> None:
    for node, cpus in {0: "0-3,8-11", 1: "4-7,12-15", 2: ""}.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    assert memory_nodes.nodes_of({9, 2}, tmp_path) == [0]
    assert memory_nodes.nodes_of({0, 15}, tmp_path) == [0, 1]
    assert memory_nodes.nodes_of({99}, tmp_path) == []


def test_nodes_and_ranges_that_cannot_be_are_refused() -> None:
    with mmap.mmap(-1, SIZE) as memory:
        with pytest.raises(ValueError, match="expected nodes of 0 to 63, found 64"):
            words.interleave(memory, [64])
        with pytest.raises(ValueError, match="at least one node"):
            words.interleave(memory, [])
        with pytest.raises(ValueError, match="expected a range within"):
            words.bring(memory, 0, SIZE + 1)
        with pytest.raises(OSError, match="mbind"):
            words.bring(memory, 1, 100)
