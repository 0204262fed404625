"""The part of a worker that folds what it pushes: here the workers fold themselves, or a server does, in host memory.

A worker asks its part before and after a push, a pull and the shard locks, and where its server has ended. The parts of jobs on
devices, on several nodes, in virtual time and with injected delays answer otherwise; everything else is the worker's.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy.typing as npt

from fastps.errors import CheckpointError, LayoutError, NodeLostError, ProtocolError, UnsupportedError, UsageError, damaged
from fastps.kernels.combining.fold_call import FoldCall
from fastps.kernels.protocol.lane import KIND_LEAVE
from fastps.kernels.protocol.wait import Wait
from fastps.kernels.shm.arena import LANE_LEFT
from fastps.membership.job_memory import by_name
from fastps.store.attached_lane import AttachedLane
from fastps.store.background import Background
from fastps.store.drive import drive
from fastps.store.elsewhere import Elsewhere, Standstill
from fastps.store.lane_room import LaneRooms

_MOST_NAMED = 256  # combinations of buffers whose views are cached
# What an agent ends with that starting it again does not heal.
_REFUSALS = {kind.__name__: kind for kind in (CheckpointError, LayoutError, UnsupportedError, UsageError)}


class Push(NamedTuple):
    """What a worker pushes: the arguments of its lane's `post`."""

    kind: int
    step: int
    slot: int
    version: int
    scale: float
    loss: float
    samples: int


