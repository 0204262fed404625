"""Groups: sums and copies over nodes have the same bits everywhere, and a member that is gone loses the group."""

import hashlib
import os
import threading
import time

import pytest
import torch
from torch.distributed import TCPStore

from fastps.network.group import Group, GroupLostError, Groups
from fastps.system.clock import SYSTEM_CLOCK
from tests.network.conftest import both
from tests.support import nodes, processes


def _groups(port: int, node: int) -> Groups:
    def store() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    return Groups(node, "127.0.0.1", store, lambda nonce: f"group/{nonce}", SYSTEM_CLOCK)


def _nothing() -> None:
    pass


def test_sums_have_the_same_bits_on_all_nodes_and_copies_are_those_of_the_source() -> None:
    def member(side: int) -> tuple[str, list[float], int]:
        groups = _groups(port, (1, 4, 6)[side])
        group = groups.form((1, 4, 6), 9, 10.0, 10.0)
        values = torch.randn(100_003, generator=torch.Generator().manual_seed(side))
        copied = torch.full((2,), float(side))
        works = [group.all_reduce(values), group.broadcast(copied, 4)]
        for work in works:
            group.wait(work, 10.0, _nothing)
        assert groups.nonce == 9
        assert group.is_over
        return hashlib.sha256(values.numpy().tobytes()).hexdigest(), copied.tolist(), groups.sent_bytes

    with nodes.rendezvous() as port:
        found = both(member, 3)
    assert len({digest for digest, _, _ in found}) == 1
    assert [copied for _, copied, _ in found] == [[1.0, 1.0]] * 3
    assert found[0][2] == 2 * 4 * 100_003 * 2 // 3


def test_a_group_of_one_node_has_its_own_sum() -> None:
    group = Group((3,), 3, 1, SYSTEM_CLOCK)
    group.wait(group.all_reduce(torch.ones(2)), 1.0, _nothing)
    assert group.is_over


def test_a_member_that_does_not_come_and_a_sum_without_progress_lose_the_group() -> None:
    with nodes.rendezvous() as port:
        with pytest.raises(GroupLostError, match="expected each other within 1 s"):
            _groups(port, 0).form((0, 1), 1, 1.0, 1.0)

        def member(side: int) -> str:
            groups = _groups(port, side)
            group = groups.form((0, 1), 2, 10.0, 2.0)
            if side:
                time.sleep(0.5)
                return ""
            with pytest.raises(GroupLostError) as caught:
                group.wait(group.all_reduce(torch.ones(8)), 0.2, _nothing)
            groups.lose()
            assert groups.nonce == 0
            return str(caught.value)

        assert "made no progress for 0.2 s" in both(member)[0]


def test_what_ends_a_wait_is_looked_for_meanwhile_and_a_killed_member_ends_it_at_once() -> None:
    with nodes.rendezvous() as port:

        def die() -> None:
            kept = _groups(port, 1).form((0, 1), 3, 30.0, 30.0)
            time.sleep(1.0)
            os._exit(kept.nonce)

        child = processes.start(die)
        group = _groups(port, 0).form((0, 1), 3, 30.0, 30.0)
        looked = threading.Event()
        began = time.monotonic()
        with pytest.raises(GroupLostError):
            group.wait(group.all_reduce(torch.ones(8)), 20.0, looked.set)
        assert time.monotonic() - began < 10
        assert looked.is_set()
        processes.finish([child], 10)
