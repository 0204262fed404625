"""A worker: it pushes gradients, waits for grants and pulls weights. The compiled Lane does the fast path of a step."""

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.errors import Error, UsageError, damaged
from fastps.job import limits
from fastps.job.update_rules import Hyper
from fastps.kernels.protocol.lane import BUSY, DONE, FULL, KIND_NULL, KIND_PUSH
from fastps.kernels.shm.arena import LANE_FREE, LANE_JOINING, LANE_LIVE
from fastps.membership import rendezvous
from fastps.membership.job_memory import JobMemory, by_name
from fastps.membership.membership import Membership
from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining, Push
from fastps.store.elsewhere import Elsewhere
from fastps.store.freed_readers import FreedReaders
from fastps.store.row_slots import Presence, RowSlots
from fastps.store.worker_momentum import WorkerMomentum
from fastps.system import launch_note
from fastps.tracing.recorder import recorder_for

logger = logging.getLogger("fastps.worker")

_live: "weakref.WeakSet[Worker]" = weakref.WeakSet()
_MOST_PULLS = 16  # the most pulls in a row without a push, if the others wait for the slowest worker


class Worker(AttachedLane):
    """One attached worker. `Store.attach` creates it; only one thread may use it.

    Attributes:
        rank: this worker's lane.
        earlier_steps: steps that this process's worker pushed in an earlier arena (sync="auto").
        begun_at: `steps` when this worker attached.
        generation: the generation of the lane's owner; 0 for the first owner of an initial worker's lane.
        recorder: the recorder of this worker's part of a trace, or None.
        rows: the rows of tables in this worker's slots.
        combining: the part that folds what this worker pushes.
        drawn_samples: the samples of a push that tells none, where batches are tuned; 0: unknown.
    """

    combining: Combining

    def __init__(
        self,
        store: JobMemory,
        rank: int,
        listener: rendezvous.Listener,
        generation: int = 0,
        combining: Callable[[AttachedLane], Combining] = Combining,
    ) -> None:
        super().__init__(store, rank)
        lane = self.lane
        self.earlier_steps = self.drawn_samples = 0
        self.generation = generation
        counted = store.arena.counters(rank)  # by the lane's earlier workers
        self._steps_before, lane.samples = counted["steps"], counted["samples"]
        lane.wait_ns, lane.compute_ns, lane.push_ns = counted["wait_ns"], counted["compute_ns"], counted["push_ns"]
        lane.announce(0)
        launch_note.send()
        self._listener = listener
        policy = self._policy
        self._goes_on_at_once, self._needs_samples = policy.at_once, policy.needs_samples  # each step reads them
        lane.granted_ns = self._clock.now_ns()
        self._pulled_at = self._idle_at = -1  # posts at the last pull, and at the last pull without a push before it
        self._pulls_in_a_row = 0
        slots = store.layout.slots
        self._sent_hypers: list[tuple[Hyper, ...] | None] = [None] * slots
        self._sent_presence: list[bytes | None] = [None] * slots
        self.rows, self._freed_readers = RowSlots(store, rank), FreedReaders(self)
        self._named_gradients: dict[int, Mapping[str, npt.NDArray[Any]]] = {}
        self._presence = Presence(store.layout.parameters)
        self.recorder = None
        self._momentum = WorkerMomentum(store, rank, generation > 0) if store.layout.rule.in_workers else None
        self._membership = Membership(self, generation)
        self.use(combining(self))
        if generation:
            self.recorder = recorder_for(self)  # this lane commits while it joins
            self._membership.join()
        lane.steps = self.begun_at = lane.begin_steps()
        if lane.steps < 0:
            raise damaged(f"worker {rank}'s grant ({lane.steps + 1} steps)")
        lane.earlier_steps = self._steps_before - self.begun_at
        _live.add(self)
        self.pull()
        self.recorder = self.recorder or recorder_for(self)
        try:
            self.combining.begin()
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise

    def step(self, gradients: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Push the gradients in the slot, wait for the grant, and pull. `gradients`, if given, are first copied into the slot.

        The push has the rows that `put_rows` gave since the last one; a table without such rows stays as it is.

        Raises WorkerDiedError, ExpelledError, TimeoutExceededError; KeyError or ValueError for other names or shapes.
        """
        if self.lane.awaits:
            self.advance()  # a fold may still read the slot
        if gradients is not None:
            for name, view in self.gradients.items():
                view[...] = np.asarray(gradients[name], view.dtype).reshape(view.shape)
        self.push(self.store.hypers)
        self.advance()
        self.pull()

    def put_rows(self, table: str, numbers: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Give the next push rows of a table: their numbers, and a row of values for each. Values of equal numbers are summed.

        Raises UsageError for a name that is no table, a number out of range, or values of another shape.

        >>> import fastps
        >>> table = np.zeros((4, 2), np.float32)
        >>> with fastps.Store.create({"t": table}, fastps.SGD(lr=1.0), tables=["t"]) as store, store.attach(0) as worker:
        ...     worker.put_rows("t", [1, 3, 1], [[1, 0], [0, 2], [4, 0]])
        ...     worker.step()
        ...     worker.weights["t"].tolist()
        [[0.0, 0.0], [-5.0, 0.0], [0.0, 0.0], [0.0, -2.0]]
        """
        if self.lane.awaits:
            self.advance()  # a fold may still read the slot
        index = self.rows.number_of(table)
        self.rows.put(self.slot, index, numbers, values)
        self._presence.add(index)

    def push(
        self,
        hypers: Sequence[Hyper],
        *,
        presence: bytes | None = None,
        scale: float = 1.0,
        null: bool = False,
        samples: int = 0,
    ) -> None:
        """Post the slot as this worker's next push, and combine if the shard locks are free. Do not wait for other workers.

        If the grant of the step before is still outstanding, because an error ended its `advance`, wait for that first. A full
        ring is waited for, too.
        """
        if self.forked or self.closed or self._left:
            self._refuse()
        if not 0 <= samples < 1 << 32:
            raise UsageError(f"expected 0 to {(1 << 32) - 1:,} samples in a push (batch_size=, report_loss), found {samples}")
        if self._needs_samples and samples < 1 and (samples := self.drawn_samples) < 1:
            raise UsageError(
                f"{self._policy.spec} scales by samples: expected the size of the batch with each push, found none;"
                " tell it by report_loss(loss, samples) or DistributedOptimizer(batch_size=)"
            )
        lane = self.lane
        if lane.awaits:
            self.advance()  # the slot still holds the push before
        present = b"" if null else self._presence.take() if presence is None else presence
        if self._momentum is not None and not null:
            hypers, scale = self._momentum.add(lane.slot, hypers, present, scale)
        if not self._is_direct:
            self.combining.before_push(None if null else lane.slot)
        now_ns = self._clock.now_ns()
        if not null:
            slot = lane.slot
            if self._sent_hypers[slot] is not hypers or self._sent_presence[slot] is not present:
                self._write_slot_header(slot, hypers, present)
        if self._is_direct and self.recorder is None:
            outcome = lane.push(now_ns, scale, samples, null)
            if outcome != DONE and outcome != BUSY:
                self._push_late(outcome, scale, samples, null)
        else:
            self._push_on_its_way(now_ns, scale, samples, null)
        if now_ns - self._checked_ns > limits.LIVENESS_NS and not self.combining.is_driven:  # a driver notices ends itself
            self.check_peers(now_ns)
            self._freed_readers.look(now_ns)

    def push_nothing(self) -> bool:
        """Make a null push that has read the newest version, if the step may begin; wait for nothing, and pull nothing."""
        lane = self.lane
        if lane.awaits:
            if not lane.advance(self._clock.now_ns(), self._goes_on_at_once):
                return False
            if self.recorder is not None:
                self.recorder.granted(lane.granted_ns)
        newest = min(self.store.arena.shard_version(shard) for shard in range(self._shards))
        self._push_on_its_way(self._clock.now_ns(), 1.0, 1, True, max(newest, lane.version))
        return True

    def _push_late(self, outcome: int, scale: float, samples: int, null: bool) -> None:
        """Handle the outcome of a push: an error while combining, or a full ring."""
        while outcome == FULL:
            began_ns = self._clock.now_ns()
            self.wait_for_room()
            now_ns = self._clock.now_ns()
            self.lane.wait_ns += now_ns - began_ns  # and not counted as computed
            self.lane.granted_ns += now_ns - began_ns
            outcome = self.lane.push(now_ns, scale, samples, null)
        self._finish_combine(outcome)

    def _push_on_its_way(self, now_ns: int, scale: float, samples: int, null: bool, read: int = -1) -> None:
        """Push by more calls than one, or with a record. `read`: the version, if not the pulled one."""
        recorder, posts, loss = self.recorder, self.lane.posts, self.lane.loss
        step, slot, version = self.lane.begin_push(now_ns, samples, null)
        version = read if read >= 0 else version
        if recorder is not None:
            rows = self.rows.counts(slot, b"" if null else self._sent_presence[slot] or b"")
            recorder.computed(now_ns, posts, step, version, samples, -1 if null else slot, rows)
        if self.combining.send(Push(KIND_NULL if null else KIND_PUSH, step, slot, version, scale, loss, samples)):
            self.lane.pushed_ns = self._clock.now_ns()
            self.lane.wait_ns += self.lane.pushed_ns - now_ns
        self.combining.after_push()
        if recorder is not None:
            recorder.pushed(self._clock.now_ns())

    def advance(self) -> None:
        """Wait until the next step is granted and its slot may be written. Combine and check the peers meanwhile."""
        if self.forked:
            self._refuse()
        if not self._is_direct:
            self.combining.advance()
        elif not self.lane.advance(self._clock.now_ns(), self._goes_on_at_once):
            self.combining.advance_late()
        if self.recorder is not None:
            self.recorder.granted(self.lane.granted_ns)
        if self.store.arena.rejections != self._membership.rejections:
            self._membership.report_rejections()

    def pull(self) -> list[int]:
        """Pin the published weights of each fresh shard, and return the buffers of all shards. Nothing is copied.

        Raises UsageError for a worker that only pulls, under a discipline whose workers wait for the slowest.
        """
        if self.forked or self.closed:
            self._refuse()
        posts = self.lane.posts
        if posts == self._pulled_at:
            self._pull_again()
        self._pulled_at = posts
        if not self._pulls_directly:
            self.combining.pull(self.buffers)
        elif (shard := self.lane.pull_all(self.buffers)) >= 0:
            raise damaged(f"the commit word of shard {shard}")
        if self.recorder is not None:
            self.recorder.pulled(self.combining.pull_transfer_ns)
        return self.buffers

    def _pull_again(self) -> None:
        """Count pulls without a push between them: a worker that only pulls delays all that wait for the slowest worker."""
        self._pulls_in_a_row = self._pulls_in_a_row + 1 if self.lane.posts == self._idle_at else 1
        self._idle_at = self.lane.posts
        if self._pulls_in_a_row > _MOST_PULLS and not self._goes_on_at_once and not self._left:
            raise UsageError(
                f"worker {self.rank} has pulled {self._pulls_in_a_row} times since its last push: under {self._policy.spec} the"
                " others wait for every attached worker, so expected a push after each pull; a process that only looks at the"
                " weights has to stay out of the job (fastps.observe for counters, fastps.reader for weights)"
            )

    def fold_apart(self, apart: bool) -> None:
        """Post and fold by two calls, if `apart`, so that a profiler can tell them apart; else by one, which is faster."""
        self._is_direct = self.combining.is_direct and not (self._policy.overlap or apart)
        self._pulls_directly = self._is_direct and self._policy.pull == 1.0

    def use(self, combining: Combining) -> None:
        """Set the part that folds."""
        self.combining = combining
        self.fold_apart(False)

    def hand_on(self, later: "Worker") -> None:
        """Hand the counters on to this process's worker in a later arena."""
        later.earlier_steps = self.earlier_steps + self.own_steps
        lane, earlier = later.lane, self.lane
        lane.earlier_steps += later.earlier_steps
        lane.samples, lane.wait_ns, lane.compute_ns = earlier.samples, earlier.wait_ns, earlier.compute_ns
        lane.push_ns, lane.stale_blocks, lane.loss = earlier.push_ns, earlier.stale_blocks, earlier.loss
        lane.publish()
        self.combining.hand_on(later)

    @property
    def injected_transfer_ns(self) -> int:
        """What each transfer takes, in ns; 0 but in measurements with injected delays."""
        return self.combining.injected_transfer_ns

    @property
    def weights(self) -> Mapping[str, Any]:
        """Name to read-only array of the pulled weights, without a copy. The contents do not change before the next pull."""
        return self.combining.weights()

    @property
    def gradients(self) -> Mapping[str, npt.NDArray[Any]]:
        """Name to array in the slot of the next push, without tables. The slot holds old contents: write every array.

        Between a push and `advance` this is a slot that is free, or if all hold pushes, it waits as `advance` does.
        """
        if self.lane.awaits and not self.lane.choose_slot():
            self.advance()
        if self.slot not in self._named_gradients:
            pairs = zip(self.store.layout.parameters, self.store.gradient_views(self.rank, self.slot), strict=True)
            dense = [(parameter, view) for parameter, view in pairs if not parameter.is_table]
            self._named_gradients[self.slot] = by_name([pair[0] for pair in dense], [pair[1] for pair in dense])
        return self._named_gradients[self.slot]

    def _write_slot_header(self, slot: int, hypers: Sequence[Hyper], presence: bytes) -> None:
        """Write the hyper-parameters and the presence bitmap into the slot, unless the slot already holds them."""
        hypers = tuple(hypers)
        if self._sent_hypers[slot] != hypers:
            if len(hypers) != self.store.layout.groups:
                raise UsageError(
                    f"expected hyper-parameters of {self.store.layout.groups} groups, as the job was made for, found"
                    f" {len(hypers)}: add and remove groups before the optimizer is wrapped, or after unwrap()"
                )
            for group, hyper in enumerate(hypers):
                self.lane.set_hyper(slot, group, *hyper)
        self._sent_hypers[slot] = hypers
        if self._sent_presence[slot] != presence:
            self.lane.set_presence(slot, presence)
        self._sent_presence[slot] = presence

    def wait_for_start(self) -> None:
        """Wait until every worker of the job has attached, as a common start for measurements."""
        self._check_not_forked()
        arena, workers = self.store.arena, self.store.layout.workers
        self.wait_until(lambda: LANE_FREE not in arena.lane_states()[:workers], 1_000_000, self.timeout_text)
        self.combining.wait_for_start()
        self.lane.granted_ns = self._clock.now_ns()
        if self.recorder is not None:
            self.recorder.pulled(0)

    def wait_for_others(self, elsewhere: Sequence[Elsewhere] = ()) -> None:
        """Leave, wait until every other worker has attached and left too, and pull the final weights.

        Combine and check the peers meanwhile. This worker leaves first, so no other worker waits for its pushes; and it leaves
        its jobs `elsewhere` whose workers wait there for its pushes, and here are waited for.
        """
        self._check_not_forked()
        self.leave()
        self.combining.wait_for_others(elsewhere)
        self.pull()

    def _stay_for_latecomers(self) -> None:
        """Keep the listener open until all initial workers have attached, or another live worker can answer latecomers.

        Under disciplines without waits a worker may finish before another has attached, which would then find no job. After the
        timeout, or if a worker has died, stop waiting.
        """

        def are_served() -> bool:
            # This worker has changed its own state: of two workers that leave at once, one sees that the other leaves.
            states = self.store.arena.lane_states()
            return LANE_FREE not in states[: self.store.layout.workers] or LANE_LIVE in states or LANE_JOINING in states

        text = f"worker {self.rank} waited {self._timeout_ns / 1e9:g} s for initial workers that never attached"
        try:
            self.wait_until(are_served, 5_000_000, lambda: text, combines=True)
        except Error as error:
            logger.warning("%s", str(error))  # not its traceback, which holds the arena

    def check_usable(self) -> None:
        """Raise UsageError in a forked child or after close."""
        if self.forked or self.closed or self._left:
            self._refuse()

    def check_open(self) -> None:
        """Raise UsageError in a forked child or after close; a worker that waits for the others may still read."""
        if self.forked or self.closed:
            self._refuse()

    def close(self, failure: str | None = None, *, stays: bool = False) -> None:
        """Leave normally, so the others go on without this worker, or record `failure`, the error that the others report.

        With `stays`, the last live worker waits until all initial workers have attached. Every push posted before is folded, or
        left to the combiner. May be called twice; does nothing in a forked child.
        """
        if self.closed or self.forked:
            return
        try:
            try:
                if failure is None and self.combining.closes_last:
                    self.wait_for_others()
                self.combining.before_close(failure)
                self.closed = True
                if failure is None:
                    self.leave()
                    if stays:
                        self._stay_for_latecomers()
            finally:
                self.closed = True
                self.combining.end_threads()
        except BaseException as error:  # others may still wait for this worker, or for its lock
            failure = failure or f"{type(error).__name__}: {error}"
            raise
        finally:
            recorder = self.recorder  # `finish` clears the worker's own reference
            try:
                if recorder is not None:
                    recorder.finish(failure)
            finally:
                self.lane.unpin()  # before `finish`: after it the lane may have another owner
                self.store.arena.finish(self.rank, failure, self.generation)
                self.store.stop_answering(self._listener)
                self._membership.close()
                _live.discard(self)
                self.combining.after_close(failure)
            if recorder is not None:
                recorder.merge_if_last()

    def leave_virtual_time(self) -> None:
        """Leave where a driver decides, which lets this worker go on once all have left. Elsewhere this does nothing."""
        self.combining.leave_virtual_time()

    def check_moment(self, what: str) -> None:
        """Raise UsageError for what reads or writes the job between two steps, in virtual time: other workers change it.

        Where all make the same steps, none does. The moment at which a process comes to it follows from the machine's load.
        """
        if self.combining.is_driven and not self._policy.is_level:
            raise UsageError(
                f"{what} in virtual time: expected wait_for_others() before it, or workers that make the same steps (bsp),"
                f" found {self._policy.spec}, under which it would depend on the real moment"
            )

    def leave(self) -> None:
        """Make no more pushes, so that no worker waits for this one. Do not wait for the others. May be called twice."""
        if self._left:
            return
        self.combining.deliver_all()
        self._left = True
        self.combining.leave()
        self.store.arena.leave(self.rank, self.generation)
        self._combine_last()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(None if error is None else f"{type(error).__name__}: {error}")


def _after_fork_in_child() -> None:
    for worker in list(_live):
        worker.forked = True


os.register_at_fork(after_in_child=_after_fork_in_child)
