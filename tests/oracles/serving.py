"""One server that handles messages one after the other, in plain Python: an independent version of the simulator's server.

Workers compute for constant times, messages travel in no time, and an oracle decides. Trees, shards and overlapped pulls are
left out.
"""

import heapq
from collections import deque
from typing import Any


def play(oracle: Any, compute_ns: list[int], pushes: int, message_ns: int, update_ns: int) -> list[tuple[Any, ...]]:
    """The events until `pushes` pushes are handled, as (time, "receive" or "pull", worker).

    message_ns: service time of a push and of an answer; update_ns: time of each update.
    """
    events: list[tuple[int, int, str, int]] = []  # time, number, kind, worker
    line: deque[tuple[str, int]] = deque()
    free_ns = made = received = 0
    in_hand = False
    happened: list[tuple[Any, ...]] = []

    def later(time_ns: int, kind: str, worker: int) -> None:
        nonlocal made
        heapq.heappush(events, (time_ns, made, kind, worker))
        made += 1

    def begin_next(now_ns: int) -> None:
        nonlocal free_ns, in_hand
        in_hand = bool(line)
        if line:
            free_ns = max(free_ns, now_ns) + message_ns
            later(free_ns, "served", line[0][1])

    def wait_in_line(now_ns: int, kind: str, worker: int) -> None:
        line.append((kind, worker))
        if not in_hand:
            begin_next(now_ns)

    for worker, took_ns in enumerate(compute_ns):
        later(took_ns, "computed", worker)
    while received < pushes:
        now_ns, _, kind, worker = heapq.heappop(events)
        if kind == "computed":
            later(now_ns, "arrives", worker)
        elif kind == "arrives":
            wait_in_line(now_ns, "push", worker)
        elif kind == "pull":
            happened.append((now_ns, "pull", worker))
            later(now_ns + compute_ns[worker], "computed", worker)
        else:
            what, worker = line.popleft()
            if what == "answer":
                later(now_ns, "pull", worker)
            else:
                received += 1
                happened.append((now_ns, "receive", worker))
                before = oracle.version
                _, granted = oracle.push(worker, now_ns)
                free_ns = max(free_ns, now_ns) + update_ns * (oracle.version - before)
                for other in sorted(granted, key=lambda granted: (granted != worker, granted)):  # in the scheduler's order
                    wait_in_line(now_ns, "answer", other)
            begin_next(now_ns)
    return happened
