"""The state that every oracle's server keeps: live workers, push counts, waiting workers, and granted steps.

It decides nothing: each discipline's own file decides when pushes are folded and when workers are granted.
Names are those of DSSP (Zhao et al., Algorithm 1): `t[i]` is "the number of push requests received from worker i so
far", and to send OK means to grant.
"""


class Server:
    """The state of `workers` live workers. At the start all are granted their first step, and none waits.

    An event (push, leave or join) returns (workers whose pushes are folded now, workers granted now), both in worker order.

    A timed discipline has a third event: `fire`, due at `due_ns`. Before an event the caller fires every timer that is due
    at or before the event's time, each stamped with its own deadline.
    """

    def __init__(self, workers: int) -> None:
        self.t = dict.fromkeys(range(workers), 0)
        self.granted = dict.fromkeys(range(workers), 1)
        self.waiting: set[int] = set()
        self.version = 0
        # The rank of each worker's latest push in the order of arrival. Workers without a push come first, by index.
        self.arrival = {worker: worker - workers for worker in range(workers)}
        self.arrivals = 0
        self.dropped = dict.fromkeys(range(workers), 0)  # keeps the counts of workers that left
        self.now_ns = 0

    def due_ns(self) -> int | None:
        """The deadline of the next timer; None if no timer runs."""
        return None

    def fire(self) -> tuple[list[int], list[int]]:
        """Handle the next timer's event, at its deadline."""
        raise AssertionError("no timer runs")

    def clock_event(self, now_ns: int) -> None:
        """Advance the clock to an event. Time never goes back: an event earlier than the last one takes the last one's time."""
        due_ns = self.due_ns()
        assert due_ns is None or due_ns > now_ns, f"the timer due at {due_ns} was not fired before the event at {now_ns}"
        self.now_ns = max(self.now_ns, now_ns)

    def clock_timer(self) -> None:
        """Advance the clock to a timer's deadline, which is the time of its event, however late it fires."""
        due_ns = self.due_ns()
        assert due_ns is not None, "no timer runs"
        self.now_ns = max(self.now_ns, due_ns)

    def count_push(self, p: int) -> None:
        """Algorithm 1, server, line 1: t_p = t_p + 1."""
        assert p in self.t, f"worker {p} has left"
        assert p not in self.waiting, f"worker {p} waits, so it has no step to push"
        self.t[p] += 1
        self.arrival[p] = self.arrivals
        self.arrivals += 1

    def remove(self, worker: int) -> None:
        """Remove the worker from all state except `dropped`."""
        del self.t[worker], self.granted[worker], self.arrival[worker]
        self.waiting.discard(worker)

    def join(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        """Admit a worker that had left, at the slowest live worker's count and with its next step granted."""
        self.clock_event(now_ns)
        self.t[worker] = min(self.t.values(), default=0)
        self.granted[worker] = self.t[worker] + 1
        self.arrival[worker] = self.arrivals
        self.arrivals += 1
        return [], [worker]

    def slowest(self) -> int:
        """The live worker with the fewest pushes; among equals the one that reached this count first."""
        return min(self.t, key=lambda worker: (self.t[worker], self.arrival[worker]))

    def gap(self, worker: int) -> int:
        """t_worker - t_slowest."""
        return self.t[worker] - min(self.t.values())

    def send_ok(self, workers: set[int]) -> list[int]:
        """Grant the next step to each of `workers`; return them in worker order."""
        self.waiting -= workers
        for worker in workers:
            self.granted[worker] += 1
        return sorted(workers)
