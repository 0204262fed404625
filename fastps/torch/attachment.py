"""An optimizer's attachment to its job: the worker, the weights that its parameters show, and the gradients that it pushes."""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from fastps.checkpoint.periodic import Checkpointing
from fastps.errors import ArenaError
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import LANE_FREE, LANE_JOINING, LANE_LIVE
from fastps.membership.job_memory import JobMemory
from fastps.store import jobs_of_process
from fastps.store.equal_gradients import EqualGradients
from fastps.store.worker import Worker
from fastps.system import exit_handlers
from fastps.torch import foreign, state, tables
from fastps.torch.gradients import hooked
from fastps.torch.model_buffers import BufferRounds, ModelBuffers
from fastps.torch.placements.host import HostPlacement
from fastps.torch.weights import Weights

logger = logging.getLogger("fastps.torch")

_POLL_NS = 1_000_000
_SETTLES_NS = 10_000_000_000  # how long a worker in virtual time waits for worker 0's weights: the driver posts its push later


class Attachment:
    """What an optimizer has of its job. With sync="auto" the job changes once, and the attachment stays.

    Args:
        close: leaves the job as the optimizer does; called before another job begins with any of the tensors.
        versions: those of the shards at the job's beginning; [] for zeros.
    """

    worker: Worker
    store: JobMemory
    weights: Weights
    gradients: Any
    rounds: BufferRounds
    equal_gradients: EqualGradients

    def __init__(
        self,
        placement: HostPlacement,
        tensors: list[Any],
        buffers: ModelBuffers,
        close: Callable[[], None],
        versions: Sequence[int],
    ) -> None:
        self.placement, self.tensors = placement, tensors
        self._buffers, self._close, self._first_versions = buffers, close, versions
        self.is_late = False  # whether the job has weights that this worker's script does not know
        self.has_begun = False  # whether the first step has been made, before which a script may write weights
        self._first: list[int] | None = None  # the first weights' buffers, while the parameters are the script's own memory
        self._was_own = self._is_void = False  # whether they were that; whether its first gradient is not at the job's weights
        self.checkpointing: Checkpointing | None = None
        self._hooks: list[Any] = []

    @torch.inference_mode(mode=False)
    def use(self, worker: Worker) -> None:
        """Push gradients to, and pull weights from, this worker's arena from now on. Raises ArenaError.

        Its tensors are not of inference mode, in which a script may wrap, step or look: a later backward could not use them.
        """
        self.placement.begin()
        self.worker, self.store = worker, worker.store
        self.weights = Weights(self.tensors, self.store, partial(self.placement.shown_views, self.store))
        self.is_late = worker.generation > 0
        policy = self.store.layout.policy
        self.clip = policy.clip
        self.gradients = tables.gradients_of(self.placement, worker, self.tensors, policy.waits_for_fold)
        self.rounds = BufferRounds(self._buffers, worker)
        self.equal_gradients = EqualGradients(worker, reads_slots=self.placement.name != "device")
        exit_handlers.register(worker, self.leave, self.wait_for_others)
        jobs_of_process.register(worker, self.tensors, self._close, self.wait_for_others)
        try:
            self.placement.use(worker)
        except ArenaError as error:
            exit_handlers.forget(worker)
            worker.close(str(error))
            worker.store.close()
            raise

    def hook(self, others: Sequence[Any]) -> None:
        """Copy gradients during backward, and take the job's weights. `others`: handles of hooks to remove at the end."""
        dense = [(index, tensor) for index, tensor in enumerate(self.tensors) if index not in self.store.tables]
        made = [hooked(tensor, self._put(index)) for index, tensor in dense] if self.gradients.is_hooked else []
        self._hooks = [*made, *others]
        self.take_weights()
        if not self.placement.shows_arena:
            self.weights.remember()

    def _put(self, index: int) -> Callable[[torch.Tensor], None]:
        """The function that autograd calls after it has accumulated into a parameter's `p.grad`."""

        def put(tensor: torch.Tensor) -> None:
            self.gradients.put(index, self.worker.lane.slot, tensor)

        return put

    def change_to(self, moved: Worker) -> None:
        """Leave the present job for another, which has its weights and its state."""
        old = self.worker
        self.gradients.clone()
        self.use(moved)
        self.take_weights()
        exit_handlers.forget(old)
        old.close()
        old.store.close()

    @property
    def total_steps(self) -> int:
        """The steps of this worker and of those that it replaces."""
        return self.worker.earlier_steps + self.worker.own_steps

    def tensor_views(self, views: list[Any]) -> list[torch.Tensor]:
        """Tensors over flat views of the arena, one per parameter."""
        return self.placement.tensor_views(self.store, views)

    def take_weights(self, written: Collection[int] = ()) -> None:
        """Update every parameter to the newest version. Autograd is told of those that this worker has `written`."""
        if not self.has_begun and self._stays_own():
            return
        self._first = None
        self.placement.pull(self.weights, self.worker, written)
        if self.has_begun or not self.placement.shows_arena:
            return
        if self.total_steps == 0 and (self.is_late or self._first_versions or any(self._pulled_versions())):
            self.is_late = True  # replaces a lost worker, resumes, or its discipline does not wait for it
            self.weights.show_copies()  # so that a script that loads weights now does not write into the job's
        self._accept_writes()
        self.weights.remember()
        self.has_begun = self.total_steps > 0

    def _pulled_versions(self) -> list[int]:
        return [self.worker.lane.shard_version(shard) for shard in range(self.store.arena.shards)]

    def _stays_own(self) -> bool:
        """Whether the parameters are the script's own memory with the first weights, until its first step ends.

        So each worker may write them, also in terms of what they were (`p.mul_(0.5)`), and `_settle` compares.
        """
        if self.total_steps or self.is_late or self._first_versions or not self.placement.keeps_own(self.store):
            return False
        pulled = list(self.worker.pull())
        if any(self._pulled_versions()) or pulled != (self._first if self._was_own else pulled):
            return False  # others have trained, or weights were replaced
        if not self._was_own:
            self._first, self._was_own = pulled, True
            self.weights.remember()
        return True

    def take_newest(self) -> None:
        """Take weights that only others have pushed. Autograd is told of every parameter in a shard with a new version."""
        before = self._pulled_versions()
        self.take_weights()
        fresh = {shard for shard, (old, new) in enumerate(zip(before, self._pulled_versions(), strict=True)) if old != new}
        self.weights.count_writes({index for index, each in enumerate(self.store.parameters) if each.shard in fresh})

    def _settle(self, first: list[int]) -> None:
        """Make what worker 0's script wrote before its first step the job's weights.

        Every other script writes the same, and its worker waits for worker 0's values. One that has others makes a null push.
        If others have trained by then, worker 0's values replace theirs.
        Raises ParameterChangedError for parameters of another form, and as `Worker.wait_until`.
        """
        if (index := self.weights.misfit(first)) >= 0:
            raise foreign.write_error(self.store.parameters[index].name, is_undone=False, has_moved=True)
        if self.weights.are(first):
            return
        arena, clock = self.store.arena, self.store.clock
        if self.worker.rank == 0 and not any(self._pulled_versions()):
            initial = range(self.store.layout.workers)  # each of them reads the first weights before it attaches
            self._wait(lambda: all(arena.lane_states()[lane] not in (LANE_FREE, LANE_JOINING) for lane in initial))
            if any(Lane(arena, lane).posted() for lane in initial[1:]):
                logger.warning(
                    "worker 0 wrote weights, the job's from now on, after others had pushed gradients of those before"
                )
            with self.worker.locked():  # no fold reads what is written
                if is_first := not any(arena.shard_version(shard) for shard in range(arena.shards)):
                    self.weights.write(first)
            if not is_first:
                state.publish_weights(self.worker, self.tensor_views, lambda newest: [each.detach() for each in self.tensors])
            elif self.store.layout.policy.ema:
                state.begin_average(self.worker, self.tensor_views)
            return

        def is_settled() -> bool:
            has_begun = Lane(arena, 0).posted() > 0 or arena.lane_states()[0] != LANE_LIVE
            return has_begun or self.weights.are(first) or (self.worker.driver is not None and clock.now_ns() > until_ns)

        until_ns = clock.now_ns() + _SETTLES_NS
        if self.worker.rank:
            self._wait(is_settled)
        self._is_void = self.is_late = not self.weights.are(first)

    def _wait(self, reached: Callable[[], bool]) -> None:
        text = f"worker {self.worker.rank} wrote weights before its first step, and waited for all to attach, or for worker 0's"
        self.worker.wait_until(lambda: reached() or None, _POLL_NS, lambda: text)

    def _accept_writes(self) -> None:
        """Take what a script has written before the first step for the job's first weights, with which the average begins."""
        if not self.is_late and self.store.layout.policy.ema and self.weights.changed() >= 0:
            state.begin_average(self.worker, self.tensor_views)

    def refuse_writes(self) -> None:
        """Raise ParameterChangedError for a write outside of step().

        Other workers read these buffers, so such a write would reach them at a random moment. Before the first step they are
        the script's own, so loading a model's state dict right after wrapping is allowed. A parameter that was pointed at
        other memory reaches no other worker, and the next step would point it back.
        """
        if self._first is not None:
            return self._settle(self._first)
        if (changed := self.weights.changed()) < 0:
            return
        undone = not self.placement.shows_arena or self.placement.name == "node"
        moved = not undone and self.weights.has_moved(changed)
        is_first = self.total_steps == 0 and (self.is_late or bool(self.store.tables))
        if undone or moved or not is_first:
            if not self.has_begun:
                foreign.check_not_averaged(self.tensors)  # the wrapper may have moved them
            raise foreign.write_error(self.store.parameters[changed].name, is_undone=undone, has_moved=moved)
        self._accept_writes()

    def begins_void(self) -> bool:
        """Whether this worker's script wrote weights that are not the job's, which it joined or resumed, or had from worker 0.

        Its first gradient is then not a gradient at the job's weights, so the worker makes a null push instead.
        """
        if not self.is_late or self.worker.own_steps or not (self._is_void or self.weights.changed() >= 0):
            return False
        joined = "worker 0 did not write the same" if self._is_void else "the job had begun without it, or was resumed"
        logger.warning("worker %d: what its script wrote to the parameters is not used: %s", self.worker.rank, joined)
        return True

    def wait_for_others(self) -> None:
        """Wait until every other worker has closed, and take the final weights.

        Raises ParameterChangedError if those take the place of what the script wrote after its last step.
        """
        self._leave_buffers()
        before = self._pulled_versions()
        self.worker.wait_for_others()
        if self.has_begun and self._pulled_versions() != before:
            self.refuse_writes()
        self.take_weights()

    def _leave_buffers(self) -> None:
        """Publish this worker's buffers for averages after it has left. No error stops it leaving: it is logged."""
        if self.worker.has_left:
            return
        try:
            self.rounds.leave()
        except Exception as error:
            logger.warning("the model's buffers of worker %d are not published: %s", self.worker.rank, error)

    def leave(self, failure: str | None) -> None:
        """Leave the job: the parameters become private copies of the weights last taken."""
        if self.worker.closed or self.worker.forked:
            return
        if self.checkpointing is not None:
            self.checkpointing.close(failed=failure is not None)
        self.placement.end()
        if failure is None and self.has_begun and (changed := self.weights.changed()) >= 0:
            logger.warning(
                "parameter %r was written to after the last step(): until close() all workers share its memory, so each may"
                " have evaluated and saved what another wrote; call close() before you load or write weights",
                self.store.parameters[changed].name,
            )
        for hook in self._hooks:
            hook.remove()
        self.weights.show_copies()
        self.gradients.clone()
        self.weights.leave()
        if failure is None:
            self._leave_buffers()
        try:
            self.worker.close(failure, stays=True)
        finally:
            exit_handlers.forget(self.worker)
            jobs_of_process.forget(self.worker)
            self.store.close()
