"""What the server of every oracle keeps: who is live, push counts, who waits, how many steps were granted.

It decides nothing: when pushes are folded and when workers are granted stands in the discipline's own file.
Names are those of DSSP (Zhao et al., Algorithm 1): `t[i]` is "the number of push requests received from worker i so
far", and to send OK is to grant.
"""


class Server:
    """The ledger of `workers` live workers, all of them granted their first step and none of them waiting.

    An event (push or leave) returns (workers whose pushes are folded now, workers granted now), both in worker order.

    A discipline that waits for time as well has a third event: `fire`, due at `due_ns`. Whoever drives it fires every
    timer that is due at or before the time of an event before that event, each stamped with its own deadline.
    """

    def __init__(self, workers: int) -> None:
        self.t = dict.fromkeys(range(workers), 0)
        self.granted = dict.fromkeys(range(workers), 1)
        self.waiting: set[int] = set()
        self.version = 0
        # Place of each worker's latest push in the order of arrival. Before its first push a worker stands before all
        # arrivals, by its index.
        self.arrival = {worker: worker - workers for worker in range(workers)}
        self.arrivals = 0
        self.dropped = dict.fromkeys(range(workers), 0)  # of those who left too: a count of what was, not a state
        self.now_ns = 0

    def due_ns(self) -> int | None:
        """The deadline of the next timer; None: no timer runs."""
        return None

    def fire(self) -> tuple[list[int], list[int]]:
        """The event of the next timer, at its deadline."""
        raise AssertionError("no timer runs")

    def clock_event(self, now_ns: int) -> None:
        """Time never goes backwards: an event earlier than the one before it counts at that one's time."""
        due_ns = self.due_ns()
        assert due_ns is None or due_ns > now_ns, f"the timer due at {due_ns} was not fired before the event at {now_ns}"
        self.now_ns = max(self.now_ns, now_ns)

    def clock_timer(self) -> None:
        """A timer's event has its deadline as its time, however late it is fired."""
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
        """The worker is no longer counted anywhere."""
        del self.t[worker], self.granted[worker], self.arrival[worker]
        self.waiting.discard(worker)

    def slowest(self) -> int:
        """The live worker with the fewest pushes; of several, the one that reached this count first."""
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
