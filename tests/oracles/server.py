"""What the server of every oracle keeps: who is live, push counts, who waits, how many steps were granted.

It decides nothing: when pushes are folded and when workers are granted stands in the discipline's own file.
Names are those of DSSP (Zhao et al., Algorithm 1): `t[i]` is "the number of push requests received from worker i so
far", and to send OK is to grant.
"""


class Server:
    """The ledger of `workers` live workers, all of them granted their first step and none of them waiting.

    An event (push or leave) returns (workers whose pushes are folded now, workers granted now), both in worker order.
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
