"""Edges over real links, both sides in this process: order, losses, silence, strangers, and what a failed peer says."""

import contextlib
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fastps
from fastps.job.wire import CHUNK_BYTES
from fastps.network import link as link_module
from fastps.network.edge import MOST_HEADERS, chunks_of
from fastps.network.link import LinkLostError
from fastps.network.messages import Header, Kind
from tests.network.conftest import SECRET, Pair, both, make_link
from tests.support import descriptors, nodes, processes
from tests.support.processes import wait_until
from tests.support.torch_optimizers import steps_on

LEFT = 40  # descriptors that may come and go beside strangers


def test_headers_come_in_order_and_beats_are_not_among_them(pair: Pair) -> None:
    leaf, home = pair.edges
    for step in range(5):
        leaf.send_header(Header(Kind.PUSH, weight=step))
    assert home.next_header(0.7) is not None
    assert [header.weight for _ in range(4) if (header := home.next_header(1.0)) is not None] == [1, 2, 3, 4]
    assert home.next_header(0.7) is None, "only beats"


def test_floats_arrive_as_they_were_sent_in_both_directions_at_once(pair: Pair) -> None:
    random = np.random.default_rng(3)
    sent = [random.integers(0, 256, 20 * CHUNK_BYTES + 12, np.uint8) for _ in range(2)]
    found = [np.zeros_like(memory) for memory in sent]

    def exchange(side: int) -> None:
        for sends in (side == 0, side == 1):
            (pair.edges[side].send if sends else pair.edges[side].receive)(chunks_of((sent if sends else found)[side]))

    both(exchange)
    assert np.array_equal(found[0], sent[1])
    assert np.array_equal(found[1], sent[0])


def test_a_side_that_closes_is_missed_at_once(pair: Pair) -> None:
    leaf, home = pair.edges
    leaf.close()
    began = time.monotonic()
    with pytest.raises(LinkLostError):
        home.next_header(10.0)
    assert time.monotonic() - began < 2
    with pytest.raises(LinkLostError):
        home.send_header(Header(Kind.PUSH))


@pytest.mark.sampled(2)
def test_a_side_that_is_silent_is_lost_after_the_timeout(pair: Pair) -> None:
    leaf, home = pair.edges
    leaf._ends.set()  # its beats end, and its links stay open
    began = time.monotonic()
    with pytest.raises(LinkLostError):
        home.next_header(10.0)
    assert 0.9 < time.monotonic() - began < 4


@pytest.mark.sampled(2)
def test_floats_that_do_not_come_while_beats_do_are_a_reason_to_compare_the_mtu(pair: Pair) -> None:
    home = pair.edges[1]
    with pytest.raises(LinkLostError, match="small messages pass and large ones do not: compare the MTU of both ends"):
        home.receive([np.zeros(CHUNK_BYTES, np.uint8)])
    with pytest.raises(LinkLostError, match="compare the MTU"):
        home.check()


def test_what_a_failed_side_says_is_the_reason(pair: Pair) -> None:
    leaf, home = pair.edges
    leaf.send_header(Header(Kind.FAILED, text="the disk is full"))
    leaf.close()
    header = home.next_header(5.0)
    assert header is not None and header.text == "the disk is full"
    with pytest.raises(LinkLostError, match="the disk is full"):
        home.check()
    assert home.failure == "the disk is full"


def test_bytes_that_are_no_header_end_the_edge(pair: Pair) -> None:
    home = pair.edges[1]
    control = pair.links[0][0]
    control.wait(control.send(np.full(512, 7, np.uint8)), 2.0)
    with pytest.raises(LinkLostError, match="expected a message of fastps"):
        home.next_header(5.0)


def test_more_headers_than_a_side_reads_end_the_edge(pair: Pair) -> None:
    """A peer that floods cannot fill this side's memory."""
    leaf, home = pair.edges
    with contextlib.suppress(LinkLostError):
        for _ in range(MOST_HEADERS + 1):
            leaf.send_header(Header(Kind.NULL))
    with pytest.raises(LinkLostError, match="expected at most"):
        wait_until(home.check, 10)


