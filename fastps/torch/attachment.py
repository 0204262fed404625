"""An optimizer's attachment to its job: the worker, the weights that its parameters show, and the gradients that it pushes."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.checkpoint.periodic import Checkpointing
from fastps.errors import ArenaError, ParameterChangedError
from fastps.kernels.protocol.lane import UNDECIDED, Lane
from fastps.kernels.shm.arena import LANE_FREE, LANE_JOINING, LANE_LIVE
from fastps.membership.job_memory import JobMemory
from fastps.store import jobs_of_process
from fastps.store.agreed_writes import disagreeing, others_of
from fastps.store.equal_gradients import EqualGradients
from fastps.store.equal_options import EqualOptions
from fastps.store.worker import Worker
from fastps.system import exit_handlers
from fastps.torch import foreign, state, tables
from fastps.torch.early import EarlyMarks
from fastps.torch.gradients import hooked
from fastps.torch.model_buffers import BufferRounds, ModelBuffers
from fastps.torch.placements.host import HostPlacement
from fastps.torch.weights import Weights, digest_of, merged

logger = logging.getLogger("fastps.torch")

_POLL_NS = 1_000_000


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
    equal_options: EqualOptions

    def __init__(
        self, placement: HostPlacement, buffers: ModelBuffers, close: Callable[[], None], versions: Sequence[int]
    ) -> None:
        self.placement, self.tensors = placement, placement.tensors
        self._buffers, self._close, self._first_versions = buffers, close, versions
        self.is_late = False  # whether the job has weights that this worker's script does not know
        self.has_begun = False  # whether the first step has been made, before which a script may write weights
        self.is_early = True  # whether it has not, or a parameter is memory of the script's own
        self._everything = range(len(self.tensors))
        self._own: Collection[int] = self._everything if placement.keeps_own else ()  # parameters of the script's own memory
        self._first: list[int] | None = None  # the buffers of the first weights, while the script knows no others
        self._is_refused = False  # whether what this worker announced of its next push has been refused
        self._is_void = False  # whether this worker's first gradient is not at the job's weights
        self.checkpointing: Checkpointing | None = None
        self._hooks: list[Any] = []

    @torch.inference_mode(mode=False)
    def use(self, worker: Worker) -> None:
        """Push gradients to, and pull weights from, this worker's arena from now on. Raises ArenaError.

        Its tensors are not of inference mode, in which a script may wrap, step or look: a later backward could not use them.
        """
        self.placement.begin()
        try:
            self.placement.use(worker)
        except ArenaError as error:
            worker.close(str(error))
            worker.store.close()
            raise
        self.worker, self.store = worker, worker.store
        self.weights, view = Weights(self.tensors, self._own), self.tensors.view
        self.is_written = view.is_written if view is not None else lambda: False
        self._counts, self._frozen = self._count_updates(), self.store.frozen
        self.is_late, self._is_alone = worker.generation > 0, self.store.layout.lanes == 1
        policy = self.store.layout.policy
        self.clip = policy.clip
        self.gradients = tables.gradients_of(self.placement, worker, policy.waits_for_fold)
        self.early = EarlyMarks.of(worker, self.gradients)
        self.rounds, self.carried = BufferRounds(self._buffers, worker), self._buffers.carried
        self.carries = bool(self.store.layout.carried)  # whether a push brings the model's buffers while anybody reads
        self.carried.use(worker)
        self.equal_gradients = EqualGradients(worker, reads_slots=self.placement.name != "device")
        self.equal_options = EqualOptions(worker, reads_slots=self.placement.name != "device")
        exit_handlers.register(worker, self.leave, self.wait_for_others)
        jobs_of_process.register(worker, self.tensors, self._end_pushes, self._close, self.wait_for_others)

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
            if self.gradients.put(index, self.worker.lane.slot, tensor) and self.early is not None:
                self.early.put(index, tensor)

        def thaw_and_put(tensor: torch.Tensor) -> None:
            if not self.store.arena.length_of(index):
                self._thaw([index])
            put(tensor)

        return thaw_and_put if index in self.store.frozen else put

    def _thaw(self, indices: Collection[int]) -> None:
        """Give those of these parameters that are frozen memory for gradients and state. Raises ArenaError."""
        if self.store.frozen.intersection(indices):
            with self.worker.locked():
                self.store.thaw(indices)

    def before_push(self, slot: int, scale: float, *, is_null: bool) -> None:
        """Add to a slot what its push has besides gradients, which are complete, and count times `scale`."""
        if self.carries:
            self.carried.bring(slot)
        if self.early is not None:
            self.early.announce(slot, scale, is_null=is_null)

    def after_fold(self) -> None:
        """This worker's own fold has shown other memory as the parameters, and shows this worker's again."""
        if self.has_begun:
            self.weights.remember()

    def after_error(self, slot: int) -> None:
        """Let the script go on after an error in a step whose push is not folded yet: later, or without its own step()."""
        if not self.store.layout.steps_alone:
            return self.gradients.detach(slot)  # type: ignore[no-any-return]
        self.worker.advance()
        self.take_weights()

    def change_to(self, moved: Worker) -> None:
        """Leave the present job for another, which has its weights and its state."""
        old, self._own = self.worker, self.weights.own
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

    def take_weights(self, written: Collection[int] = ()) -> None:
        """Update every parameter to the newest version. Autograd is told of those that this worker has `written`.

        In a job of several workers it is told of all, because the others write, too.
        """
        if self.is_early:
            return self._take_early(written)
        self.placement.pull(self.weights, self.worker, written if self._is_alone else self._everything)

    def _take_early(self, written: Collection[int]) -> None:
        """Update while a parameter is memory of the script's own, or no step was made."""
        if self.total_steps == 0 and self.placement.keeps_own:
            return self._take_first()
        self._first = None
        if updated := self._updated():
            self.weights.leave_alone(self.weights.own - updated)
        self.is_early = bool(self.weights.own) or not self.has_begun
        self.placement.pull(self.weights, self.worker, written if self._is_alone else self._everything)
        if self.has_begun or not self.placement.shows_arena:
            return
        if self.total_steps == 0 and (self.is_late or self._first_versions or any(self._pulled_versions())):
            self.is_late = True  # replaces a lost worker, resumes, or its discipline does not wait for it
            self.weights.show_copies()  # so that a script that loads weights now does not write into the job's
        self.weights.remember()
        self.has_begun = self.total_steps > 0
        self.is_early = bool(self.weights.own) or not self.has_begun

    def _pulled_versions(self) -> list[int]:
        return [self.worker.lane.shard_version(shard) for shard in range(self.store.arena.shards)]

    def _take_first(self) -> None:
        """Before the first step: leave the parameters the script's own memory, with the job's weights in it.

        So each worker may write them, also in terms of what they were (`p.mul_(0.5)`), and `_agree_on_first` compares.
        """
        pulled = list(self.worker.pull())
        has_trained = self.is_late or bool(self._first_versions) or any(self._pulled_versions())
        if has_trained or self._first not in (None, pulled):  # others' weights, or what replaced the first
            self._check_form()
            self.weights.take(pulled)
        self.is_late, self._first = has_trained, None if has_trained else pulled
        self.weights.shown = pulled

    def _count_updates(self) -> npt.NDArray[np.int64]:
        """How often each parameter was updated, by any worker; empty where no parameter is memory of the script's own."""
        if not self._own:
            return np.empty(0, np.int64)
        steps = np.stack([self.store.all_steps(buffer) for buffer in self.store.committed()[1]])
        return steps.max(axis=0)  # type: ignore[no-any-return]  # another shard's buffer may have an earlier count

    def _updated(self) -> set[int]:
        """The parameters of the script's own memory that another worker has trained or replaced since this one attached."""
        trained = set(np.flatnonzero(self._count_updates() > self._counts).tolist())
        return self.weights.own & (trained | (self._frozen - self.store.frozen))

    def adopt_writes(self) -> None:
        """Make what the script has written since the last step a part of this one, or raise ParameterChangedError.

        A parameter without a gradient so far is memory of the script's own. With its first gradient it is the job's: what the
        script made of it counts as written.
        """
        if self._is_refused:
            self.worker.lane.announce(0)
            self._is_refused = False
        may_differ = self._may_differ()  # asked in every step, because that keeps the handler of faults in front
        gained = {index for index in self.weights.own if self.tensors[index].grad is not None}
        if self.store.layout.steps_alone:  # a closure makes the gradients later
            trains = {index for index in self.weights.own if self.tensors[index].requires_grad}
            gained |= trains | (self.weights.own - self.store.frozen)
        self._thaw(gained)
        if self._first is not None:
            self._agree_on_first(self._first, gained)
        elif self.total_steps == 0 and self.placement.keeps_own:
            self._is_void = bool(self.weights.differing(gained))
        elif (gained or may_differ) and (written := self._written(gained)):
            self._take(written)
        if gained:
            self.weights.leave_alone(self.weights.own - gained)

    def _agree_on_first(self, first: list[int], gained: Collection[int]) -> None:
        """Make what worker 0's script wrote before its first step the job's weights.

        Every other script writes the same, and its worker waits for worker 0's values. One that has others makes a null push.
        If others have trained by then, worker 0's values replace theirs.
        Raises ParameterChangedError for parameters of another form, and as `Worker.wait_until`.
        """
        self._check_form()
        arena, rank = self.store.arena, self.worker.rank
        written = self._differing_first()
        is_virtual = self.worker.combining.is_driven
        awaits = bool(rank and (self.store.tables or is_virtual))  # rows are trained in place; a moment must not count
        if not written and not awaits:
            if is_virtual:
                self.worker.lane.announce(1)
            return
        if rank == 0:
            initial = range(self.store.layout.workers)  # each of them reads the first weights before it attaches
            self._wait(lambda: all(arena.lane_states()[lane] not in (LANE_FREE, LANE_JOINING) for lane in initial))
            if any(Lane(arena, lane).posted() for lane in initial[1:]):
                logger.warning(
                    "worker 0 wrote weights, the job's from now on, after others had pushed gradients of those before"
                )
            with self.worker.locked():  # no fold reads what is written
                if is_first := not any(self._job_versions()) and self.store.committed()[0] == first:
                    self.weights.write(first, written)
            if not is_first:
                self._publish(written)
            elif self.store.layout.policy.ema:
                state.begin_average(self.worker, self.tensors)
            if is_virtual:
                self.worker.lane.announce(1)  # the driver posts its push later
            return

        def has_agreed() -> bool:
            zero = Lane(arena, 0)
            has_begun = zero.posted() > 0 or arena.lane_states()[0] not in (LANE_FREE, LANE_JOINING, LANE_LIVE)
            # Worker 0 has loaded state, or replaced weights. A look without the locks, which the next one corrects.
            if not any(self._job_versions()) and self.store.committed()[0] != self.weights.shown:
                self._first = self.weights.shown = list(self.worker.pull())
            is_same = not awaits and not self._differing_first()
            return has_begun or is_same or (is_virtual and zero.announced() != UNDECIDED)

        self._wait(has_agreed)
        others = self._differing_first()
        self._is_void = self.is_late = any(index in gained for index in others)
        if others and gained and not self._is_void:  # frozen ones, of which no gradient is
            self._tell_of_unused()
        self.weights.take(self.weights.shown, self.weights.own.difference(gained))

    def _differing_first(self) -> dict[int, torch.Tensor]:
        """What differs from the first weights, without tables whose rows were trained since."""
        versions = self._job_versions()
        trained = {index for index in self.store.tables if versions[self.store.parameters[index].shard]}
        return self.weights.differing(self.weights.own - trained)

    def _job_versions(self) -> list[int]:
        return [self.store.arena.shard_version(shard) for shard in range(self.store.arena.shards)]

    def _wait(self, reached: Callable[[], bool]) -> None:
        text = f"worker {self.worker.rank} wrote weights before its first step, and waited for all to attach, or for worker 0's"
        self.worker.wait_until(lambda: reached() or None, _POLL_NS, lambda: text)

    def _check_form(self) -> None:
        """Raise ParameterChangedError for a parameter that the next step could not point back at the job's weights."""
        if (index := self.weights.misfit()) >= 0:
            raise foreign.write_error(self.store.parameters[index].name, has_moved=True)

    def _may_differ(self) -> bool:
        return self.is_written() or self.weights.changed() >= 0

    def _written(self, gained: Collection[int] = ()) -> dict[int, torch.Tensor]:
        """What the script wrote to the job's parameters since the last step, by number, and to those that are `gained` now.

        Without a view, and of tables: what torch has counted.
        """
        changed = self.weights.changed()
        if self.tensors.view is None:
            is_told = self.total_steps == 0 and self.is_late and self.placement.shows_arena  # by `begins_void`
            return {} if changed < 0 or is_told else {changed: self.tensors[changed]}
        self._check_form()
        found = self.weights.differing(set(self._everything) - self.weights.own.difference(gained))
        return {changed: self.tensors[changed], **found} if changed in self.store.tables else found

    def _take(self, written: Mapping[int, torch.Tensor]) -> None:
        """Make what the script wrote the job's weights, if all workers that push have written the same."""
        worker, spec = self.worker, self.store.layout.policy.spec
        self._check_takes(written)
        if others_of(worker) and (unlike := disagreeing(worker, digest_of(written))):
            self._is_refused = self.is_early = True  # until the next step: others that wait see it meanwhile
            raise self._write_error(
                written,
                f"{spec} takes what all workers write, and worker {worker.rank} wrote to it, and worker"
                f" {', '.join(map(str, unlike))} did not write the same",
            )
        self._publish(written)

    def _check_takes(self, written: Collection[int]) -> None:
        """Raise ParameterChangedError where no step takes what the script wrote to these parameters."""
        worker, policy = self.worker, self.store.layout.policy
        if self.tensors.view is None or self.placement.name == "node":
            raise self._write_error(written)
        if any(index in self.store.tables for index in written):
            raise self._write_error(written, "a table's rows are in memory once, which other workers read")
        if others_of(worker) and (policy.fold != "all" or worker.combining.is_driven):
            where = "in virtual time" if worker.combining.is_driven else f"under {policy.spec}"
            raise self._write_error(written, f"{where} other workers go on from the weights before")

    def _write_error(self, written: Collection[int], why: str = "") -> ParameterChangedError:
        if not self.has_begun:
            foreign.check_not_averaged(self.tensors)  # the wrapper may have moved them
        is_undone = not self.placement.shows_arena or self.placement.name == "node"
        return foreign.write_error(self.store.parameters[min(written)].name, is_undone=is_undone, why=why)

    def _publish(self, written: Mapping[int, torch.Tensor]) -> None:
        """Make these values the job's weights, unless another worker has made the same its."""
        with self.worker.locked():
            if not self.weights.differing(written, self.store.committed()[0]):
                return
        before = self.tensors.values(self.weights.shown)

        def make(newest: list[torch.Tensor]) -> list[torch.Tensor]:
            for index, data in written.items():
                newest[index] = merged(newest[index], before[index], data)
            return newest

        state.publish_weights(self.worker, self.tensors, make)

    def check_writes(self) -> None:
        """Raise ParameterChangedError for a write that the next step would take, because what follows would undo it.

        Before the first step the parameters are the script's own: what it has loaded into them becomes the job's weights now.
        """
        self.adopt_first()
        if self._first is None and (written := self.pending()):
            raise self._write_error(written, "what follows takes the job's weights")

    def adopt_first(self) -> None:
        """Make what the script has written before its first step the job's weights now. Raises as `adopt_writes`."""
        if self._first is not None:
            self._agree_on_first(self._first, ())

    def check_takes(self) -> None:
        """As `check_writes`, for a write that the next step would not take either: what follows leaves the others to it."""
        if self._first is None and (written := self.pending()):
            self._check_takes(written)

    def show_newest(self) -> None:
        """As `take_weights`, unless the script has written others, which the next step takes."""
        if not (self.pending() if self._first is None else self._differing_first()):
            self.take_weights()

    def pending(self) -> dict[int, torch.Tensor]:
        """What the script wrote to the job's parameters and the next step takes or refuses, by number."""
        is_own = self.total_steps == 0 and self.placement.keeps_own
        return {} if is_own or not self._may_differ() else self._written()

    def begins_void(self) -> bool:
        """Whether this worker's script wrote weights that are not the job's, which it joined or resumed, or had from worker 0.

        Its first gradient is then not a gradient at the job's weights, so the worker makes a null push instead.
        """
        is_void = self._is_void or (self.tensors.view is None and self.weights.changed() >= 0)
        if not self.is_late or self.worker.own_steps or not is_void:
            return False
        self._tell_of_unused()
        return True

    def _tell_of_unused(self) -> None:
        joined = "worker 0 did not write the same" if self._first else "the job had begun without it, or was resumed"
        logger.warning("worker %d: what its script wrote to the parameters is not used: %s", self.worker.rank, joined)

    def wait_for_others(self) -> None:
        """Wait until every other worker has closed, and take the final weights.

        Raises ParameterChangedError if those take the place of what the script wrote after its last step.
        """
        self._leave_buffers()
        before = self._pulled_versions()
        self.worker.wait_for_others(jobs_of_process.elsewhere(self.worker))
        if self.has_begun and self._pulled_versions() != before:
            self.check_writes()
        self.take_weights()

    def _end_pushes(self) -> None:
        self._leave_buffers()
        self.worker.leave()

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
        if failure is None and self.store.layout.rule.runs_in_python and self.worker.combining.closes_last:
            self._leave_buffers()
            # Fold the others' pushes, before the last checkpoint.
            self.worker.wait_for_others(jobs_of_process.elsewhere(self.worker))
        if self.checkpointing is not None:
            self.checkpointing.close(failed=failure is not None)
        self.placement.end()
        for hook in self._hooks:
            hook.remove()
        self.weights.show_copies()
        self.gradients.clone()
        self.weights.leave()
        if failure is None:
            self._leave_buffers()
            jobs_of_process.leave(self.worker, self.tensors)
        try:
            self.worker.close(failure, stays=True)
        finally:
            exit_handlers.forget(self.worker)
            jobs_of_process.forget(self.worker)
            self.store.close()
