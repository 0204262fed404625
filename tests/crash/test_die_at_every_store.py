"""SIGKILL a worker just before its n-th store to shared memory: for every n, no push is lost or doubled, no lock stays held.

The victim pushes twice and leaves. As combiner it also folds the others' pushes. The cases have two shards, every rule, a
moving average of the weights and clipped gradients; some have tables, of which each push has rows. Afterwards the arena must
equal, bit for bit, an arena whose victim ended normally after as many pushes as it had posted.
"""

import functools
import mmap
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

hooks = pytest.importorskip("fastps.kernels.chaos.failpoints", reason="needs the failpoint build: make test-hooks")

import numpy as np  # noqa: E402

import fastps  # noqa: E402
from fastps.job.user_rules import UserRule  # noqa: E402
from fastps.kernels.protocol.lane import DONE, KIND_LEAVE, KIND_PUSH, Lane  # noqa: E402
from fastps.kernels.protocol.reader_pins import ReaderPins  # noqa: E402
from fastps.kernels.protocol.row_writer import RowWriter  # noqa: E402
from fastps.kernels.rows import rows  # noqa: E402
from fastps.kernels.shm import offsets  # noqa: E402
from fastps.kernels.shm.arena import LANE_FREE, LANE_LEFT, Arena  # noqa: E402
from fastps.kernels.shm.format import format_memory  # noqa: E402
from fastps.kernels.update import fold  # noqa: E402
from tests.support import plain_arena  # noqa: E402
from tests.support.plain_arena import ASP, BSP  # noqa: E402

SHARD_FLOATS = 96
SHARDS = 2
VICTIM = 1
PUSHES = 2
CLIPPED = 0.5
ROWS, WIDTH = 12, 3  # of each table


@dataclass(frozen=True)
class Case:
    """One rule under one policy; `hyper`: learning rate, momentum, dampening, decay, betas, epsilon, rate decay, flags."""

    name: str
    rule: int
    planes: int
    hyper: tuple[float, float, float, float, float, float, float, float, int]
    policy: dict[str, Any]
    slots: int = 2
    shown_type: int = fold.FLOAT32
    gradient_type: int = fold.FLOAT32
    row_rule: int = -1  # of the tables, one in each shard; -1: there are none

    @property
    def tables(self) -> list[tuple[int, int, int, int, int]]:
        return [(ROWS, WIDTH, SHARDS + shard, 0, shard) for shard in range(SHARDS)] if self.row_rule >= 0 else []


def own_rule(weight, gradient, mean, square, learning_rate, beta):  # type: ignore[no-untyped-def]
    mean = beta * mean + (1 - beta) * gradient
    square = max(beta * square, abs(gradient))
    return weight - learning_rate * mean / (square + 1e-8), mean, square


def squares(weight, gradient, mean, square, learning_rate, beta):  # type: ignore[no-untyped-def]
    return weight * weight, gradient * gradient


def summing_rule(weight, gradient, mean, square, learning_rate, beta, weights, gradients):  # type: ignore[no-untyped-def]
    mean = beta * mean + (1 - beta) * gradient
    square = max(beta * square, abs(gradient))
    return weight - learning_rate * (weights / gradients) * mean / (square + 1e-8), mean, square


@functools.cache
def users_rule(is_summing: bool) -> UserRule:
    """The compiled rule. Made when a case needs it: with the compiler in the process, each fork takes ten times as long."""
    names: dict[str, Any] = {"state": ("mean", "square"), "hyper": ("learning_rate", "beta")}
    return fastps.rule(**names, sums=squares)(summing_rule) if is_summing else fastps.rule(**names)(own_rule)


