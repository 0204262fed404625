"""`sync="auto"`: a warm-up under bsp, recorded in memory; then advice, and a switch of all workers at the same step.

Before its last push of the warm-up each worker writes its records into its room of the arena. That step's grant implies that
all workers have done so, because a worker posts its push after its records, and bsp grants after the last push. All workers
thus read the same records, run the same simulations and choose the same discipline without further messages. Then all leave,
and the weights and the rule's state move to a new arena: a scheduler is never changed in use. If the advice is bsp, nothing
changes. A job switches once, and only its discipline.
"""

import json
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.advice.advise import Recorded, advise, best_backups, candidates, keeps_rate
from fastps.advice.replay import simulation_of
from fastps.errors import AttachError, TimeoutExceededError
from fastps.job.layout import Layout, place
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Hyper
from fastps.membership.job_memory import JobMemory
from fastps.store.store import StartAt, Store
from fastps.store.worker import Worker
from fastps.tracing import recorder
from fastps.tracing.file import PUSH_DTYPE, STEP_DTYPE, Trace

logger = logging.getLogger("fastps.auto")

_NOTE_BYTES = 1024
_CONNECT_S = 0.5  # between two checks of the peers while worker 0 makes the new arena


def room_bytes(policy: Policy) -> int:
    """Return the bytes of a lane's room: the number of records, the note's length, the records, the note."""
    return 16 + policy.warm_up * STEP_DTYPE.itemsize + _NOTE_BYTES if policy.warm_up else 0


class WarmUp:
    """One worker's warm-up of `steps` steps."""

    def __init__(self, store: JobMemory, worker: Worker) -> None:
        self.steps = store.layout.policy.warm_up
        self._store = store
        self._worker = worker
        self._recorder = recorder.keep(worker)

    def publish(self) -> None:
        """Write this worker's records for the other workers to read. Call it before the last push of the warm-up."""
        records = np.array(self._recorder.kept, STEP_DTYPE)
        note = json.dumps({"load": self._recorder.load(), "transfer_ns": self._worker.injected_transfer_ns}).encode()
        assert len(note) <= _NOTE_BYTES and len(records) < self.steps
        text = records.tobytes() + note
        room = self._room(self._worker.rank)
        room[16 : 16 + len(text)] = np.frombuffer(text, np.uint8)
        room[:16] = np.frombuffer(len(records).to_bytes(8, "little") + len(note).to_bytes(8, "little"), np.uint8)

    def choose(self) -> Policy | None:
        """Return the discipline that all workers switch to after that step; None: they stay with bsp."""
        self._recorder.end_keeping()
        if self._store.layout.workers == 1:
            return None  # a single worker has no peers to wait for
        trace = self._trace()
        if trace is None:
            logger.warning("a worker ended before the warm-up of %d steps was over: bsp stays", self.steps)
            return None
        backups = best_backups(simulation_of(trace), Recorded())
        specs = [spec for spec in candidates(trace.workers, backups=backups) if may_be_chosen(parse_policy(spec))]
        (chosen,) = [row for row in advise(trace, specs, is_auto=True) if row["recommended"]]
        logger.info("after %d steps: %s, %s", self.steps, chosen["sync"], chosen["reason"])
        return None if chosen["sync"] == "bsp" else with_modifiers(parse_policy(str(chosen["sync"])), self._store.layout.policy)

    def _room(self, lane: int) -> npt.NDArray[np.uint8]:
        return self._store.extra_view(lane)[-room_bytes(self._store.layout.policy) :]

    def _trace(self) -> Trace | None:
        """Read all workers' records and notes; None if a worker wrote none."""
        records, notes = [], {}
        for lane in range(self._store.layout.workers):
            data = self._room(lane).tobytes()
            count, length = (int.from_bytes(data[begin : begin + 8], "little") for begin in (0, 8))
            if not count:
                return None
            end = 16 + count * STEP_DTYPE.itemsize
            records.append(np.frombuffer(data, STEP_DTYPE, count, 16))
            notes[str(lane)] = json.loads(data[end : end + length])
        ranks = list(range(self._store.layout.workers))
        header = {**recorder.job_note(self._worker), "sync": "bsp", "recorded": ranks, "unfinished": [], "of_worker": notes}
        return Trace(header, np.concatenate(records), np.empty(0, PUSH_DTYPE))


