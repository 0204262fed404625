"""Another process may write anything into a live arena: workers go on, or raise an error of fastps; they never crash or hang.

Two workers in one process alternate, and the test overwrites words between their calls. The contract is that every index,
count, offset and kind is bounded before use, not that weights stay correct (docs/reliability.md).
"""

import gc
import itertools
import random
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import fastps
from fastps.errors import Error
from fastps.job import limits
from fastps.job.update_rules import UPDATE_RULES
from fastps.store.observer import statistics_of
from fastps.store.store import Store
from fastps.store.worker import Worker
from tests.fuzz import places
from tests.fuzz.amount import fuzz
from tests.fuzz.sandbox import Sandbox

SCHEMES = (
    "asp", "bsp", "bsp,ema=0.9", "ssp:1", "backup:1,pull=0.5,shards=2", "dssp:1,4", "backup:1", "psp:1,0.5", "hardsync:64",
    "softsync:1", "softsync:2,scale=1/sigma", "adv:1", "adv*:1", "r2sp:0.8", "r2sp:0.8,tune=true",
)  # fmt: skip
UPDATES: dict[str, Any] = {}
for _row in UPDATE_RULES.values():
    UPDATES |= {} if _row.only_rows else _row.examples()
SIZES = {"small": 30, "shared": 70_000}  # floats; a fold of the larger size is divided into chunks
ROUNDS = 5
ACTIONS = ("push", "advance", "pull", "look", "save", "hold", "leave", "join")
# The actions of a round, with their workers.
ROUND = (("push", 0), ("push", 1), ("advance", 0), ("advance", 1), ("pull", 0), ("pull", 1))
NUMBERS = (
    0, 1, 2, 3, 7, 8, 64, 65, 127, 128, 255, 256,
    1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63,
)  # fmt: skip


@dataclass(frozen=True)
class Wound:
    """An overwritten word: before which call, in which part, at which place in it, and how."""

    moment: int
    place: str
    part: int
    word: int
    narrow: bool
    bit: int  # to flip; -1: the word becomes `number`
    number: int


@dataclass(frozen=True)
class Example:
    """A job, its extra actions, and its overwritten words."""

    sync: str
    update: str
    size: str
    kind: str  # the type of gradients: a half, float32, or float64 as that of all numbers
    raises: bool
    seed: int
    extras: tuple[tuple[int, str, int], ...]  # moment, action, worker
    wounds: tuple[Wound, ...]


_WOUNDS = st.builds(
    Wound,
    st.integers(0, ROUNDS * len(ROUND) - 1),
    st.sampled_from(
        ["header", "domain", "work", "segments", "lane", "descriptors", "seat", "fates", "statistics", "rule's steps"]
        + ["slot's header", "gradient"]
        + 4 * ["scheduler"]
    ),
    st.integers(0, 63),
    st.integers(0, 1 << 12),
    st.booleans(),
    st.integers(-1, 63),
    st.one_of(st.sampled_from(NUMBERS), st.integers(0, (1 << 64) - 1), st.integers((1 << 64) - 64, (1 << 64) - 1)),
)
_EXAMPLES = st.builds(
    Example,
    st.sampled_from(SCHEMES),
    st.sampled_from(sorted(UPDATES)),
    st.sampled_from(["small", "small", "shared"]),
    st.sampled_from(["float32", "float16", "float64"]),
    st.booleans(),
    st.integers(0, 1 << 16),
    st.lists(
        st.tuples(st.integers(0, ROUNDS * len(ROUND) - 1), st.sampled_from(ACTIONS[3:]), st.integers(0, 2)), max_size=3
    ).map(tuple),
    st.lists(_WOUNDS, min_size=1, max_size=6).map(tuple),
)


