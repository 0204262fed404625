"""Workers of one launch meet at a store of torch.distributed, or say in time who is missing."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastps.errors import NodeLostError, TimeoutExceededError, WorkerDiedError
from fastps.integrations.process_group import meet, meet_nodes
from fastps.job.nodes import Nodes
from fastps.network.presence import of_launch, report
from fastps.network.tcp_store import host_store


def test_workers_of_a_job_meet_whoever_comes_first() -> None:
    with ThreadPoolExecutor(3) as threads:
        for job, order in (("meets-0", (0, 1, 2)), ("meets-2", (2, 1, 0))):
            coming = {rank: threads.submit(meet, job, rank, 3, 30.0) for rank in order}
            stores = {rank: each.result(30) for rank, each in coming.items()}
            stores[2].set("key", "of 2")
            assert [stores[rank].get("key") for rank in range(3)] == [b"of 2"] * 3


def test_strangers_that_say_nothing_are_not_counted() -> None:
    with ThreadPoolExecutor(1) as threads:
        own = threads.submit(meet, "meets-strangers", 0, 2, 0.3)
        connected = threading.Event()
        while not connected.is_set() and not own.done():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                if stranger.connect_ex("\0fastps/meets-strangers/group") == 0:
                    connected.set()
        with pytest.raises(TimeoutExceededError, match=r"worker 0 waited 0.3 s for worker 1 to reach the place where"):
            own.result(30)


@pytest.mark.parametrize(("rank", "sentence"), [
    (0, "worker 0 waited 0.01 s for worker 1, worker 2 to reach the place"),
    (2, "worker 2 waited 0.01 s for worker 0 to begin the process group: see the"),
])  # fmt: skip
def test_who_does_not_come_is_named(rank: int, sentence: str) -> None:
    with pytest.raises(TimeoutExceededError, match=sentence):
        meet(f"meets-nobody-{rank}", rank, 3, 0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_wait_ends_with_the_error_that_says_why_nobody_comes(rank: int) -> None:
    def look() -> None:
        raise WorkerDiedError("worker 1 has ended", 1)

    with pytest.raises(WorkerDiedError, match="worker 1 has ended"):
        meet("meets-dead", rank, 2, 30.0, look)


def _node(number: int, port: int) -> Nodes:
    return Nodes(2, number, 0, 1, "127.0.0.1", port)


def test_workers_of_several_nodes_meet_at_the_rendezvous_whoever_comes_first() -> None:
    kept = host_store("127.0.0.1", 0, 30.0)
    with ThreadPoolExecutor(2) as threads:
        for job, order in (("nodes-0", (0, 1)), ("nodes-1", (1, 0))):
            coming = {rank: threads.submit(meet_nodes, job, _node(rank, kept.port), (rank, 2), 30.0) for rank in order}
            stores = {rank: each.result(30) for rank, each in coming.items()}
            stores[1].set("key", job)
            assert stores[0].get("key") == job.encode()


def test_worker_of_another_node_that_does_not_come_is_named() -> None:
    kept = host_store("127.0.0.1", 0, 30.0)
    with pytest.raises(TimeoutExceededError, match=r"worker 0 waited 0.2 s for worker 1 to reach the place where"):
        meet_nodes("nodes-late", _node(0, kept.port), (0, 2), 0.2)


def test_node_that_has_ended_is_not_waited_for() -> None:
    kept = host_store("127.0.0.1", 0, 30.0)
    report(of_launch(kept), 1, 1, "worker 1 failed first")
    with pytest.raises(NodeLostError, match="node 1 ended before its workers began the process group: worker 1") as found:
        meet_nodes("nodes-ended", _node(0, kept.port), (0, 2), 30.0)
    assert found.value.node == 1


def test_rendezvous_that_is_gone_is_a_lost_node() -> None:
    kept = host_store("127.0.0.1", 0, 30.0)
    port = kept.port
    del kept
    with pytest.raises(NodeLostError, match=r"worker 1 lost the rendezvous at 127\.0\.0\.1") as found:
        meet_nodes("nodes-gone", _node(1, port), (1, 2), 0.5)
    assert found.value.node == 0
