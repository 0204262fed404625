"""A cable with a delay between two nodes: it holds each packet for half a round trip, in both directions.

Kernels can do this (netem), but not all do. Here each node has a TUN device, and this process carries packets from one to the
other. They are segments of up to 64 KiB, as between two ends of a veth pair. It runs until its input ends.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PACKET_INFO, _VIRTIO_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUM, _TCP4_SEGMENTS = 0x01, 0x02
_MOST_BYTES = 70_000
_BATCH = 64  # packets from one side before the other side's turn


def device(name: str) -> int:
    """Make a TUN device in this process's namespace. Returns its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TUN | _NO_PACKET_INFO | _VIRTIO_HEADER
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUM | _TCP4_SEGMENTS)
    return descriptor


class Way:
    """One direction: packets that are on their way, each with the time at which it arrives."""

    def __init__(self, source: int, target: int, delay_ns: int) -> None:
        self.source, self._target, self._delay_ns = source, target, delay_ns
        self._packets: deque[tuple[int, bytes]] = deque()

    def take(self) -> None:
        """Take the packets that are there."""
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, _MOST_BYTES)
            except BlockingIOError:
                return
            self._packets.append((time.monotonic_ns() + self._delay_ns, packet))

    def deliver(self) -> int:
        """Deliver the packets whose time has come. Returns the time of the next; a time far away if there is none."""
        while self._packets and self._packets[0][0] <= time.monotonic_ns():
            _, packet = self._packets.popleft()
            try:
                os.write(self._target, packet)
            except OSError:  # the device is down, at the beginning or the end: a packet may be lost
                continue
        return self._packets[0][0] if self._packets else time.monotonic_ns() + 1_000_000_000


def main() -> None:
    """Carry packets between two devices: NAME NAME DELAY_NS. It says when both are there."""
    first, second = device(sys.argv[1]), device(sys.argv[2])
    delay_ns = int(sys.argv[3])
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # so that busy workers do not delay it
    print("ready", flush=True)
    ways = [Way(first, second, delay_ns), Way(second, first, delay_ns)]
    while True:
        next_ns = min(way.deliver() for way in ways)
        wait_s = max(0, next_ns - time.monotonic_ns()) / 1e9
        readable, _, _ = select.select([0, *(way.source for way in ways)], [], [], wait_s)
        if 0 in readable:
            return
        for way in ways:
            if way.source in readable:
                way.take()


if __name__ == "__main__":
    main()