def may_be_chosen(policy: Policy) -> bool:
    """Return whether a discipline keeps the learning rate, which nobody tunes here, and needs no help of the training loop."""
    return keeps_rate(policy) and not policy.needs_samples and policy.pull == 1.0


def with_modifiers(policy: Policy, before: Policy) -> Policy:
    """Return the policy with the training's modifiers, which are no part of a discipline: the weights' average and clipping.

    >>> with_modifiers(parse_policy("ssp:3"), parse_policy("auto,clip=1")).spec
    'ssp:3,clip=1'
    """
    kept = {name: getattr(before, name) for name in ("ema", "clip") if getattr(before, name)}
    return policy.with_options(**kept) if kept else policy


def move(worker: Worker, policy: Policy, job: str, hypers: list[Hyper]) -> Worker:
    """Move the weights and the rule's state to a new arena under another policy. All workers call this at the same step.

    Afterwards the old worker has left and must still be closed. Both arenas exist for a moment. Raises WorkerDiedError or
    TimeoutExceededError.
    """
    worker.wait_for_others()
    old = worker.store
    rows = [(each.name, each.shape, each.stride, each.group) for each in old.layout.parameters]
    types = [each.type for each in old.layout.parameters]
    extra = old.layout.extra_bytes - room_bytes(old.layout.policy)
    parameters, frozen = place(rows, policy.shards, types=types), frozenset(old.frozen)
    carried = tuple(replace(each, shard=parameters[-1].shard) for each in old.layout.carried)  # the last shard versions it
    layout = replace(old.layout, parameters=parameters, carried=carried, policy=policy, extra_bytes=extra, frozen=frozen)
    if worker.rank == 0:
        write, finish = partial(_write_weights, worker), partial(_write_state, worker)
        start = StartAt(old.version, lambda store: store.write_first(write))
        store = Store.create_for(
            layout, write, hypers, resume=start, job=job, timeout_s=old.timeout_s, clock=old.clock, finish=finish
        )
    else:
        store = _connect(worker, layout, hypers, job)
    try:
        moved = store.attach(worker.rank)
    except BaseException:
        store.close()
        raise
    worker.hand_on(moved)
    old.arena.go_on_in(worker.rank, job.encode())
    return moved


def _connect(worker: Worker, layout: Layout, hypers: list[Hyper], job: str) -> Store:
    """Connect to the new arena; check the peers meanwhile, because worker 0 may die before it has made it."""
    old = worker.store
    deadline_ns = old.clock.now_ns() + int(old.timeout_s * 1e9)
    while True:
        try:
            found = Store.connect(job, layout, hypers, timeout_s=_CONNECT_S, clock=old.clock)
            found.timeout_s = old.timeout_s
            return found
        except AttachError as error:
            worker.check_peers()
            if old.clock.now_ns() >= deadline_ns:
                raise TimeoutExceededError(
                    f"worker {worker.rank}: the switch to {layout.policy.spec} failed: {error}"
                ) from error


def _write_weights(worker: Worker, views: list[Any]) -> None:
    for view, source in zip(views, worker.store.weight_views(worker.buffers), strict=True):
        view[:] = source


def _write_state(worker: Worker, store: Store) -> None:
    with worker.locked():
        _, buffers = worker.store.committed()
        for plane in range(store.layout.planes):  # the moving average of the weights is the last
            for view, source in zip(store.plane_views(0, plane), worker.store.plane_views(buffers, plane), strict=True):
                view[:] = source
        for count, steps in zip(store.rule_steps(0), worker.store.rule_steps(buffers), strict=True):
            count[0] = steps[0]
