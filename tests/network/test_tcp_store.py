"""Waits for node 0: for its name and for its port."""

import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest

from fastps.errors import AttachError
from fastps.network.tcp_store import OpenPort, await_answer, await_name, connect_store, is_refused
from fastps.system.ports import free_port
from tests.support import processes


def test_a_name_that_nobody_knows_is_an_error_after_the_timeout() -> None:
    await_name("localhost", 1.0)
    with pytest.raises(AttachError, match=r"no address was known for no-such-pod\.invalid within 0\.1 s .*headless service"):
        await_name("no-such-pod.invalid", 0.1)


def test_a_port_that_opens_late_is_found_soon() -> None:
    port, found = free_port(), []
    thread = threading.Thread(target=lambda: found.append((await_answer("127.0.0.1", port, 20.0), time.monotonic())))
    thread.start()
    time.sleep(0.3)
    with socket.create_server(("127.0.0.1", port)):
        opened = time.monotonic()
        thread.join()
    reason, ended = found[0]
    assert reason == ""
    assert ended - opened < 2.0


def test_a_port_that_stays_closed_gives_its_reason() -> None:
    port = free_port()
    assert await_answer("127.0.0.1", port, 0.2) == "Connection refused"
    with pytest.raises(AttachError, match=rf"answered at 127\.0\.0\.1:{port} within 0\.2 s \(Connection refused\)"):
        connect_store("127.0.0.1", port, 0.2)


def test_the_port_of_a_process_is_refused_once_it_has_ended() -> None:
    """A stopped process still has its port, and so is not taken for one that has ended."""

    told, telling = multiprocessing.Pipe()

    def listen() -> None:
        port = OpenPort("127.0.0.1")
        telling.send(port.number)
        time.sleep(300)

    child = processes.start(listen)
    port = told.recv()
    for _ in range(300):  # more than wait to be taken
        assert not is_refused("127.0.0.1", port, 1.0)
    processes.stop(child.process_id)
    assert not is_refused("127.0.0.1", port, 1.0)
    os.kill(child.process_id, signal.SIGKILL)
    processes.finish([child], 10)
    assert is_refused("127.0.0.1", port, 1.0)