SSP: dict[str, Any] = {"fold": "each", "grant": "bounded", "low": 1, "high": 1, "release": "printed"}
DSSP: dict[str, Any] = {**SSP, "high": 3}
SOFTSYNC: dict[str, Any] = {"fold": "count", "grant": "at-once", "divisor": 2, "scale": "mean"}
BACKUP: dict[str, Any] = {"fold": "quorum", "grant": "next-version", "count": 2}
R2SP: dict[str, Any] = {"fold": "in-order", "grant": "round-robin"}
_MOMENTUM = (0.1, 0.9, 0, 0.01, 0, 0, 0, 0, 0)
_ADAM = (0.01, 0, 0, 0, 0.9, 0.99, 1e-8, 0, 0)
_OWN = (0.01, 0.9, 0, 0, 0, 0, 0, 0, 0)
CASES = [
    Case("sgd-asp", fold.RULE_SGD, 0, (0.1, 0, 0, 0.01, 0, 0, 0, 0, 0), ASP),
    Case("nesterov-ssp", fold.RULE_SGD, 1, (*_MOMENTUM[:8], fold.HYPER_NESTEROV), SSP),
    Case("adam-asp", fold.RULE_ADAM, 2, _ADAM, ASP),
    Case("adamw-bsp", fold.RULE_ADAM, 2, (0.01, 0, 0, 0.1, 0.9, 0.99, 1e-8, 0, fold.HYPER_DECOUPLED), BSP, slots=1),
    Case("adagrad-softsync", fold.RULE_ADAGRAD, 1, (0.1, 0, 0, 0, 0, 0, 1e-10, 0.01, 0), SOFTSYNC, slots=4),
    Case("rmsprop-backup", fold.RULE_RMSPROP, 3, (0.01, 0.9, 0, 0, 0, 0.9, 1e-8, 0, fold.HYPER_CENTERED), BACKUP, slots=1),
    Case("amsgrad-asp", fold.RULE_ADAM, 3, (*_ADAM[:8], fold.HYPER_AMSGRAD), ASP),
    Case("nadam-asp", fold.RULE_NADAM, 2, (0.01, 0, 0, 0.1, 0.9, 0.99, 1e-8, 0.004, fold.HYPER_DECOUPLED), ASP),
    Case("radam-bsp", fold.RULE_RADAM, 2, (0.01, 0, 0, 0.1, 0.9, 0.8, 1e-8, 0, 0), BSP, slots=1),
    Case("adamax-softsync", fold.RULE_ADAMAX, 2, _ADAM, SOFTSYNC, slots=4),
    Case("adadelta-backup", fold.RULE_ADADELTA, 2, (0.5, 0, 0, 0, 0, 0.9, 1e-6, 0, 0), BACKUP, slots=1),
    Case("momentum-r2sp", fold.RULE_SGD, 1, (0.1, 0.9, 0, 0, 0, 0, 0, 0, 0), R2SP, slots=1),
    Case("momentum-combined", fold.RULE_SGD, 1, _MOMENTUM, {**ASP, "combine": True}),
    Case("adam-shown-in-bfloat16", fold.RULE_ADAM, 2, _ADAM, ASP, shown_type=fold.BFLOAT16),
    Case("adam-in-float64-asp", fold.RULE_ADAM, 2, _ADAM, ASP, gradient_type=fold.FLOAT64),
    Case("momentum-in-float64-bsp", fold.RULE_SGD, 1, _MOMENTUM, BSP, slots=1, gradient_type=fold.FLOAT64),
    Case("rows-sgd-asp", fold.RULE_SGD, 0, (0.1, 0, 0, 0, 0, 0, 0, 0, 0), ASP, row_rule=rows.RULES["sgd"]),
    Case("rows-adagrad-bsp", fold.RULE_ADAGRAD, 1, (0.1, 0, 0, 0, 0, 0, 1e-10, 0.01, 0), BSP, slots=1,
         row_rule=rows.RULES["adagrad"]),
    Case("rows-sparse-adam-softsync", fold.RULE_SGD, 0, _ADAM, SOFTSYNC, slots=4, row_rule=rows.RULES["sparse_adam"]),
    Case("rows-row-wise-backup", fold.RULE_SGD, 0, (0.1, 0, 0, 0, 0, 0, 1e-10, 0, 0), BACKUP, slots=1,
         row_rule=rows.RULES["row_wise_adagrad"]),
    Case("summing-asp", fold.RULE_SUMMING, 2, _OWN, ASP),
    Case("summing-bsp", fold.RULE_SUMMING, 2, _OWN, BSP, slots=1),
    Case("own-dssp", fold.RULE_USER, 2, _OWN, DSSP),
]  # fmt: skip


