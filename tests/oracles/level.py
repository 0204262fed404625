"""BSP with batches by speed: LB-BSP (Chen, Weng, Wang, Li and Li, "Semi-Dynamic Load Balancing", 2020, section 3.1).

"Load balancing among workers [...] by coordinately adjusting the sample batch size of each worker", so that all are done at
the same time, while the sum of all batches stays: the gradient is the mean over all samples of a version.
"""

import heapq

from tests.oracles.bsp import Bsp
from tests.oracles.plays import Plays


class LevelBsp(Bsp):
    """Each version's permission carries a batch size. A worker's time as a function of its batch is learned as R2SP does."""

    tune = True

    def __init__(self, workers: int, tune: bool) -> None:
        assert tune
        super().__init__(workers)
        self.batch = dict.fromkeys(range(workers), 0)
        self.base_batch: dict[int, int] = {}
        self.permitted_ns: dict[int, int] = {}
        self.sums = {worker: (0.0, 0.0, 0.0, 0.0, 0.0) for worker in range(workers)}

    def push(self, p: int, now_ns: int, timestamp: int, samples: int = 0) -> tuple[list[int], list[int]]:  # type: ignore[override]
        self.clock_event(now_ns)
        self.base_batch.setdefault(p, samples)
        if p in self.permitted_ns:
            b, t = float(samples), float(self.now_ns - self.permitted_ns[p])
            n, sum_b, sum_t, sum_bb, sum_bt = (7 / 8 * total for total in self.sums[p])
            self.sums[p] = (n + 1, sum_b + b, sum_t + t, sum_bb + b * b, sum_bt + b * t)
        return super().push(p, now_ns)

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.clock_event(now_ns)
        return super().leave(worker, now_ns)

    def join(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        self.batch[worker], self.sums[worker] = 0, (0.0, 0.0, 0.0, 0.0, 0.0)
        return super().join(worker, now_ns)

    def remove(self, worker: int) -> None:
        super().remove(worker)
        del self.batch[worker], self.sums[worker]
        self.base_batch.pop(worker, None)
        self.permitted_ns.pop(worker, None)

    def send_ok(self, workers: set[int]) -> list[int]:
        permitted = super().send_ok(workers)
        if permitted:
            self.batch = self.level()
            self.permitted_ns.update(dict.fromkeys(permitted, self.now_ns))
        return permitted

    def line(self, worker: int) -> tuple[float, float]:
        """(a, k) of time = a + k * batch, by weighted least squares; k alone where that is no line upwards; 0, 0 if unknown."""
        n, sum_b, sum_t, sum_bb, sum_bt = self.sums[worker]
        if sum_b == 0:
            return 0.0, 0.0
        denominator = n * sum_bb - sum_b * sum_b
        if 1000 * denominator > n * sum_bb:
            k = (n * sum_bt - sum_b * sum_t) / denominator
            a = (sum_t - k * sum_b) / n
            if k > 0 and a >= 0:
                return a, k
        return 0.0, sum_t / sum_b

    def level(self) -> dict[int, int]:
        """Give sample after sample, of the sum of the first batches, to the worker that is soonest done with one more."""
        lines = {worker: self.line(worker) for worker in self.t}
        if any(k <= 0 for _, k in lines.values()):
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
