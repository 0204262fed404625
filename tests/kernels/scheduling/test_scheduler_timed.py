"""The compiled scheduler's disciplines of versions, counts, turns and timers against their oracles, event by event.

The rows here are the oracles that take timestamps, such as those of backup workers, PSP, softsync and R2SP. Both sides see
the same pushes, leaves and timers and must answer every one alike. What the papers promise is checked beside that on the
compiled scheduler's own numbers, so that an error shared with the oracle would show. Speed is not tested here.
"""

import random

import pytest

from tests.kernels.scheduling.test_scheduler import SPEED_MODELS, Trial, play_random_traffic, run_trial
from tests.oracles.by_hand import SEQUENCES, Sequence
from tests.oracles.table import PLAYED, Play
from tests.support.sizes import sample_and_full

ROWS = [played for played in PLAYED if played.plays.timed]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


class TimedTrial(Trial):
    """A trial whose pushes have a timestamp and samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.carried: dict[int, list[int]] = {worker: [] for worker in range(self.workers)}  # of pushes in no fold yet
        self.pusher: int | None = None  # of the event
        self.leaver: int | None = None
        self.left = False
        self.turn = 0  # r2sp: whose update is next

    def push(self, worker: int, now_ns: int, timestamp: int = 0, samples: int = 1) -> list[int]:
        self.carried[worker].append(timestamp)
        self.pusher, self.dropped_before = worker, self.scheduler.dropped(worker)
        return super().push(worker, now_ns, timestamp, samples)

    def leave(self, worker: int, now_ns: int) -> list[int]:
        self.left, self.leaver = True, worker
        return super().leave(worker, now_ns)

    def step(self, kind: str, *arguments: int) -> list[int]:
        granted = super().step(kind, *arguments)
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


@pytest.mark.sampled(4)
@every_row
@sample_and_full(0.1, 0.5)
def test_compiled_scheduler_decides_as_the_oracle_on_random_traffic(row: Play, size: float) -> None:
    play_random_traffic(row, size, TimedTrial)


LEFT = [played for played in PLAYED if played.name == "bsp" or played.combines or played.plays.timed]


@sample_and_full(25, 100, "trials")
@pytest.mark.parametrize("row", LEFT, ids=lambda row: row.name)
def test_every_push_is_folded_or_dropped_once_whoever_leaves(row: Play, trials: int) -> None:
    for number in range(trials):
        seed = f"{row.name} leaves {number}"
        rng = random.Random(seed)
        trial = (TimedTrial if row.plays.timed else Trial)(row, rng.randint(1, 9), seed)
        run_trial(trial, rng, SPEED_MODELS[rng.choice(("anything", "coarse_clock"))], rng.randint(1, 80))
        now_ns = 10**17
        while trial.oracle.t:
            while trial.oracle.due_ns() is not None and trial.oracle.due_ns() <= now_ns:
                trial.step("fire")
            trial.leave(rng.choice(list(trial.oracle.t)), now_ns)
            now_ns += 1
        if row.combines:
            trial.close()
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