def test_both_sides_learn_the_offset_of_their_clocks_and_count_bytes(pair: Pair) -> None:
    """Both are on this machine, so the true offset is 0."""
    leaf, home = pair.edges
    for each in pair.edges:
        wait_until(lambda watch=each.watch: watch.clock.best(time.monotonic_ns()) and watch.headers_received >= 2 * 512)
    sent = np.zeros(CHUNK_BYTES + 12, np.uint8)
    both(lambda side: leaf.send(chunks_of(sent)) if side == 0 else home.receive(chunks_of(sent.copy())))
    for edge in pair.edges:
        now_ns = time.monotonic_ns()
        found = edge.watch.clock.best(now_ns)
        assert found is not None and abs(found.offset_ns) <= found.error_at(now_ns) < 1e9
        assert edge.watch.headers_sent >= 2 * 512
    assert (leaf.watch.floats_sent, home.watch.floats_received) == (len(sent), len(sent))
    assert (home.watch.floats_sent, leaf.watch.floats_received) == (0, 0)


# -- strangers ------------------------------------------------------------------------------------


def _ports(process_id: int) -> list[tuple[str, int]]:
    """Where a process listens."""
    found = psutil.Process(process_id).net_connections("tcp")
    return [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]


def _visit(ports: list[tuple[str, int]], count: int) -> None:
    """Open connections that say nothing, and close each at once."""
    for number in range(count):
        with socket.socket() as stranger, contextlib.suppress(BlockingIOError, ConnectionError):
            stranger.setblocking(False)
            stranger.connect(ports[number % len(ports)])


def test_short_connections_leave_no_descriptor_of_an_open_edge(pair: Pair) -> None:
    ports = [place for place in _ports(psutil.Process().pid) if place[0] == "127.0.0.1"]
    assert len(ports) >= 2, "the links listen"
    before = descriptors.opened()
    _visit(ports, 200)
    wait_until(lambda: len(descriptors.opened()) <= len(before) + 5)  # ZeroMQ notices the ends soon
    pair.edges[0].check()
    pair.edges[1].check()


def test_a_port_that_cannot_be_closed_to_strangers_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "_listening", dict)
    with nodes.rendezvous() as port:
        for link in both(lambda side: make_link("gloo", port, "link", side)):
            link.close()
    assert caplog.text.count("link link: its port stays open to strangers") == 2


@pytest.mark.parametrize("left", [1, 3])
def test_a_process_without_descriptors_refuses_a_link_over_gloo(left: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest, held = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(held.pop())
        with pytest.raises(LinkLostError, match="Too many open files"):
            link_module.GlooLink(own, "link", 0, "127.0.0.1", 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def _train(folder: Path) -> Any:
    """Train until the file `end` is there; the file `steps` grows with each step."""
    model = torch.nn.Linear(50, 50)
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="asp", timeout_s=60) as optimizer:
        while not (folder / "end").exists():
            steps_on(model, optimizer, torch.ones(1, 50))
            with (folder / f"steps-{os.environ['FASTPS_NODE_RANK']}").open("a") as file:
                file.write(".")
            time.sleep(0.01)
    return optimizer.version


def _steps(folder: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(folder.glob("steps-*"))]


@pytest.mark.slow
@pytest.mark.parametrize("link", ["gloo", "zmq"])
def test_two_thousand_short_connections_leave_few_descriptors_and_the_job_trains_on(link: str, tmp_path: Path) -> None:
    variables = {"FASTPS_LINK": link, "FASTPS_SECRET": SECRET.key.decode()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with nodes.rendezvous() as port:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        children = nodes.start((1, 1), port, lambda rank: _train(tmp_path), variables)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            wait_until(lambda: len(_steps(tmp_path)) == 2, 90)
            agent = psutil.Process(nodes.agents()[0])
            assert resource.prlimit(agent.pid, resource.RLIMIT_NOFILE) == (hard, hard), "as many as it may have"
            before = agent.num_fds()
            _visit(_ports(agent.pid), 2000)
            made = _steps(tmp_path)
            wait_until(lambda: all(now >= then + 20 for now, then in zip(_steps(tmp_path), made, strict=True)), 90)
            wait_until(lambda: agent.num_fds() <= before + LEFT, 30)
        finally:
            (tmp_path / "end").touch()
            processes.results(children, 60)