# At every store: each fold and each number of planes once, and what has stores of its own. The others differ from one of these
# in the arithmetic of a fold alone, which stores as often.
EVERY_STORE = [case for case in CASES if case.name in (
    "sgd-asp", "nesterov-ssp", "adamw-bsp", "rmsprop-backup", "adamax-softsync", "momentum-r2sp", "momentum-combined",
    "adam-shown-in-bfloat16", "rows-adagrad-bsp", "rows-sparse-adam-softsync", "summing-bsp",
)]  # fmt: skip


class Job(plain_arena.Job):
    """Three lanes in memory shared with a forked victim, each with the steps that it will push."""

    def __init__(self, case: Case, readers: int = 0) -> None:
        self.case = case
        places = [SHARD_FLOATS * shard for shard in range(SHARDS)]
        segments = [(first, SHARD_FLOATS, 0) for first in places] + [(places[shard], 0, 0) for *_, shard in case.tables]
        super().__init__(
            3, case.policy, shards=SHARDS, slots=case.slots, floats=SHARD_FLOATS, segments=segments, tables=case.tables,
            row_rule=max(case.row_rule, 0), rule=case.rule, state_planes=case.planes + 1, buffers=5, ema_decay=0.9,
            readers=readers, shown_type=case.shown_type, gradient_type=case.gradient_type,
        )  # fmt: skip
        self.writers = [RowWriter(self.arena, index) for index in range(3)]
        for lane in self.lanes:
            if case.rule in (fold.RULE_USER, fold.RULE_SUMMING):
                lane.set_user_rule(users_rule(case.rule == fold.RULE_SUMMING).address)
            lane.share_folds(1)  # uses chunks and tickets, although no worker helps
        first = np.random.default_rng(5).standard_normal(SHARDS * self.shard_size)
        self.numbers(self.arena.weights_offset(0))[:] = first
        self.numbers(self.arena.plane_offset(0, case.planes))[:] = first  # the moving average
        for index in (0, 2):
            assert self.arena.claim(index, os.getpid()) == 0

    @property
    def shard_size(self) -> int:
        """The numbers of a shard, each of which may be two floats."""
        return SHARD_FLOATS // (2 if self.case.gradient_type == fold.FLOAT64 else 1)

    def numbers(self, offset: int) -> Any:
        dtype = np.float64 if self.case.gradient_type == fold.FLOAT64 else np.float32
        return np.frombuffer(self.memory, dtype, SHARDS * self.shard_size, offset)

    def push(self, index: int, now_ns: int) -> None:
        """Write a slot and post it, without trying the shard lock."""
        lane, step, slot = self.lanes[index], self.posts[index], self.write_slot(index)
        lane.set_versions(slot)
        assert lane.post(KIND_PUSH, step, slot, lane.version, now_ns, CLIPPED, samples=8)
        self.posts[index] += 1

    def write_slot(self, index: int) -> int:
        """Pull, and write the slot as a step does; returns the slot."""
        lane, step = self.lanes[index], self.posts[index]
        slot = lane.slot if index == VICTIM else step % self.case.slots
        for shard in range(SHARDS):
            lane.pull(shard)
        gradient = np.random.default_rng(100 * index + step).standard_normal(SHARDS * self.shard_size)
        self.numbers(self.arena.gradient_offset(index, slot))[:] = gradient
        lane.set_hyper(slot, 0, *self.case.hyper)
        lane.set_presence(slot, ((1 << SHARDS + len(self.case.tables)) - 1).to_bytes(8, "little"))
        for table in range(len(self.case.tables)):
            numbers = np.random.default_rng(1000 * index + 10 * step + table).integers(0, ROWS, 7)
            self.writers[index].collect(slot, table, numbers, np.outer(1.0 + numbers, [1, -1, 0.5]).astype(np.float32))
        return slot

    def leave(self, index: int, now_ns: int) -> None:
        assert self.lanes[index].post(KIND_LEAVE, self.posts[index], 0, 0, now_ns)
        self.arena.leave(index)

    def begin(self) -> None:
        """Post the pushes that precede the victim's."""
        self.push(0, 10)
        self.push(2, 35)  # between the victim's two pushes

    def live(self, pushes: int = PUSHES, leaves: bool = True) -> None:
        """Run the victim: all of its life, or `pushes` pushes of it."""
        lane = self.lanes[VICTIM]
        assert self.arena.claim(VICTIM, os.getpid()) == 0
        for step in range(pushes):
            self.write_slot(VICTIM)
            assert lane.push(30 + 10 * step, CLIPPED, 8, False) == DONE
            self.posts[VICTIM] += 1
            lane.wait(0, 0, 0, 1)
            lane.wait(1 << 40, 0, 0, 1)  # sleeps, for 1 ns
            lane.advance_late(35 + 10 * step)
        if leaves:
            self.leave(VICTIM, 60)
            assert lane.try_combine(60) == DONE
            lane.unpin()
            self.arena.finish(VICTIM)

    def survive(self) -> None:
        """Recover the locks that the victim held, mark it dead, and finish the job with two workers."""
        lane = self.lanes[0]
        if self.arena.lane_state(VICTIM) == LANE_FREE:  # it died before it attached
            assert self.arena.claim(VICTIM, os.getpid()) == 0
        lane.recover_lock(VICTIM, 70)
        assert self.arena.mark_dead(VICTIM, 0) == (self.arena.lane_state(VICTIM) != LANE_LEFT)
        for step in range(3):
            assert lane.try_combine(90) == DONE
            for index in (0, 2):
                if self.lanes[index].granted(0) > self.posts[index] and self.lanes[index].granted(1) > self.posts[index]:
                    self.push(index, 100 + 10 * step + index)
                    assert self.lanes[index].try_combine(100 + 10 * step + index) == DONE
        for index in (0, 2):
            self.leave(index, 200 + index)
            assert self.lanes[index].try_combine(200 + index) == DONE

    def posts_of_victim(self) -> int:
        return int(self.arena.counters(VICTIM)["posted"])

    def push_log(self) -> list[tuple[int, int]]:
        """For each lane, the descriptors posted and its pushes' outcomes. Asserts that each push was folded or dropped."""
        counters = [self.arena.counters(index) for index in range(3)]
        for index, of_lane in enumerate(counters):
            assert of_lane["done"] == of_lane["posted"], f"lane {index}: a push is lost"
            pushes = min(of_lane["posted"], PUSHES) if index == VICTIM else of_lane["posted"] - 1  # and its LEAVE
            assert of_lane["folded"] + of_lane["dropped"] == SHARDS * pushes, f"lane {index}: a push is doubled or lost"
            assert of_lane["dropped"] == 0 or self.case.policy["fold"] == "quorum"
        return [(of_lane["folded"], of_lane["dropped"]) for of_lane in counters]

    def bits(self) -> bytes:
        """All committed state: versions, weights, optimizer state and step counts, the moving average."""
        found = []
        for shard in range(SHARDS):
            version, weights, state = self.arena.committed(shard)
            places = [self.arena.weights_offset(weights)]
            places += [self.arena.plane_offset(state, plane) for plane in range(self.case.planes + 1)]
            steps = self.arena.steps_offset(state) + 8 * shard
            found.append(struct.pack("<q", version) + self.memory[steps : steps + 8])
            found += [
                self.numbers(place)[self.shard_size * shard : self.shard_size * (shard + 1)].tobytes() for place in places
            ]
            if self.case.shown_type:
                found.append(self.shown(weights, shard, version))
        for table in range(len(self.case.tables)):  # weights, then optimizer state
            planes, words = rows.PLANES[self.case.row_rule]
            places = [(self.arena.table_offset(table), ROWS * WIDTH)]
            places += [(self.arena.table_plane_offset(table, plane), ROWS * (words or WIDTH)) for plane in range(planes)]
            found += [self.memory[begin : begin + 4 * floats] for begin, floats in places]
        return b"".join(found)

    def shown(self, buffer: int, shard: int, version: int) -> bytes:
        """The halves of a shard. Asserts that they are those of its weights, once a fold has written both."""
        halves = np.frombuffer(self.memory, np.uint16, SHARDS * SHARD_FLOATS, self.arena.halves_offset(buffer))
        expected = np.zeros(SHARD_FLOATS, np.uint16)
        own = slice(SHARD_FLOATS * shard, SHARD_FLOATS * (shard + 1))
        fold.narrow(self.numbers(self.arena.weights_offset(buffer))[own], expected, self.case.shown_type)
        assert version == 0 or halves[own].tobytes() == expected.tobytes()
        return halves[own].tobytes()


