"""Machines within this one: they reach each other, at the given rate, and nothing is left of them."""

import subprocess

import pytest

from fastps.lab.measuring.namespaces import cluster, missing_reason


@pytest.fixture(autouse=True)
def _allowed() -> None:
    reason = missing_reason()
    if reason:
        pytest.skip(reason)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_machines_reach_each_other_and_nothing_is_left() -> None:
    send = "import socket; socket.create_connection(('{}', 5000), 5).sendall(b'hello')"
    take = "import socket; s = socket.create_server(('', 5000)); print('ready', flush=True); print(s.accept()[0].recv(9))"
    with cluster(3) as made:
        listener = subprocess.Popen(made.command(0, ["python3", "-c", take]), stdout=subprocess.PIPE, text=True)
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "ready\n"
            _output(made.command(2, ["python3", "-c", send.format(made.address(0))]))
            assert listener.communicate(timeout=10)[0] == "b'hello'\n"
        finally:
            listener.kill()
            listener.wait()
        assert made.tail in _output(["ip", "netns", "list"])
    assert made.tail not in _output(["ip", "netns", "list"])


def test_each_port_has_its_rate_and_an_error_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), cluster(2, rate_mbit=300) as made:
        shape = _output(["tc", "-n", made.namespace(1), "qdisc", "show", "dev", made.interface(1)])
        assert "tbf" in shape and "rate 300Mbit" in shape
        _ = 1 / 0
    assert made.tail not in _output(["ip", "netns", "list"])