class Combining:
    """The workers fold while they wait, or the server that they wake; the worker's lane knows which.

    Attributes:
        is_direct: whether one compiled call posts a push and folds it, and one pulls. Else the methods of the part do.
        is_driven: whether a driver of virtual time decides what the worker reads, and when: until all have left.
        injected_transfer_ns: what each transfer takes, in ns; 0 but in measurements with injected delays.
        pull_transfer_ns: what the transfer of the last pull took, with the wait for its link.
    """

    is_direct: ClassVar[bool] = True
    is_driven = False
    injected_transfer_ns = pull_transfer_ns = 0

    def __init__(self, worker: AttachedLane) -> None:
        self._worker, self._lane, self._clock = worker, worker.lane, worker.store.clock
        self._policy, self._shards = worker.store.layout.policy, worker.store.arena.shards
        # Round the fraction up to whole shards. 0.55 of 20 is 11, although the floating-point product is slightly more.
        self._needed_shards = math.ceil(self._policy.pull * self._shards - 1e-9)
        self._background: Background | None = None
        self._named: dict[tuple[int, ...], Mapping[str, npt.NDArray[Any]]] = {}

    def begin(self) -> None:
        """The worker has attached and pulled once. An error ends it."""

    # -- a push ------------------------------------------------------------------------------------

    def before_push(self, slot: int | None) -> None:
        """Called before a push of this slot, or before a null push."""

    def send(self, push: Push) -> bool:
        """Deliver a push, with overlap in another thread. Returns whether the time that this takes counts as waited."""
        if not self._policy.overlap:
            self._deliver(push)
            return False
        self._background = self._background or Background(self._lane, self._transfer, self._clock)
        self._background.send(partial(self._deliver, push))
        return True

    def after_push(self) -> None:
        """Called after a push."""

    def _deliver(self, push: Push) -> None:
        transfer_ns = self._transfer()
        recorder = self._worker.recorder  # the worker's thread may end it meanwhile
        if recorder is not None:
            recorder.posted(push.step, self._clock.now_ns(), transfer_ns)
        self.post(push)
        self._worker.try_combine()

    def _transfer(self) -> int:
        """Wait for as long as a transfer takes, and return that, in ns: 0, because all is in shared memory."""
        return 0

    def post(self, push: Push) -> None:
        """Post a descriptor as soon as the ring has room for it."""
        kind, step, slot, version, scale, loss, samples = push
        while not self._lane.post(kind, step, slot, version, self._clock.now_ns(), scale, loss, samples):
            self._worker.wait_for_room()

    # -- a step's wait, and a pull -------------------------------------------------------------------

    def advance(self) -> None:
        """Wait until the next step is granted and its slot may be written."""
        if not self._lane.advance(self._clock.now_ns(), self._policy.at_once):
            self.advance_late()

    def advance_late(self) -> None:
        """Wait for the grants of enough shards, with partial pull for a short time for those of the others, and advance."""
        granted = 0 if self._policy.at_once else self._lane.steps + 1
        granted_ns = self._wait_for_step(granted, self._needed_shards)
        if self._needed_shards < self._shards:
            granted_ns = self._wait_for_more(granted)
        self._lane.advance_late(granted_ns)

    def _wait_for_step(self, granted: int, shards: int) -> int:
        """Wait until `shards` shards have granted `granted` steps, and the next slot is free. Return the time then, in ns."""
        return self._worker.wait_for_step(granted, self._lane.slot_free_at, shards)

    def _wait_for_more(self, granted: int) -> int:
        """Wait up to the pull timeout for shards that are not fresh yet (tau2 of PSP-SGD). Return the time it ended, in ns."""
        wait, now_ns = Wait(self._lane), self._clock.now_ns()
        wait.begin_step(granted, 0, now_ns, until_ns=now_ns + int(self._policy.pull_timeout * 1e9))
        drive(self._worker, wait, None)
        return self._clock.now_ns()

    def _is_fresh(self, shard: int, granted: int) -> bool:
        return self._lane.granted(shard) >= granted

    def pull(self, buffers: list[int]) -> None:
        """Pin the newest version of each fresh shard, and write the numbers of its buffer into `buffers`.

        A shard that has not granted the step (partial pull) keeps its old weights: PSP-SGD, Algorithm 1, worker, line 4.
        """
        if self._background is not None:
            newest = self._background.newest()
            if newest is not None:
                buffers[0] = newest
        elif self._needed_shards < self._shards:
            for shard in range(self._shards):
                if not self._is_fresh(shard, self._lane.steps + 1):
                    self._lane.stale_blocks += 1
                elif (buffer := self._lane.pull(shard)) >= 0:
                    buffers[shard] = buffer
                else:
                    raise damaged(f"the commit word of shard {shard}")
        elif (shard := self._lane.pull_all(buffers)) >= 0:
            raise damaged(f"the commit word of shard {shard}")

    def weights(self) -> Mapping[str, Any]:
        """Name to read-only array of the pulled weights, without a copy."""
        key = tuple(self._worker.buffers)
        named = self._named.get(key)
        if named is None:
            named = by_name(self._worker.store.layout.parameters, self._worker.store.weight_views(key))
            for view in named.values():
                view.flags.writeable = False
            if len(self._named) >= _MOST_NAMED:
                self._named.clear()  # the shards' buffers combine in many ways
            self._named[key] = named
        return named

    # -- the shard locks -----------------------------------------------------------------------------

    def after_lock(self) -> None:
        """Called with all shard locks held, before the worker reads or writes what they guard."""

    def before_release(self, publish: bool) -> None:
        """Called before the locks are released; with `publish` the worker has written what is published."""

    # -- ends ----------------------------------------------------------------------------------------

    def deliver_all(self) -> None:
        """Wait until each push is delivered, and end the threads. Raises the error of a delivery."""
        if self._background is not None:
            self._background.wait_until_delivered()
        self.end_threads()

    def end_threads(self) -> None:
        """End the threads of a worker with overlap, which use the arena."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def wait_for_start(self) -> None:
        """Wait for workers that this arena does not have, once all of its own have attached."""

    def wait_for_buffers(self, number: int) -> None:
        """Wait for the model buffers of workers that this arena does not have, of a round; all of its own have published."""

    def leave(self) -> None:
        """Make no more pushes, and tell the combiners."""
        self.post(Push(KIND_LEAVE, self._lane.steps, 0, self._lane.version, 1.0, math.nan, 0))

    def leave_virtual_time(self) -> None:
        """Leave where a driver decides, which lets this worker go on once all have left."""

    def wait_for_others(self, elsewhere: Sequence[Elsewhere] = ()) -> None:
        """Wait until every other worker has left, too. `elsewhere`: this process's other jobs, which combine meanwhile.

        Those are left if all workers that have not left here wait, and some of them there: nobody would go on.
        """
        wait = Wait(self._lane)
        wait.begin_last(self._worker.store.layout.workers, self._clock.now_ns())
        standstill = Standstill(self._worker, elsewhere)
        drive(self._worker, wait, self._worker.timeout_text, standstill.leave_if_stuck, standstill.beside())

    @property
    def closes_last(self) -> bool:
        """Whether the worker has to wait for the others before it closes normally."""
        return False

    def before_close(self, failure: str | None) -> None:
        """Called before the worker closes, normally or with a failure. An error of this method is a failure, too."""

    def after_close(self, failure: str | None) -> None:
        """Called once the lane is closed."""

    def hand_on(self, later: AttachedLane) -> None:
        """The worker goes on as `later`, in another arena."""

    # -- what goes wrong -----------------------------------------------------------------------------

    def on_server_end(self) -> None:
        """The server has ended: let the workers combine, or raise the error that ends the job."""
        self._worker.combine_itself()

    def explain_failure(self) -> bool:
        """Raise the cause of a failed fold, if it is known. True: go on all the same."""
        return False


class AgentCombining(Combining):
    """A node's agent folds, because it talks to the other nodes. No worker of the node can do its work.

    The agent of a replica gives the other nodes what a worker publishes.
    """

    def __init__(self, worker: AttachedLane) -> None:
        super().__init__(worker)
        self._rooms = LaneRooms(worker.store, 0) if worker.store.layout.server == "replica" else None

    def before_release(self, publish: bool) -> None:
        """Tell the agent of a replica what this worker publishes."""
        if publish and self._rooms is not None:
            self._rooms.count_publication(self._worker.rank)

    def wait_for_start(self) -> None:
        """Wait until the workers of the other nodes have attached, too."""
        rooms = self._rooms
        if rooms is not None:
            self._worker.wait_until(lambda: rooms.have_started or None, 1_000_000, self._worker.timeout_text)

    def wait_for_buffers(self, number: int) -> None:
        """Raises TimeoutExceededError if the workers of another node do not average theirs."""
        rooms, worker = self._rooms, self._worker
        if rooms is not None:
            text = (
                f"worker {worker.rank} of this node waited {worker.store.timeout_s:g} s in average_buffers(), its call number"
                f" {number}, for the workers of other nodes: expected every live worker to call it as often as the others;"
                " raise FASTPS_TIMEOUT if they are only slow"
            )
            worker.wait_until(lambda: rooms.gathered >= number or None, 1_000_000, lambda: text, combines=True)

    def wait_for_others(self, elsewhere: Sequence[Elsewhere] = ()) -> None:
        """The agent leaves last, once the workers of all nodes have."""
        worker = self._worker
        worker.wait_until(lambda: not worker.store.arena.is_served(), 5_000_000, worker.timeout_text)
        super().wait_for_others(elsewhere)

    def on_server_end(self) -> None:
        """Raises the agent's refusal, or NodeLostError, unless the agent has left as it does at the end."""
        arena = self._worker.store.arena
        if arena.lane_state(arena.server_lane) != LANE_LEFT:
            kind, _, reason = arena.failure(arena.server_lane).partition(": ")
            killed = f"this node's agent (process {arena.process_id(arena.server_lane)}) was killed"
            raise _REFUSALS.get(kind, NodeLostError)(reason or killed)
        self._lane.fold_with(_fold_nothing, ())
        super().on_server_end()


def _fold_nothing(_call: FoldCall) -> None:
    raise ProtocolError("a worker of one node of several folds nothing: its agent has the sums of the others")