def dies_at(store: int, live: Callable[[], object]) -> bool:
    """Whether a process dies at this store of a life; at 0 it never does. Any other end is a failure."""
    child = os.fork()
    if child == 0:
        try:
            hooks.die_at(store)
            live()
            os._exit(0)
        finally:
            os._exit(1)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert exit_code in (0, -signal.SIGKILL), f"at store {store}"
    return exit_code != 0


def _stores(live: Callable[[], object]) -> int:
    """The stores of a life in this process."""
    before = hooks.stores()
    live()
    return int(hooks.stores() - before)


def _begun(case: Case) -> Job:
    job = Job(case)
    job.begin()
    return job


def _expected(case: Case) -> Iterator[tuple[list[tuple[int, int]], bytes]]:
    """For each number of posts, the push outcomes and bits after a life that ended normally."""
    for posts in range(PUSHES + 2):
        job = _begun(case)
        job.live(min(posts, PUSHES), leaves=posts > PUSHES)
        job.survive()
        yield job.push_log(), job.bits()


def _check_deaths(case: Case, every: int) -> None:
    expected = list(_expected(case))
    assert len({bits for _, bits in expected}) >= PUSHES + 1, "a push must make a difference"
    job = _begun(case)
    stores = _stores(job.live)
    assert job.arena.lane_state(VICTIM) == LANE_LEFT
    assert stores > 300
    seen = set()
    for store in range(1, stores + 1, every):
        job = _begun(case)
        assert dies_at(store, job.live), f"at store {store}"
        posts = job.posts_of_victim()
        job.survive()
        pushes, bits = expected[posts]
        assert job.push_log() == pushes, f"died at store {store} after {posts} posts"
        assert bits == job.bits(), f"died at store {store} after {posts} posts: other bits"
        for shard in range(SHARDS):
            assert job.lanes[0].owner(shard) == -1, f"died at store {store}: the lock of shard {shard} is held"
        seen.add(posts)
    assert seen == set(range(PUSHES + 2))


