"""Encrypted links: only the expected key comes in, bytes on the cable are not the message, and garbage never ends more."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from torch.distributed import TCPStore

import fastps
from fastps.errors import UnsupportedError, UsageError
from fastps.job.secret import Secret
from fastps.network import zeromq_link
from fastps.network.link import LinkLostError
from fastps.network.zeromq_link import ZeromqLink
from tests.network.conftest import SECRET, both, reason_of
from tests.support import descriptors, nodes, processes
from tests.support.torch_optimizers import mean_square, steps_on

LARGEST = 1 << 20
Links = list[ZeromqLink]


def _link(port: int, side: int, secret: Secret | None = SECRET, timeout_s: float = 5.0) -> ZeromqLink:
    own = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return ZeromqLink(own, "link", side, "127.0.0.1", timeout_s, secret=secret, largest=LARGEST)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def links(store: TCPStore) -> Iterator[Links]:
    made = both(lambda side: _link(store.port, side))
    yield made
    for link in made:
        link.close()


def _endpoint(store: TCPStore) -> tuple[str, int, str]:
    """Host, port and key of the listening side."""
    key, endpoint, _ = json.loads(store.get("link/0"))
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port), key


def _exchange(links: Links, count: int = 5) -> None:
    """Send messages both ways, and expect them unchanged."""
    sent = [np.random.default_rng(seed).integers(0, 256, LARGEST, np.uint8) for seed in range(count)]
    for source, target in (links, links[::-1]):
        found = [np.zeros(LARGEST, np.uint8) for _ in sent]
        receives = [target.receive(memory) for memory in found]
        sends = [source.send(memory) for memory in sent]
        for transfer in sends:
            source.wait(transfer, 10.0)
        for transfer in receives:
            target.wait(transfer, 10.0)
        assert all(np.array_equal(*each) for each in zip(found, sent, strict=True))


def test_messages_that_were_sent_before_an_orderly_end_arrive(links: Links) -> None:
    memory = np.zeros(512, np.uint8)
    for number in range(4):
        links[0].wait(links[0].send(np.full(512, number, np.uint8)), 5.0)
    links[0].close()
    for number in range(4):
        links[1].wait(links[1].receive(memory), 5.0)
        assert memory[0] == number
    with pytest.raises(LinkLostError, match="closed by peer"):
        links[1].wait(links[1].receive(memory), 5.0)


@pytest.mark.parametrize("sent", [0, 1, 511, 513, LARGEST])
def test_a_message_of_another_size_loses_the_link(links: Links, sent: int) -> None:
    receive = links[1].receive(np.zeros(512, np.uint8))
    links[0].send(np.zeros(sent, np.uint8))
    with pytest.raises(LinkLostError, match=f"expected a message of 512 bytes, found {sent}: the nodes disagree"):
        links[1].wait(receive, 5.0)


def test_a_message_that_is_too_large_for_the_link_loses_it(links: Links) -> None:
    receive = links[1].receive(np.zeros(512, np.uint8))
    links[0].send(np.zeros(4 * LARGEST, np.uint8))
    with pytest.raises(LinkLostError):
        links[1].wait(receive, 5.0)


def test_a_transfer_that_takes_too_long_closes_the_link(links: Links) -> None:
    with pytest.raises(LinkLostError, match=r"took longer than 0\.2 s"):
        links[0].wait(links[0].receive(np.zeros(4, np.uint8)), 0.2)
    with pytest.raises(LinkLostError):
        links[0].send(np.zeros(4, np.uint8))


def test_links_leave_no_descriptor_and_no_thread(store: TCPStore) -> None:
    def cycle(number: int) -> None:
        made = both(lambda side: _link(store.port, side))
        _exchange(made, 1)
        for link in made:
            link.close()
        store.delete_key("link/0")
        store.delete_key("link/1")

    cycle(0)  # pyzmq keeps a thread and descriptors of its own from now on
    before = len(descriptors.opened()), threading.active_count()
    for number in range(4):
        cycle(number)
    # The store's side of a connection closes some time later.
    processes.wait_until(lambda: len(descriptors.opened()) <= before[0] and threading.active_count() <= before[1], 5)


def test_different_secrets_do_not_meet(store: TCPStore) -> None:
    secrets = SECRET, Secret(b"another secret of tests")
    reasons = both(lambda side: reason_of(lambda: _link(store.port, side, secrets[side], 20.0)))
    assert all("not made with this job's secret: give all nodes the same" in reason for reason in reasons)


@pytest.mark.parametrize("record", [b"", b"[]", b"3", b'["a", "b"]', b'["a", "b", "c"]', b"\xff", b'{"a": 1}'])
def test_other_records_in_the_store_are_refused(store: TCPStore, record: bytes) -> None:
    store.set("link/1", record)
    assert "key of the other side" in reason_of(lambda: _link(store.port, 0))


def test_a_side_that_does_not_come_is_missed_after_the_timeout(store: TCPStore) -> None:
    assert reason_of(lambda: _link(store.port, 0, timeout_s=0.5))


def test_without_a_secret_or_without_the_library_the_error_says_what_to_do(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="give FASTPS_SECRET or --secret-file"):
        _link(store.port, 0, None)
    monkeypatch.setattr(zeromq_link, "zmq", None)
    with pytest.raises(UnsupportedError, match=r"pyzmq with CURVE, found none; pip install '\.\[encrypted\]'"):
        _link(store.port, 0)


def test_strangers_are_not_let_in_and_disturb_nobody(store: TCPStore, links: Links) -> None:
    """One with another key, one without encryption, and raw garbage; messages arrive unchanged beside them."""
    host, port, key = _endpoint(store)
    context = zmq.Context()
    try:
        monitors = []
        for is_encrypted in (True, False):
            stranger = context.socket(zmq.PAIR)
            stranger.linger = 0
            if is_encrypted:
                stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                stranger.curve_serverkey = key.encode()
            monitors.append(stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED))
            stranger.connect(f"tcp://{host}:{port}")
        for seed in range(20):
            with socket.create_connection((host, port)) as raw:
                raw.sendall(np.random.default_rng(seed).bytes(1 + 50 * seed))
        assert not any(monitor.poll(300) for monitor in monitors), "a stranger's handshake succeeded"
        _exchange(links)
    finally:
        context.destroy(linger=0)


def test_the_bytes_on_the_cable_are_not_those_of_the_message(store: TCPStore) -> None:
    """A relay between the two sides sees every byte that travels."""
    seen, relays, text = bytearray(), [], b"weights that nobody may read" * 20
    ready = threading.Event()

    def relay(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.extend(data)
            target.sendall(data)

    def connect_to_relay(side: int) -> ZeromqLink:
        if side == 0:
            return _link(store.port, 0)
        connect = zmq.Socket.connect

        def redirected(self: Any, address: str) -> Any:
            if not address.startswith("tcp://"):
                return connect(self, address)  # of the monitor
            host, _, port = address.removeprefix("tcp://").rpartition(":")

            listener = socket.create_server(("127.0.0.1", 0))

            def accept() -> None:
                client, _ = listener.accept()
                server = socket.create_connection((host, int(port)))
                relays.extend([listener, client, server])
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=relay, args=pair, daemon=True).start()
                ready.set()

            threading.Thread(target=accept, daemon=True).start()
            return connect(self, f"tcp://127.0.0.1:{listener.getsockname()[1]}")

        zmq.Socket.connect = redirected  # type: ignore[method-assign]
        try:
            return _link(store.port, 1)
        finally:
            zmq.Socket.connect = connect  # type: ignore[method-assign]

    made = both(connect_to_relay)
    found = np.zeros(len(text), np.uint8)
    receive = made[1].receive(found)
    made[0].wait(made[0].send(np.frombuffer(text, np.uint8)), 5.0)
    made[1].wait(receive, 5.0)
    for link in made:
        link.close()
    for each in relays:
        each.close()
    assert ready.is_set() and found.tobytes() == text
    assert len(seen) > len(text), "the relay has seen the message"
    assert text[:28] not in seen


@pytest.mark.slow
def test_a_job_of_two_nodes_trains_over_encrypted_links() -> None:
    def work(rank: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(1500, 2100)  # of three parts
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="bsp", timeout_s=60) as optimizer:
            for step in range(5):
                steps_on(model, optimizer, torch.full((2, 1500), 0.01 * (rank + step)), loss=mean_square)
            optimizer.wait_for_others()
            return float(sum(value.double().sum() for value in model.parameters())), optimizer.version

    found = nodes.train((1, 1), work, FASTPS_LINK="zmq", FASTPS_SECRET="a secret of the tests")
    assert found == nodes.train((1, 1), work), "the weights have the bits of a job over plain links"
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_peer_that_ends_while_nobody_reads_what_it_sent_does_not_abort_this_process(store: TCPStore) -> None:
    """libzmq's own heartbeats ended the process here: Assertion failed: !_io_error."""

    def work() -> None:
        links: Links = both(lambda side: _link(store.port, side))
        for number in range(40):  # more than wait at both sides
            links[1].send(np.full(512, number, np.uint8))
        time.sleep(0.5)
        links[1]._lose("the test ends it")  # so that it leaves at once
        links[1].close()
        time.sleep(2.5)
        with contextlib.suppress(LinkLostError):
            links[0].wait(links[0].receive(np.zeros(512, np.uint8)), 5.0)

    processes.results([processes.start(work)], 30)
