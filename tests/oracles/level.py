"""BSP with batches by speed: LB-BSP (Chen, Weng, Wang, Li and Li, "Semi-Dynamic Load Balancing", 2020, section 3.1).

"Load balancing among workers [...] by coordinately adjusting the sample batch size of each worker", so that all are done at
the same time, while the sum of all batches stays: the gradient is the mean over all samples of a version.
"""

import heapq

from tests.oracles.bsp import Bsp
from tests.oracles.plays import Plays
from tests.oracles.speed import Speed


class LevelBsp(Bsp):
    """Each version's permission carries a batch size. A worker's time as a function of its batch is learned as R2SP does."""

    tune = True

    def __init__(self, workers: int, tune: bool) -> None:
        assert tune
        super().__init__(workers)
        self.batch = dict.fromkeys(range(workers), 0)
        self.base_batch: dict[int, int] = {}
        self.permitted_ns: dict[int, int] = {}
        self.speed = {worker: Speed() for worker in range(workers)}

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:  # type: ignore[override]
        self.clock_event(now_ns)
        self.base_batch.setdefault(p, samples)
        if p in self.permitted_ns:
            self.speed[p].add(samples, self.now_ns - self.permitted_ns[p])
        return super().push(p, now_ns)

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        return super().leave(worker, now_ns)

    def join(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.batch[worker], self.speed[worker] = 0, Speed()
        return super().join(worker, now_ns)

    def remove(self, worker: int) -> None:
        super().remove(worker)
        del self.batch[worker], self.speed[worker]
        self.base_batch.pop(worker, None)
        self.permitted_ns.pop(worker, None)

    def send_ok(self, workers: set[int]) -> list[int]:
        permitted = super().send_ok(workers)
        if permitted:
            self.batch = self.level()
            self.permitted_ns.update(dict.fromkeys(permitted, self.now_ns))
        return permitted

    def level(self) -> dict[int, int]:
        """Give sample after sample, of the sum of the first batches, to the worker that is soonest done with one more."""
        lines = {worker: line for worker in self.t if (line := self.speed[worker].line()) is not None}
        if len(lines) < len(self.t):
            return {worker: self.base_batch[worker] for worker in self.t}
        batch = dict.fromkeys(self.t, 1)
        done = [(a + k * 2.0, worker) for worker, (a, k) in lines.items()]
        heapq.heapify(done)
        for _ in range(sum(self.base_batch[worker] for worker in self.t) - len(batch)):
            _, worker = heapq.heappop(done)
            batch[worker] += 1
            a, k = lines[worker]
            if batch[worker] < 16 * self.base_batch[worker]:
                heapq.heappush(done, (a + k * (batch[worker] + 1.0), worker))
        return batch


PLAYS = Plays(LevelBsp, specs=("bsp,tune=true",), simulated=("bsp,tune=true",))
