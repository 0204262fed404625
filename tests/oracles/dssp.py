"""Dynamic stale synchronous parallel: Algorithms 1 and 2 of Zhao et al., transcribed as printed.

The oracle does not repair the paper. The print is ambiguous in three places, and arguments choose the reading: `release`
(what line 17 waits for), `hard_bound` and `bound` (whether Theorem 2's s_U is kept, by grants or by pushes), and `credit`
(whether line 14's OK is one of the r* further iterations). Times are integers, in ns.
"""

from tests.oracles.plays import Plays
from tests.oracles.server import Server


def synchronization_controller(p: list[int], slowest: list[int], r_max: int) -> int:
    """Algorithm 2, lines 4 to 9, given the rows A[p] and A[slowest], latest push first.

    Returns r*, the number of extra iterations; the smallest if several are equally good, and 0 while either row holds
    fewer than two pushes, because it then has no interval.
    """
    if len(p) < 2 or len(slowest) < 2:
        return 0
    interval_p_ns = p[0] - p[1]  # line 4: I_p <- A[p][0] - A[p][1]
    interval_slowest_ns = slowest[0] - slowest[1]  # line 5: I_slowest <- A[slowest][0] - A[slowest][1]
    # Line 6: Sim_p[0] <- A[p][0]; Sim_p[i] <- Sim_p[0] + i * I_p where 0 < i <= r_max.
    sim_p_ns = [p[0] + i * interval_p_ns for i in range(r_max + 1)]
    # Line 7: the same for the slowest worker, "with Sim_slowest[0] <- A[slowest][0] + I_slowest".
    sim_slowest_ns = [slowest[0] + interval_slowest_ns + i * interval_slowest_ns for i in range(r_max + 1)]
    # Line 8: the r "that minimizes |Sim_slowest[k] - Sim_p[r]| for all k in [0, r_max] and r in [0, r_max]".
    best_r, least_wait_ns = 0, abs(sim_slowest_ns[0] - sim_p_ns[0])
    for r in range(r_max + 1):
        for k in range(r_max + 1):
            wait_ns = abs(sim_slowest_ns[k] - sim_p_ns[r])
            if wait_ns < least_wait_ns:
                best_r, least_wait_ns = r, wait_ns
    return best_r  # line 9: return r*


class Dssp(Server):
    """The server's side of Algorithm 1 with s_L = `low` and s_U = `high`.

    `release` chooses the reading of line 17, "wait until the slowest worker sends the next push request(s) so that
    t_p - t_slowest <= s_L": "printed" takes the whole sentence; "next-push" takes its first half only, up to the instant
    that Algorithm 2 minimizes the wait to. With `hard_bound` no worker is granted while it is more than s_U ahead; with `bound`
    "push" none is granted if its push could then be more than s_U ahead. `credit`: "listed" takes lines 12 to 14 to the letter;
    "prose" is "worker 1 should continue running 3 more iterations [...], 3 is the r* returned" (section III.C, Figure 2).
    """

    def __init__(
        self,
        workers: int,
        low: int,
        high: int,
        release: str = "next-push",
        hard_bound: bool = False,
        bound: str = "none",
        credit: str = "listed",
    ) -> None:
        super().__init__(workers)
        self.low = low
        self.high = high
        self.release = release
        self.largest_lead_at_a_grant = high if hard_bound else float("inf")
        if bound == "push":
            self.largest_lead_at_a_grant = high - 1
        self.credit = credit
        self.r = dict.fromkeys(range(workers), 0)  # "r_p ... initialized to zero at the very beginning"
        self.A: dict[int, list[int]] = {worker: [] for worker in range(workers)}

    def push(self, p: int, now_ns: int) -> tuple[list[int], list[int]]:
        slowest_pushes = p == self.slowest()
        self.count_push(p)  # line 1: t_p = t_p + 1
        # Algorithm 2, lines 1 and 2: A[p][1] <- A[p][0]; A[p][0] <- push_p. Done on every push, not only on those that
        # call the controller: "Table A stores the timestamps of two latest push requests by all workers".
        self.A[p] = [now_ns, *self.A[p][:1]]
        self.version += 1  # line 2: update the server weights
        released = self.who_stops_waiting(slowest_pushes)
        if self.sends_ok(p):
            released.add(p)
        else:
            self.waiting.add(p)
        return [p], self.send_ok(released)

    def sends_ok(self, p: int) -> bool:
        """Algorithm 1, server, lines 3 to 16: whether p gets its OK now; otherwise line 17 holds for it."""
        if self.gap(p) > self.largest_lead_at_a_grant:
            return False  # the worker keeps its credit, if any
        if self.r[p] > 0:  # line 3: if r_p > 0
            self.r[p] -= 1  # line 4: r_p = r_p - 1
            return True  # line 5: send OK to worker p
        if self.gap(p) <= self.low:  # lines 7 and 8: if t_p - t_slowest <= s_L
            return True  # line 9: send OK to worker p
        if self.t[p] == max(self.t.values()):  # line 11: if t_p is the fastest worker
            # Line 12: r_p <- synchronization_controller(clock_p^push, r_p)
            self.r[p] = synchronization_controller(self.A[p], self.A[self.slowest()], self.high - self.low)
            grants_left = self.largest_lead_at_a_grant - self.gap(p) + 1  # before p waits, if the slowest does not push
            if self.credit == "prose":
                self.r[p] = min(self.r[p], grants_left)
                sends = self.r[p] > 0
                self.r[p] -= sends  # the OK is the first of the r* further iterations
                return sends
            self.r[p] = min(self.r[p], grants_left - 1)
            # Lines 13 and 14: if r_p > 0, send OK to worker p. As listed, r_p is not decremented: p begins r* + 1 steps.
            return self.r[p] > 0
        return False

    def join(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.r[worker], self.A[worker] = 0, []
        return super().join(worker, now_ns)

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        slowest_leaves = worker == self.slowest()
        self.remove(worker)
        del self.r[worker], self.A[worker]
        return [], self.send_ok(self.who_stops_waiting(slowest_leaves))

    def who_stops_waiting(self, slowest_moved: bool) -> set[int]:
        """Line 17: the waiting workers that this event releases. `slowest_moved`: the slowest has just pushed or left."""
        released = {worker for worker in self.waiting if self.gap(worker) <= self.low}
        if self.release == "next-push" and slowest_moved:
            released |= self.waiting
        return {worker for worker in released if self.gap(worker) <= self.largest_lead_at_a_grant}


_RANGES = ("dssp:3,15", "dssp:0,4", "dssp:2,2")
_READINGS = ("", ",hard_bound=true", ",release=printed", ",release=printed,hard_bound=true", ",bound=push", ",credit=prose")
PLAYS = Plays(
    Dssp,
    specs=(
        *(bounds + reading for reading in _READINGS for bounds in _RANGES),
        "dssp:1,4,release=printed,bound=push,credit=prose",
        "dssp:1,1,bound=push",
        "dssp:0,4,hard_bound=true,credit=prose",
        "dssp:0,4,combine=true",
        "dssp:3,15,release=printed,hard_bound=true,combine=true",
    ),
    simulated=("dssp:1,6", "dssp:1,6,bound=push,credit=prose", "dssp:1,6,release=printed,hard_bound=true"),
    timed=False,
    events=35_000,
)