def test_every_rule_of_the_fold_has_a_case() -> None:
    assert [name for name, number in fold.RULES.items() if number not in {case.rule for case in CASES}] == []
    assert [name for name, number in rows.RULES.items() if number not in {case.row_rule for case in CASES}] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_death_at_some_stores_loses_nothing_and_doubles_nothing(case: Case) -> None:
    _check_deaths(case, every=31)


@pytest.mark.slow
@pytest.mark.timeout(600)  # some 400 processes
@pytest.mark.parametrize("case", EVERY_STORE, ids=lambda case: case.name)
def test_a_death_at_every_store_loses_nothing_and_doubles_nothing(case: Case) -> None:
    _check_deaths(case, every=1)


# -- a process that only reads -------------------------------------------------------------------------------------------


def _read(job: Job) -> None:
    """The life of a reader."""
    pins, buffers = ReaderPins(job.arena, 0), [0] * SHARDS
    pins.begin()
    for _ in range(3):
        assert pins.pull_all(buffers) == -1
    for shard, buffer in enumerate(buffers):
        version, weights, _ = job.arena.committed(shard)
        assert (pins.shard_version(shard), buffer) == (version, weights)
    assert not pins.wait(job.arena.version + 1, 1)
    pins.unpin()


def test_a_readers_death_at_every_store_changes_nothing_for_the_workers() -> None:
    """Five buffers are as few as three workers need, and the dead reader's pins stay until another has its place."""
    case = CASES[0]
    plain = _begun(case)
    plain.live()
    plain.survive()
    expected = plain.push_log(), plain.bits()
    stores = _stores(partial(_read, Job(case, readers=1)))
    assert stores == SHARDS * 5 + 2
    for store in range(1, stores + 1):
        job = Job(case, readers=1)
        assert dies_at(store, partial(_read, job))
        job.begin()
        job.live()
        assert dies_at(min(store, stores - 1), partial(_read, job))  # the number of readers need not be raised again
        job.survive()
        assert (job.push_log(), job.bits()) == expected, f"died at store {store}"
        _read(job)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
