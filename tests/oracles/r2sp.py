"""Round-robin synchronous parallel (R2SP, Chen et al.): the coordinator of Algorithm 1, with sections III to V.

Algorithm 1 leaves lines 2 and 3 of the coordinator to the text: "issue Permission-to-Proceed signal to appropriate
worker at appropriate time". Where the text is ambiguous as well, a comment at the line states our choice. Learning rates
are left out. Times are integers, in ns.
"""

import math

from tests.oracles.plays import Plays
from tests.oracles.server import Server
from tests.oracles.speed import Speed


class RoundRobin(Server):
    """Permissions in the fixed order 0, 1, ..., N - 1, a gap apart; a subclass decides when updates are made.

    Workers that have left are skipped. One that joins has the next turn, and its first step begins with a permission. A
    worker's Request-to-Proceed (worker, line 6) follows its push immediately, so one event stands for both.
    """

    def __init__(self, workers: int, relax: float) -> None:
        super().__init__(workers)
        assert 0 <= relax <= 1, 'section V: "a relaxation factor r in [0, 1]"'
        self.relax = relax
        self.order = list(range(workers))
        self.permission_turn = 0
        # The coordinator did not issue the permissions of the start, so the first one that it issues follows none.
        self.last_permission_ns: int | None = None
        self.permitted_ns: dict[int, int] = {}  # the time of each worker's latest permission; none at the start
        self.has_pushed: set[int] = set()
        self.ema_ns: dict[int, int] = {}

    def next_in_order(self, worker: int) -> int:
        """The first live worker after `worker` in the fixed order, which is a ring."""
        place = self.order.index(worker) + 1
        return next(other for other in [*self.order[place:], *self.order[:place]] if other in self.t)

    def may_proceed(self, worker: int) -> bool:
        """Whether the worker has requested, and every condition other than its turn and the gap holds."""
        return worker in self.waiting

    def profile(self, worker: int) -> int | None:
        """Section V, "Profiling iteration time": "we use the EMA method to accurately learn the value of T".

        Returns the time of the iteration that ends with this push, or None for a worker's first: no permission began those
        of the start. The weight of a new sample is 1/8, in whole ns, rounded towards the old value.
        """
        if worker not in self.has_pushed:
            self.has_pushed.add(worker)
            return None
        sample_ns = self.now_ns - self.permitted_ns[worker]
        if worker not in self.ema_ns:
            self.ema_ns[worker] = sample_ns
        else:
            difference_ns = sample_ns - self.ema_ns[worker]
            self.ema_ns[worker] += difference_ns // 8 if difference_ns >= 0 else -(-difference_ns // 8)
        return sample_ns

    def gap_ns(self) -> int:
        """Sections III-B and V: rT/N, where T is "determined by the slowest worker" (section IV); 0 while T is unknown."""
        slowest_ns = max((self.ema_ns[worker] for worker in self.t if worker in self.ema_ns), default=0)
        return int(self.relax * slowest_ns / len(self.t))

    def earliest_ns(self) -> int | None:
        """The earliest time at which the next worker in order may proceed; None while it may not at any time."""
        if not self.t or not self.may_proceed(self.permission_turn):
            return None
        if self.last_permission_ns is None:
            return self.now_ns
        return self.last_permission_ns + self.gap_ns()

    def issue_permissions(self) -> list[int]:
        """Coordinator, line 3: issue Permission-to-Proceed signal to appropriate worker at appropriate time.

        That is "which worker has the next turn and the earliest time for that worker to proceed, so as to maintain the
        worker update order (Sec. III-C) and the inter-update gap (Sec. III-B)".
        """
        permitted: list[int] = []
        while (earliest_ns := self.earliest_ns()) is not None and earliest_ns <= self.now_ns:
            worker = self.permission_turn
            permitted += self.send_ok({worker})
            self.permitted_ns[worker] = self.last_permission_ns = self.now_ns
            self.permission_issued(worker)
            self.permission_turn = self.next_in_order(worker)
        return sorted(permitted)

    def permission_issued(self, worker: int) -> None:
        """Act on an issued permission; a subclass attaches a batch size to it."""

    def remove(self, worker: int) -> None:
        super().remove(worker)
        self.permitted_ns.pop(worker, None)
        self.has_pushed.discard(worker)
        self.ema_ns.pop(worker, None)
        if self.t and worker == self.permission_turn:
            self.permission_turn = self.next_in_order(worker)

    def join(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.order.remove(worker)
        self.order.insert(self.order.index(self.permission_turn) if self.t else 0, worker)
        super().join(worker, now_ns)
        self.granted[worker] -= 1
        self.waiting.add(worker)
        self.permission_turn = worker
        return [], self.issue_permissions()

    def due_ns(self) -> int | None:
        return self.earliest_ns()

    def fire(self) -> tuple[list[int], list[int]]:
        self.clock_timer()
        return [], self.issue_permissions()


class R2sp(RoundRobin):
    """Updates and permissions both in the fixed order; with `tune`, each permission carries a batch size.

    `batch` is the tuned batch size that came with each worker's latest permission.
    """

    def __init__(self, workers: int, relax: float, tune: bool = False) -> None:
        super().__init__(workers, relax)
        self.tune = tune
        self.update_turn = 0
        self.pushed: set[int] = set()  # workers whose push waits for its turn
        self.batch = dict.fromkeys(range(workers), 0)  # 0 before the first
        self.base_batch: dict[int, int] = {}  # each worker's I_0
        self.speed = {worker: Speed() for worker in range(workers)}

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        self.count_push(p)  # worker, line 5: push u_k to PS
        self.waiting.add(p)  # worker, lines 6 and 7: send Request-to-Proceed, block before Permission-to-Proceed
        self.pushed.add(p)
        self.base_batch.setdefault(p, samples)
        sample_ns = self.profile(p)
        if sample_ns is not None:
            self.speed[p].add(samples, sample_ns)
        return self.update_in_order(), self.issue_permissions()

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        folded = []
        if worker in self.pushed:  # its turn will not come any more
            self.pushed.remove(worker)
            self.version += 1
            folded.append(worker)
        self.remove(worker)
        return folded + self.update_in_order(), self.issue_permissions()

    def join(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        if not self.t or self.may_proceed(self.update_turn):  # no other worker has a permission
            self.update_turn = worker
        self.batch[worker], self.speed[worker] = 0, Speed()
        return super().join(worker, now_ns)

    def remove(self, worker: int) -> None:
        super().remove(worker)
        del self.batch[worker], self.speed[worker]
        self.base_batch.pop(worker, None)
        if self.t and worker == self.update_turn:
            self.update_turn = self.next_in_order(worker)

    def update_in_order(self) -> list[int]:
        """Section III-C: "workers make updates in a fixed round-robin order". Returns them in that order."""
        updated = []
        while self.update_turn in self.pushed:
            self.pushed.remove(self.update_turn)
            self.version += 1  # parameter server, line 2: omega <- omega + u_k
            updated.append(self.update_turn)
            self.update_turn = self.next_in_order(self.update_turn)
        return updated

    def may_proceed(self, worker: int) -> bool:
        return super().may_proceed(worker) and worker not in self.pushed

    def permission_issued(self, worker: int) -> None:
        """Worker, line 7: "the Permission-to-Proceed signal and the tuned batch size"."""
        if self.tune:
            self.batch[worker] = self.tuned_batch(worker)

    def tuned_batch(self, worker: int) -> int:
        """Coordinator, line 2: adjust batch sizes of the faster workers (if any) to eliminate their resource wastage.

        "So as to equalize their iteration time": to the longest time that a live worker takes for its base batch I_0. The
        result is never below I_0 and never above 16 I_0. A worker without a known time keeps I_0.
        """
        base = self.base_batch.get(worker, 0)  # 0: a joiner that has pushed nothing, which chooses by itself
        own = self.speed[worker].line()
        if own is None:
            return base
        target_ns = 0.0
        for other in self.t:
            line = self.speed[other].line()
            if line is not None:
                a, k = line
                target_ns = max(target_ns, a + k * self.base_batch[other])
        a, k = own
        return max(base, min(16 * base, math.floor((target_ns - a) / k)))


PLAYS = Plays(
    R2sp, specs=("r2sp:0", "r2sp:0.8", "r2sp:1,tune=true", "r2sp:0.8,tune=true"), simulated=("r2sp:0.8", "r2sp:0.6,tune=true")
)
