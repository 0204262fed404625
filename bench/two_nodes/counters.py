"""What a node has used: bytes on its interface, and the processor time of the agent that this process has started.

An interface counts a segment of up to 64 KiB, which the kernel hands over whole, with one header. Its token bucket, if it has
one, counts the headers of each packet of 1,500 bytes, as a cable carries them.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_AGENT = b"fastps.network.agent"


@dataclass(frozen=True)
class Counters:
    """Totals of a node; the difference of two is what happened between them.

    Attributes:
        sent: bytes that left by the interface.
        packets: the same with the headers of each packet; 0 if the interface has no token bucket.
        cpu_s: processor time of this process's agent, user and system; 0 without an agent.
    """

    sent: int
    packets: int
    cpu_s: float

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(self.sent - before.sent, self.packets - before.packets, self.cpu_s - before.cpu_s)


def read(interface: str) -> Counters:
    """The counters of this process, and of its network namespace."""
    sent = int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
    return Counters(sent, _packet_bytes(interface), sum(map(_cpu_s, _agents())))


def _packet_bytes(interface: str) -> int:
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", interface]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(each["bytes"] for each in json.loads(shown or "[]") if each.get("kind") == "tbf")


def _agents() -> list[list[str]]:
    """What /proc says of the agents that this process has started."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            # The name of the process, in parentheses, may have spaces.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and _AGENT in (process / "cmdline").read_bytes():
                found.append(fields)
        except (OSError, IndexError):  # not a process, or one that has ended
            continue
    return found


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