def test_whatever_store_a_combiner_dies_at_a_reader_that_sleeps_for_its_version_is_called(case: Case) -> None:
    """Its own commit moves the event of the readers, or the one that recovers its lock does."""

    def born() -> tuple[Job, int, int]:
        job = Job(case, readers=1)
        words = offsets.header_of(job.memory)["reader_words_offset"]
        pins = ReaderPins(job.arena, 0)
        pins.begin()
        assert not pins.wait(1, 1)  # says so, and sleeps for 1 ns
        return job, words + offsets.OFFSETS["readers.wanted"], words + offsets.OFFSETS["readers.event"]

    job, _, _ = born()
    before = hooks.stores()
    job.begin()
    job.live()
    for store in range(1, hooks.stores() - before + 1, 5):
        job, wanted, event = born()
        job.begin()
        dies_at(store, job.live)
        job.lanes[0].recover_lock(VICTIM, 70)
        version, said = job.arena.version, struct.unpack_from("<Q", job.memory, wanted)[0]
        moved = struct.unpack_from("<I", job.memory, event)[0]
        assert moved if version else (moved or said == 1), f"died at store {store} of {case.name}: version {version}"


# -- a process that publishes --------------------------------------------------------------------------------------------


class Published:
    """A publisher's arena: one lane without slots, two weights buffers and a reader's."""

    def __init__(self) -> None:
        measures = {"lanes": 1, "slots": 0, "parameters": 0, "buffer_floats": 0, "buffers": 2, "readers": 1}
        header, size, _ = plain_arena.planned(**measures, carried_bytes=64 + 256)
        self.memory = mmap.mmap(-1, size)
        format_memory(self.memory, header, [], **ASP)
        self.arena = Arena(self.memory)
        self.arena.claim(0, os.getpid())
        self.write(0, 0)

    def write(self, buffer: int, value: int) -> None:
        words = np.frombuffer(self.memory, np.uint64, 40, self.arena.carried_offset(buffer))
        words[8:], words[0] = value, 1

    def publish(self) -> None:
        """The life of a publisher: three versions."""
        lane = Lane(self.arena, 0)
        for value in range(1, 4):
            assert lane.hold(0)
            self.write(lane.spare(0)[0], value)
            assert lane.release(True, 0, 10 * value, True) == DONE

    def read(self) -> int:
        """The version that a reader pins, which is whole."""
        pins, buffers = ReaderPins(self.arena, 0), [0]
        pins.begin()
        assert pins.pull_all(buffers) == -1
        words = np.frombuffer(self.memory, np.uint64, 40, self.arena.carried_offset(buffers[0]))
        assert words[0] == 1 and set(words[8:].tolist()) == {pins.shard_version(0)}
        return pins.shard_version(0)


def test_a_publishers_death_at_every_store_leaves_the_version_before_or_the_next_whole() -> None:
    stores = _stores(Published().publish)
    assert stores > 15
    found = []
    for store in range(1, stores + 1):
        job = Published()
        assert dies_at(store, job.publish)
        found.append(job.read())
    assert found == sorted(found) and set(found) == {0, 1, 2, 3}
