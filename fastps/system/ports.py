"""Free ports of this machine."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now; "" as the host means all addresses.

    >>> 0 < free_port() < 65536
    True
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
