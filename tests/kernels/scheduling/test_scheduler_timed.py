"""The compiled scheduler's disciplines of versions, counts, turns and timers against their oracles, event by event.

The rows here are the oracles that take timestamps, such as those of backup workers, PSP, softsync and R2SP. Both sides see
the same pushes, leaves and timers and must answer every one alike. What the papers promise is checked beside that on the
compiled scheduler's own numbers, so that an error shared with the oracle would show. Speed is not tested here.
"""

import heapq
import random

import pytest

from tests.kernels.scheduling.test_scheduler import SPEED_MODELS, Speed, Trial, play_random_traffic
from tests.oracles.by_hand import SEQUENCES, Sequence
from tests.oracles.table import PLAYED, Play
from tests.support.sizes import sample_and_full

ROWS = [played for played in PLAYED if played.plays.timed]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


class TimedTrial(Trial):
    """A trial whose pushes have a timestamp and samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read = dict.fromkeys(range(self.workers), 0)  # the version at each worker's latest grant
        self.carried: dict[int, list[int]] = {worker: [] for worker in range(self.workers)}  # of pushes in no fold yet
        self.dropped = 0
        self.pusher: int | None = None  # of the event
        self.leaver: int | None = None
        self.left = False
        self.turn = 0  # r2sp: whose update is next

    def push(self, worker: int, now_ns: int, *computed: int) -> list[int]:
        self.carried[worker].append(computed[0])
        self.pusher, self.dropped_before = worker, self.scheduler.dropped(worker)
        return super().push(worker, now_ns, *computed)

    def leave(self, worker: int, now_ns: int) -> list[int]:
        self.left, self.leaver = True, worker
        return super().leave(worker, now_ns)

    def step(self, kind: str, *arguments: int) -> list[int]:
        granted = super().step(kind, *arguments)
        self.read |= dict.fromkeys(granted, self.scheduler.version)
        self.pusher = self.leaver = None
        return granted

    def compare_state(self) -> None:
        super().compare_state()
        oracle, scheduler = self.oracle, self.scheduler
        if getattr(oracle, "tune", False):
            tuned = [w for w in oracle.t if oracle.granted[w] > 1]  # no batch has come with the grants of the start
            batches = [oracle.batch[w] for w in tuned]
            assert [scheduler.batch(w) for w in tuned] == batches, f"batches of {tuned}, not {batches}; {self.where()}"

    def check_folds(self, folded: list[int]) -> None:
        if self.pusher is not None and self.scheduler.dropped(self.pusher) > self.dropped_before:
            self.carried[self.pusher].pop()
            self.dropped += 1
        fold = self.policy.fold
        # One version for the sum of them, or one for each.
        first = self.scheduler.version - (len(folded) if fold == "in-order" else bool(folded))
        for place, worker in enumerate(folded):
            assert self.carried[worker], f"worker {worker} is folded without a push; {self.where()}"
            timestamp = self.carried[worker].pop(0)
            if fold in ("all", "quorum"):
                # A worker that waits for some shards only may be a version ahead of this one.
                fits = timestamp == first or (self.policy.pull < 1 and timestamp > first)
                assert fits, f"a gradient of {timestamp} folded at {first}; {self.where()}"
            if fold == "in-order":
                # Section III-C: "given N workers, the worst-case staleness under the R2SP scheme is N - 1".
                staleness = first + place - timestamp
                assert self.left or staleness < self.workers, f"staleness {staleness}; {self.where()}"
        if fold == "in-order":
            live = self.oracle.t
            in_order = folded[1:] if folded and folded[0] == self.leaver else folded
            for worker in in_order:
                while self.turn not in live:
                    self.turn = (self.turn + 1) % self.workers
                assert worker == self.turn, f"update of {worker} in the turn of {self.turn}; {self.where()}"
                self.turn = (self.turn + 1) % self.workers
        if fold != "quorum":
            assert self.dropped == 0, f"{self.dropped} dropped; {self.where()}"
        kept = sum(len(timestamps) for timestamps in self.carried.values())
        assert self.pushes == self.folded + self.dropped + kept, f"a push is lost; {self.where()}"

    def check_promises(self, granted: list[int]) -> None:
        scheduler, live = self.scheduler, list(self.oracle.t)
        for worker in live:
            ahead = scheduler.granted(worker) - scheduler.clock(worker)
            if scheduler.waiting(worker):
                assert ahead <= 0, f"worker {worker} waits with {ahead} steps in hand; {self.where()}"
            else:
                assert ahead == 1, f"worker {worker} has {ahead} steps in hand; {self.where()}"
        if live and scheduler.due_ns() is None:
            assert not all(scheduler.waiting(worker) for worker in live), f"all wait for ever; {self.where()}"
        if self.policy.at_once:
            assert not any(scheduler.waiting(worker) for worker in live), f"someone waits; {self.where()}"


def run_trial(trial: TimedTrial, rng: random.Random, speed: Speed, events: int) -> int:
    """Feed at most `events` events; fewer when all have left. Returns how many."""
    leave_rate = rng.choice((0.0, 0.5 / events, 4.0 / events, 0.02))
    late_rate = rng.choice((0.0, 0.05))
    odd_rate = rng.choice((0.0, 0.01, 0.1)) if trial.policy.pull < 1 else 0.0
    pace = [rng.choice((1.0, 3.1, rng.uniform(1.0, 3.1))) for _ in range(trial.workers)]
    base = [rng.choice((1, 8, 32, rng.randint(1, 512))) for _ in range(trial.workers)]
    constant = rng.choice((0.0, 0.3))  # the share of a step's time that does not grow with its batch
    batch = list(base)
    oracle, live = trial.oracle, trial.oracle.t
    now_ns = rng.choice((0, 7, 10**15))

    def next_push(worker: int) -> tuple[int, float, int]:
        grows = constant + (1 - constant) * batch[worker] / base[worker]
        return now_ns + int(speed(rng, pace[worker]) * grows), rng.random(), worker

    due = [next_push(worker) for worker in range(trial.workers)]
    heapq.heapify(due)
    for event in range(events):
        timer_ns, draw = oracle.due_ns(), rng.random()
        # A leave and a push that was not granted come at the time of the event before. When that event bore an earlier
        # time (late_ns), its timer may be due already.
        if timer_ns is not None and timer_ns <= now_ns:
            now_ns = timer_ns
            granted = trial.step("fire")
        elif draw < leave_rate:
            granted = trial.leave(oracle.slowest() if rng.random() < 0.5 else rng.choice(list(live)), now_ns)
        elif oracle.waiting and draw > 1 - odd_rate:
            # A worker that went on with the other servers' shards, mostly one version ahead of this one.
            timestamp = max(0, oracle.version + rng.choice((1, 1, 1, 2, 0, -1)))
            granted = trial.push(rng.choice(sorted(oracle.waiting)), now_ns, timestamp, 1)
        elif timer_ns is not None and (not due or timer_ns <= due[0][0]):
            now_ns = timer_ns
            granted = trial.step("fire")
        else:
            now_ns, _, worker = heapq.heappop(due)
            if worker not in live:
                granted = []
            else:
                timestamp = trial.read[worker]
                if rng.random() < odd_rate:
                    timestamp = max(0, timestamp + rng.choice((-2, -1, 1, 2)))
                late_ns = rng.choice((1, 1_000, 5_000_000)) if rng.random() < late_rate else 0
                granted = trial.push(worker, max(0, now_ns - late_ns), timestamp, batch[worker])
        for worker in granted:
            if getattr(oracle, "tune", False):
                batch[worker] = trial.scheduler.batch(worker)
            heapq.heappush(due, next_push(worker))
        if not live:
            return event + 1
    return events


@pytest.mark.sampled(4)
@every_row
@sample_and_full(0.1, 0.5)
def test_compiled_scheduler_decides_as_the_oracle_on_random_traffic(row: Play, size: float) -> None:
    def run(workers: int, seed: str, speed: Speed, events: int) -> int:
        return run_trial(TimedTrial(row, workers, seed), random.Random(seed), speed, events)

    play_random_traffic(row, size, run)


@sample_and_full(20, 60, "trials")
@every_row
def test_every_push_is_folded_or_dropped_once_whoever_leaves(row: Play, trials: int) -> None:
    for number in range(trials):
        seed = f"{row.name} leaves {number}"
        rng = random.Random(seed)
        trial = TimedTrial(row, rng.randint(1, 9), seed)
        run_trial(trial, rng, SPEED_MODELS["coarse_clock"], rng.randint(1, 80))
        now_ns = 10**17
        while trial.oracle.t:
            while trial.oracle.due_ns() is not None and trial.oracle.due_ns() <= now_ns:
                trial.step("fire")
            trial.leave(rng.choice(list(trial.oracle.t)), now_ns)
            now_ns += 1
        assert trial.scheduler.due_ns() is None, f"a timer runs on for nobody; {trial.where()}"
        assert trial.pushes == trial.folded + trial.dropped, f"{trial.pushes} pushes; {trial.where()}"


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: f"{sequence.oracle}: {sequence.name}")
def test_compiled_scheduler_answers_as_worked_out_by_hand(sequence: Sequence) -> None:
    scheduler = sequence.played().scheduler(sequence.workers)
    for event in sequence.events:
        if event.kind == "push":
            worker, now_ns, timestamp, samples = event.arguments
            found = scheduler.push(worker, now_ns, timestamp=timestamp, samples=samples)
        else:
            found = getattr(scheduler, event.kind)(*event.arguments)
        assert found == (event.folded, event.granted), event
        assert scheduler.due_ns() == event.due_ns, event
    assert scheduler.version == sequence.version
    for worker, dropped in sequence.dropped.items():
        assert scheduler.dropped(worker) == dropped, worker
    for worker, batch in sequence.batch.items():
        assert scheduler.batch(worker) == batch, worker