def _write(memory: Any, where: places.Places, wound: Wound) -> None:
    """Overwrite one word."""
    begin, length = where[wound.place][wound.part % len(where[wound.place])]
    form = "<I" if wound.narrow else "<Q"
    width = struct.calcsize(form)
    if length < width:
        return
    offset = begin + wound.word % (length // width) * width
    (found,) = struct.unpack_from(form, memory, offset)
    value = wound.number if wound.bit < 0 else found ^ (1 << wound.bit)
    struct.pack_into(form, memory, offset, value % (1 << (8 * width)))


class Life:
    """Two workers of one store, and room for a third, that run an example."""

    def __init__(self, example: Example, folder: Path) -> None:
        self._example = example
        self._folder = folder
        self._random = random.Random(example.seed)
        # The places are read now, because the header's words may be overwritten later.
        dtype = np.float64 if example.kind == "float64" else np.float32
        weights = {"w": np.ones((SIZES[example.size],), dtype), "b": np.ones(3, dtype)}
        weights |= {f"c{index}": np.ones(5, dtype) for index in range(4)}
        self.store = Store.create(
            weights,
            UPDATES[example.update],
            sync=example.sync,
            workers=2,
            max_workers=3,
            on_worker_loss="continue",
            nonfinite="raise" if example.raises else "reject",
            gradient_type="float16" if example.kind == "float16" else None,
            timeout_s=0.03 if example.wounds else 30.0,  # the first waits for what never comes; the second bounds a disk
        )
        header = places.header_of(self.store.memory)
        self._where, self._gaps = places.places_of(header), places.gaps_of(header)
        places.mark(self.store.memory, self._gaps)
        self._workers: dict[int, Worker] = {}
        self.outcomes: list[str] = []

    def run(self) -> list[str]:
        """Run the example; return the errors of fastps that it met. Any other exception is a failure."""
        for rank in range(2):
            self._guarded("join", rank)
        for moment in range(ROUNDS * len(ROUND)):
            for wound in self._example.wounds:
                if wound.moment == moment:
                    _write(self.store.memory, self._where, wound)
            for when, action, rank in self._example.extras:
                if when == moment:
                    self._guarded(action, rank)
            self._guarded(*ROUND[moment % len(ROUND)])
        for rank in list(self._workers):
            self._guarded("leave", rank)
        assert not places.changed(self.store.memory, self._gaps), "a store went between the arena's parts"
        return self.outcomes

    def close(self) -> None:
        for rank in list(self._workers):
            self._end(rank, "it failed")
        self.store.close()

    def _end(self, rank: int, failure: str) -> None:
        if rank in self._workers:
            try:
                self._workers.pop(rank).close(failure)
            except Error as error:
                self.outcomes.append(type(error).__name__)

    def _guarded(self, action: str, rank: int) -> None:
        if action not in ("join", "look") and rank not in self._workers:
            return
        try:
            getattr(self, "_" + action)(rank)
        except Error as error:
            self.outcomes.append(type(error).__name__)
            self._end(rank, str(error))

    def _join(self, rank: int) -> None:
        if rank not in self._workers:
            self._workers[rank] = self.store.attach(rank)

    def _push(self, rank: int) -> None:
        worker = self._workers[rank]
        for view in worker.gradients.values():
            view[...] = self._random.choice([0.5, -1.0, float("inf") if self._random.random() < 0.1 else 2.0])
        worker.push(self.store.hypers, samples=16, null=self._random.random() < 0.1)

    def _advance(self, rank: int) -> None:
        self._workers[rank].advance()

    def _pull(self, rank: int) -> None:
        worker = self._workers[rank]
        worker.pull()
        assert sum(float(view.reshape(-1)[0]) for view in worker.weights.values()) is not None

    def _look(self, rank: int) -> None:
        statistics_of(self.store.arena)
        for shard in range(self.store.arena.shards):
            self.store.arena.histograms(shard)
        self.store.arena.record()
        self.store.arena.push_outcomes(min(rank, 1), 0, 0, limits.RING_SIZE)

    def _save(self, rank: int) -> None:
        fastps.save(self._workers[rank], self._folder)

    def _hold(self, rank: int) -> None:
        worker = self._workers[rank]
        worker.lock_shards()
        try:
            weights, states = self.store.committed()
            self.store.weight_views(weights)
            self.store.plane_views(states, 0) if self.store.layout.planes else None
            for shard in range(self.store.arena.shards):
                try:
                    worker.lane.spare(shard)
                except RuntimeError:  # no buffer is free
                    return
        finally:
            worker.unlock_shards(self._random.random() < 0.5)

    def _leave(self, rank: int) -> None:
        self._workers.pop(rank).close()


def _live(example: Example) -> list[str]:
    limits.SLICE_NS = 2_000_000  # keeps waits that cannot succeed short
    walls = places.Walls()
    walls.begin()
    life = None
    try:
        folder = Path(tempfile.mkdtemp())
        try:
            life = Life(example, folder)
            try:
                return life.run()
            finally:
                life.close()
        finally:
            while folder.exists():  # a save whose time is over may still write
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        life = None
        gc.collect()
        walls.end()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(_live) as made:
        yield made


def test_whatever_is_written_over_ends_by_an_error_of_fastps(sandbox: Sandbox) -> None:
    def check(data: st.DataObject) -> None:
        sandbox.run(data.draw(_EXAMPLES))

    fuzz("words of the arena", check)


@pytest.mark.slow
def test_an_example_without_wounds_ends_without_an_error(sandbox: Sandbox) -> None:
    """Without overwritten words an example must not fail; otherwise the test above could blame its own actions."""
    for sync in SCHEMES:
        for size, kind in itertools.product(SIZES, ("float32", "float64")):
            extras = ((8, "save", 0), (9, "hold", 1))
            assert sandbox.run(Example(sync, "momentum", size, kind, False, 3, extras, ())) == [], (sync, kind)
