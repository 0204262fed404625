"""A job of several shards whose workers die and join, in plain Python: each shard is a server with clocks of its own.

A worker pushes to all shards at once, and each shard receives the push when it drains. A step begins when every shard has
granted it. A joiner starts at the slowest live worker's clock, in each shard by itself and at a time of its own. The
worker has one count of steps, so it remembers by how much each shard's clock of it is ahead of that count.
"""

from collections.abc import Callable


class Shard:
    """One shard: clocks and grants of the live workers. `bound`: the lead at a grant; -1: the next version grants (bsp)."""

    def __init__(self, workers: list[int], bound: int) -> None:
        self.bound = bound
        self.clock = dict.fromkeys(workers, 0)
        self.granted = dict.fromkeys(workers, 1)
        self.waiting: set[int] = set()
        self.kept: set[int] = set()  # lanes with a push in a sum that is not complete
        self.generation = dict.fromkeys(workers, 0)
        self.drained = 0  # pushes of the job's log
        self.worst_lead = 0  # at any grant so far

    def slowest(self) -> int:
        """The slowest live worker's clock."""
        return min(self.clock.values())

    def push(self, worker: int) -> None:
        """Receive a push."""
        assert worker not in self.waiting, f"worker {worker} pushes a step that this shard did not grant"
        self.clock[worker] += 1
        self.waiting.add(worker)
        self.grant()

    def grant(self) -> None:
        """Grant each worker that waits and may begin its next step."""
        if self.bound < 0:
            ready = set(self.waiting) if self.waiting == set(self.clock) else set()
            self.kept = set() if ready else self.kept | self.waiting
        else:
            ready = {worker for worker in self.waiting if self.clock[worker] - self.slowest() <= self.bound}
        for worker in ready:
            self.worst_lead = max(self.worst_lead, self.clock[worker] - self.slowest())
            self.granted[worker] = self.clock[worker] + 1
        self.waiting -= ready

    def leave(self, worker: int) -> None:
        """Retire a worker that died."""
        del self.clock[worker], self.granted[worker]
        self.waiting.discard(worker)
        if self.clock:
            self.grant()

    def join(self, worker: int, clock: int) -> None:
        """Admit a worker at this clock, with its first step granted."""
        self.clock[worker], self.granted[worker] = clock, clock + 1
        self.worst_lead = max(self.worst_lead, clock - self.slowest())


Rule = Callable[[list[Shard], Shard, int], int]


def own_clock(shards: list[Shard], shard: Shard, worker: int) -> int:
    """The rule: the clock of the slowest worker in this shard. A shard without a worker, a plain choice, begins at 0."""
    return shard.slowest()


def first_clock(shards: list[Shard], shard: Shard, worker: int) -> int:
    """What it was before: the clock that the first shard gave, in all shards."""
    return shard.slowest() if shard is shards[0] else shards[0].clock[worker]


class Job:
    """`workers` workers and `shards` shards; `rule` gives a joiner's clock in a shard."""

    def __init__(self, workers: int, shards: int, bound: int, rule: Rule = own_clock) -> None:
        self.shards = [Shard(list(range(workers)), bound) for _ in range(shards)]
        self.rule = rule
        self.log: list[int] = []  # the worker of each push, in the order of posts
        self.generation = dict.fromkeys(range(workers), 0)
        self.dead: set[int] = set()
        self.joining: set[int] = set()
        self.steps = dict.fromkeys(range(workers), 0)  # as each worker counts them
        self.ahead = {worker: [0] * shards for worker in range(workers)}

    def may_push(self, worker: int) -> bool:
        """Whether every shard has granted the worker's next step."""
        if worker in self.dead or worker in self.joining:
            return False
        granted = [shard.granted[worker] - ahead for shard, ahead in zip(self.shards, self.ahead[worker], strict=True)]
        return min(granted) > self.steps[worker]

    def push(self, worker: int) -> None:
        """Post a push; each shard receives it at its next drain."""
        self.log.append(worker)
        self.steps[worker] += 1

    def die(self, worker: int) -> None:
        """A worker's process ends. Each shard receives what it posted, and retires it then."""
        self.dead.add(worker)
        self.joining.discard(worker)

    def begin_join(self, worker: int) -> None:
        """A process claims a dead worker's lane; each shard admits it at a drain."""
        self.dead.discard(worker)
        self.joining.add(worker)
        self.generation[worker] += 1

    def drain(self, number: int) -> None:
        """One shard receives what is posted, retires who died, and admits who joins, once the first shard has."""
        shard = self.shards[number]
        for worker in self.log[shard.drained :]:
            shard.push(worker)
        shard.drained = len(self.log)
        for worker in [*shard.clock]:
            if worker in self.dead or shard.generation[worker] != self.generation[worker]:
                shard.leave(worker)
        for worker in sorted(self.joining - set(shard.clock) - shard.kept):
            if number == 0 or self._is_in(0, worker):
                shard.join(worker, self.rule(self.shards, shard, worker))
                shard.generation[worker] = self.generation[worker]
        for worker in sorted(self.joining):
            if all(self._is_in(each, worker) for each in range(len(self.shards))):
                self.joining.discard(worker)
                clocks = [each.clock[worker] for each in self.shards]
                self.steps[worker], self.ahead[worker] = clocks[0], [clock - clocks[0] for clock in clocks]

    def _is_in(self, number: int, worker: int) -> bool:
        shard = self.shards[number]
        return worker in shard.clock and shard.generation[worker] == self.generation[worker]
