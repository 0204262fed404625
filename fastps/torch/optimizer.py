"""fastps.DistributedOptimizer: two lines that put a torch training loop on the embedded parameter server.

A hook copies each gradient into the worker's slot during backward, while the gradient is in the cache. `step()`, and nothing
else, takes new weights: it points `p.data` at the published buffer. The model's forward and backward stay untouched, and
`close()` undoes every change.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler
from torch.optim import optimizer as torch_optimizer

from fastps.advice.auto_sync import WarmUp, move, room_bytes
from fastps.checkpoint.format import Array
from fastps.checkpoint.periodic import Checkpointing
from fastps.checkpoint.runs import Run, earlier_runs
from fastps.checkpoint.snapshot import Pinned
from fastps.errors import ArenaError, UsageError
from fastps.job import environment
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GradientType, Layout, Parameter, chosen_readers, place
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Hyper
from fastps.membership.job_memory import JobMemory
from fastps.store import earlier_jobs, instances
from fastps.store.equal_gradients import EqualGradients
from fastps.store.server_process import chosen_server
from fastps.store.worker import Worker
from fastps.system import exit_handlers
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.malloc import keep_freed_memory
from fastps.torch import foreign, join, profiling, state, tables
from fastps.torch.checkpoint import described_group, saved_buffers
from fastps.torch.evaluation import Evaluation
from fastps.torch.gradients import hooked, loss_scaling
from fastps.torch.join import Joining
from fastps.torch.model_buffers import BufferRounds, ModelBuffers
from fastps.torch.optimizer_state import OptimizerState, check_kind, refuse_load
from fastps.torch.placed import placed
from fastps.torch.placements import HostPlacement
from fastps.torch.update_rules import Hypers, pushed_type, rows_of, rule_of, types_of, without
from fastps.torch.weights import Weights, shaped_tensors

logger = logging.getLogger("fastps.torch")
_GLOBAL_HOOKS = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


class DistributedOptimizer(Evaluation, OptimizerState, torch.optim.Optimizer):
    """Wrap a torch optimizer; the fold then runs its arithmetic on the gradients that all workers push.

    The same script runs alone, under `fastps run -n 4` and under torchrun:

    >>> model = torch.nn.Linear(4, 1)
    >>> opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="bsp")
    >>> opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
    >>> opt.version
    1
    >>> opt.close()

    Guarantees: a forward or backward reads weights of one version. Every push is folded exactly once, or counted as dropped.
    With "bsp" the result equals that of one process that trains on the batches of all workers together.

    Limits: parameters are float32 or all float64, or halves with float32 master weights. Weights change only in `step()`; the
    next `step()` rejects a write made elsewhere and names the parameter, except a write through `.data`, which torch does not
    count and all workers read. Evaluate other weights with `shown_weights`; load others with `replace_weights`. Under
    disciplines that do not wait for the fold (asp, ssp, dssp) `p.grad` is None after `step()`: other workers read its memory.

    Args:
        optimizer: a RuleOptimizer, or SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta or RMSprop of torch.optim; for
            tables (layers with sparse=True) SGD, Adagrad, SparseAdam or a RowWiseAdagradOptimizer. It
            shares its param_groups with this optimizer, so lr schedulers work on either.
        sync: a spec such as "dssp:3,15" or a Policy; default: FASTPS_SYNC, else "bsp". "auto" runs the first 32 steps under
            bsp and chooses a discipline from their times (docs/how-to/profiling.md).
        batch_size: samples in this worker's batch, for schemes that count them; report_loss may give each step's own number.
        model: gives errors the parameters' names, and `average_buffers` the buffers (BatchNorm).
        on_worker_loss, nonfinite, max_workers: how the job handles faults (fault_policy.FaultPolicy); default: the environment.
        max_readers: the most processes at a time that `fastps.reader` lets read; default: FASTPS_MAX_READERS, else 8.
        server: the processes that fold: "workers" (those that wait), or "process" (a server process that worker 0 starts);
            default: FASTPS_SERVER, else "workers". docs/architecture/decisions/013-optional-server.md compares them.
        checkpoint, every: write a checkpoint into this directory after every so many updates, while the workers go on;
            default: FASTPS_CHECKPOINT and FASTPS_CHECKPOINT_EVERY.
        resume: a checkpoint, or a directory of checkpoints, to resume from; default: FASTPS_RESUME.
        seeds: seeds to save with each checkpoint, for a resumed run to read.
        push_dtype: the type of pushed gradients; default: that of all parameters, else float32. torch.bfloat16 or float16
            halves the bytes of a push of float32; sums and updates stay float32. A gradient beyond float16's 65,504 becomes
            infinite there. If it is not the parameters' type, `p.grad` stays set after `step()`.
        timeout_s: longest wait in seconds; default: FASTPS_TIMEOUT, else 300.
        job, rank, workers: the job's name, this worker's number (from 0), and the number of workers, for processes that no
            launcher has started (multiprocessing, Ray, a notebook); default: the environment. `fastps.spawn` sets them.

    Raises:
        UsageError: An option is wrong, or `optimizer` is not a torch optimizer. No error leaves anything changed.
        PolicyError: `sync` is not a valid spec or Policy.
        UnsupportedError: The optimizer, an option of it, or a parameter is of a kind that fastps does not handle.
        ArenaError: The arena cannot be made or mapped.
        AttachError: This worker cannot join the job.
        LayoutError: This worker's model, rule or discipline differs from the job's or the checkpoint's.
        CheckpointError: The checkpoint to resume from cannot be read, or the folder for checkpoints is another run's.
    """

    # torch.amp.GradScaler then passes its scale and whether it found infs, instead of skipping step().
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sync: str | Policy | None = None,
        *,
        model: torch.nn.Module | None = None,
        batch_size: int = 0,
        on_worker_loss: str | None = None,
        nonfinite: str | None = None,
        max_workers: int | None = None,
        max_readers: int | None = None,
        server: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        seeds: Mapping[str, int] | None = None,
        push_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
        job: str | None = None,
        rank: int | None = None,
        workers: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_kind(optimizer)
        policy = parse_policy(sync if sync is not None else os.environ.get("FASTPS_SYNC", "bsp"))
        foreign.check_model(model)
        foreign.keep_untraced()
        self._identity = environment.identity(job, rank, workers, instance=instances.following() if job is None else 0)
        self._names_job, self._is_told = job is not None, workers is not None
        self._left_out, self._tensors = join.tensors_of(optimizer, timeout_s, clock)
        pushed = join.gradient_type(push_dtype := push_dtype or pushed_type(self._tensors), self._tensors)
        self._inner = optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]  # else its lr schedulers warn that step() was not called
        self._rule = rule_of(optimizer)
        self._hypers_read = Hypers(self._rule)
        self._wrapped = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._wrapped = True
        self._share_state()
        self._buffers = ModelBuffers(model)
        self._placement = self._place(push_dtype)
        faults = FaultPolicy.of(on_worker_loss, nonfinite, max_workers)
        self._server, self._max_readers = chosen_server(server), chosen_readers(max_readers)
        layout = self._layout(model, policy, faults, pushed)
        self._check_model(layout)
        wanted = Checkpointing.wanted(checkpoint, every)
        resumed = join.resumed_from(resume, stated := self._placement.stated_layout(layout), model, self.param_groups)
        join.check_checkpoints(wanted, resumed, self._identity.rank, stated, timeout_s)
        self._model, self._seeds, self._earlier_versions = model, dict(seeds or {}), 0
        start = self._placement.start(resumed) if resumed is not None else None
        self._first_versions = start.beginning(layout)["versions"] if start is not None else []
        joined = self._join(layout, Joining(self._identity, self._names_job, start, timeout_s, clock))
        self.run = Run.of(joined.store, earlier_runs(resumed))
        self._begin(joined, batch_size, wanted)
        join.limit_threads(layout.workers)
        keep_freed_memory(4 * layout.buffer_floats)
        self._follow_state(self._placement.state_follows)

    def _check_model(self, layout: Layout) -> None:
        """Reject models that would train wrongly: shared or overlapping parameters, gradients averaged elsewhere."""
        names = [parameter.name for parameter in layout.parameters]
        foreign.check_memory(self._tensors, names)
        foreign.check_not_averaged(self._tensors)
        join.check_parameters(self._tensors, layout)

    def _begin(self, worker: Worker, batch_size: int, checkpointing: tuple[Path, int] | None) -> None:
        """Take the job's weights and hook into backward."""
        self._use(worker)
        self._warm_up = WarmUp(self._store, self._worker) if self.policy.warm_up else None
        dense = [index for index in range(len(self._tensors)) if index not in self._store.tables]
        self._hooks = [hooked(self._tensors[index], self._hook(index)) for index in dense]
        self._hooks.append(self._inner.register_load_state_dict_pre_hook(refuse_load))
        self._in_no_sync = False
        self._has_begun = False
        self._batch_size = batch_size
        self._samples = batch_size
        self._take_weights()
        if not self._placement.shows_arena:
            self._weights.remember()
        self._checkpointing = None
        if checkpointing is not None:
            run, exact, version = self.run, self._placement.saves_share, partial(self._placement.saved_version, worker)
            pin = partial(self.pin_whole_version, {}, waits=exact) if self._placement.saves else None
            self._checkpointing = Checkpointing(worker, *checkpointing, pin, self.model_buffers, version, run=run, exact=exact)

    # -- joining -----------------------------------------------------------------------------------

    def _use(self, worker: Worker) -> None:
        """Push gradients to, and pull weights from, this worker's arena from now on."""
        self._placement.begin()
        self._worker, self._store = worker, worker.store
        self._clip = self.policy.clip
        self._weights = Weights(self._tensors, self._store, partial(self._placement.shown_views, self._store))
        self._is_late = worker.generation > 0
        slots = [self._slot_tensors(slot) for slot in range(self._store.arena.slots)]
        self._gradients = tables.gradients_of(self._placement, worker, self._tensors, slots, self.policy.waits_for_fold)
        self._rounds = BufferRounds(self._buffers, worker)
        self._equal_gradients = EqualGradients(worker, reads_slots=self._placement.name != "device")
        exit_handlers.register(worker, self._leave, self.wait_for_others)
        earlier_jobs.register(worker, self._tensors, self.close, self.wait_for_others)
        try:
            self._placement.use(worker)
        except ArenaError as error:
            exit_handlers.forget(worker)
            worker.close(str(error))
            worker.store.close()
            raise

    def _take_advice(self, warm_up: WarmUp) -> None:
        """End the warm-up: continue under the discipline that it recommends, in a new arena if the discipline changes."""
        self._warm_up = None
        policy = warm_up.choose()
        if policy is None:
            return
        old, versions = self._worker, self._store.version
        next_instance = self._identity.instance + 1 if self._names_job else instances.following()
        self._identity = self._identity.of_instance(next_instance)
        moved = move(old, policy, self._identity.name, self._hypers())
        self._earlier_versions += versions
        self._gradients.clone()
        self._use(moved)
        self._take_weights()
        exit_handlers.forget(old)
        old.close()
        old.store.close()

    def _layout(self, model: torch.nn.Module | None, policy: Policy, faults: FaultPolicy, pushed: GradientType) -> Layout:
        rows, numbers = rows_of(self.param_groups, model, self._left_out), tables.tables_of(self._tensors, self._rule)
        groups = without(self.param_groups, self._left_out)
        tables.check(numbers, [row[0] for row in rows], groups, self._rule, policy, self._placement)
        parameters = place(rows, policy.shards, numbers, types_of(self._tensors))
        workers, extra_bytes = self._identity.workers, self._buffers.nbytes + room_bytes(policy)
        layout = Layout(parameters, len(groups), self._rule, policy, workers, extra_bytes, faults, pushed)
        return self._placement.layout(replace(layout, server=self._server, max_readers=self._max_readers))

    def _place(self, push_dtype: torch.dtype) -> HostPlacement:
        """The placement of this model's memory."""
        return placed(self._tensors, push_dtype, is_told=self._is_told)

    def _join(self, layout: Layout, to: Joining) -> Worker:
        def write_state(store: JobMemory) -> None:
            """Start the job with the state that the optimizer had when it was wrapped (loaded from a checkpoint, say)."""
            state.write_first(store, partial(shaped_tensors, store), self._rule, self._entries())

        return self._placement.join(layout, self._hypers(), to, write_state if any(self._entries()) else None)

    def _tensor_views(self, views: list[Any]) -> list[torch.Tensor]:
        return self._placement.tensor_views(self._store, views)

    def _slot_tensors(self, slot: int) -> list[torch.Tensor]:
        """Tensors over a slot of this worker's lane."""
        return self._placement.slot_views(self._store, self._store.gradient_views(self._worker.rank, slot))

    # -- gradients ---------------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """The function that autograd calls after it has accumulated into a parameter's `p.grad`."""

        def put(tensor: torch.Tensor) -> None:
            self._gradients.put(index, self._worker.lane.slot, tensor)

        return put

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does; with set_to_none=False existing gradients become zeros."""
        self._gradients.zero(set_to_none)

    def expose_gradients(self) -> None:
        """Point every p.grad at the slot of the next push. The slot holds old values: write all gradients, then `step()`.

        Gradients that do not come from autograd then need no copy. Call it before each step; it does nothing while the slot
        stays the same and every p.grad is still set. Keep no such p.grad after `step()` without a copy. Raises UsageError with
        a 16-bit `push_dtype` or with a staged model.
        """
        if self._gradients.is_apart:
            self._worker.advance()
        self._gradients.expose(self._worker.lane.slot)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients over several backwards: `step()` raises UsageError inside, because it would push.

        Several backwards before one `step()` accumulate without this, too; it exists for loops written for DDP.
        """
        self._in_no_sync = self._gradients.accumulates = True
        try:
            yield
        finally:
            self._in_no_sync = self._gradients.accumulates = False

    # -- the step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push this worker's gradients, wait for the grant, take the newest weights. Returns the closure's loss, if any.

        Parameters without a gradient stay unchanged, as in torch. Raises WorkerDiedError, TimeoutExceededError,
        ParameterChangedError, UsageError. If an error or Ctrl-C ends the wait, the next call resumes it before it pushes.
        """
        if profiler._is_profiler_enabled:
            with profiling.ranges(self._worker, self):
                return self._hooked_step(closure)
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _GLOBAL_HOOKS[0] or _GLOBAL_HOOKS[1]:
            return self._hooked_step(closure)
        return self._step(closure)

    # torch wraps step() in a profiler record and its hooks, which costs 50 us a call; a step without hooks needs neither.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._in_no_sync:
            raise UsageError("step() was called inside no_sync(): leave the block before the step that pushes")
        worker, gradients, warm_up = self._worker, self._gradients, self._warm_up
        worker.check_usable()
        if not self._has_begun:
            foreign.check_not_averaged(self._tensors)
        if gradients.is_apart:
            worker.advance()  # finishes the previous step, whose wait an error ended
        if (changed := self._weights.changed()) >= 0:
            self._refuse_write(changed)
        if self._left_out or self._state.is_lent or self._inner.state is not self._state:
            self._take_writes()
        presence = gradients.collect(slot := worker.lane.slot)
        self._equal_gradients.compare(slot)
        scale, skipped = 1.0, False
        if "grad_scale" in self.__dict__ or "found_inf" in self.__dict__:
            scale, skipped = loss_scaling(self.__dict__)  # only a GradScaler's step sets them
        if self._is_late:
            skipped = skipped or self._begins_void()
        if self._clip:
            scale *= gradients.clip_factor(self._clip, scale)
        if warm_up is not None and worker.steps + 1 == warm_up.steps:
            warm_up.publish()
        hypers = self._hypers_read.of(self.param_groups)
        try:
            worker.push(hypers, presence=presence, scale=scale, null=skipped, samples=self._samples)
            if not skipped:
                gradients.release(slot)
            worker.advance()
        except BaseException:
            if worker.lane.awaits:
                gradients.detach(slot)
            raise
        self._take_weights()
        if warm_up is not None and worker.steps == warm_up.steps:
            self._take_advice(warm_up)
        if self._checkpointing is not None:
            self._checkpointing.after_step()
        return loss

    _hooked_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _hypers(self) -> list[Hyper]:
        return self._hypers_read.of(self.param_groups)

    def _take_weights(self) -> None:
        """Update every parameter to the newest version."""
        self._placement.pull(self._weights, self._worker)
        if self._has_begun or not self._placement.shows_arena:
            return
        if self._total_steps == 0 and self._is_running():
            self._is_late = True
            self._weights.show_copies()  # so that a script that loads weights now does not write into the job's
        self._weights.remember()  # writes before the first step are allowed
        self._has_begun = self._total_steps > 0

    def _is_running(self) -> bool:
        """Whether the others began without this worker: it replaces a lost one, or its discipline does not wait for it."""
        pulled = [self._worker.lane.shard_version(shard) for shard in range(self._store.arena.shards)]
        return self._is_late or pulled != (self._first_versions or [0] * len(pulled))

    def _refuse_write(self, changed: int) -> None:
        """Raise ParameterChangedError for a write outside of step().

        Other workers read these buffers, so such a write would reach them at a random moment. Before the first step a write
        reaches all workers before they begin, so loading a model's state dict right after wrapping is allowed. A parameter
        that was pointed at other memory reaches no other worker, and the next step would point it back.
        """
        undone = not self._placement.shows_arena or self._placement.name == "node"
        moved = not undone and self._weights.has_moved(changed)
        is_first = self._total_steps == 0 and (self._is_late or self._store.layout.shown_type == "float32")
        if undone or moved or not is_first:
            raise foreign.write_error(self._name(changed), is_undone=undone, has_moved=moved)

    def _begins_void(self) -> bool:
        """Whether this worker joined a running job and its script then loaded other weights.

        Its first gradient is then not a gradient at the job's weights, so the worker makes a null push instead.
        """
        worker = self._worker
        if not self._is_late or worker.own_steps or self._weights.changed() < 0:
            return False
        logger.warning("worker %d joined a running job: what its script wrote to the parameters is not used", worker.rank)
        return True

    # -- looking -----------------------------------------------------------------------------------

    def report_loss(self, loss: float, samples: int = 0) -> None:
        """Report this worker's loss and batch size to observers; the next push carries them."""
        self._worker.loss = loss
        self._samples = samples or self._batch_size

    def pin_whole_version(self, extra: Mapping[str, Any], *, waits: bool = True) -> Pinned:
        """Pin the whole published version for a checkpoint; see PinnedVersion."""
        groups = [described_group(group) for group in self.param_groups]
        return self._placement.pin(self._worker, groups, {"seeds": self._seeds, **extra}, waits=waits)

    def model_buffers(self) -> dict[str, Array]:
        """This worker's buffers (BatchNorm) of the model given as `model=`, by name; checkpoints save them."""
        return saved_buffers(self._model)

    @property
    def batch_size(self) -> int:
        """The next step's batch size: the grant's if it carries one (R2SP's tuning), else the one given at wrapping."""
        return self._worker.batch_size or self._batch_size

    # -- the end -----------------------------------------------------------------------------------

    def wait_for_start(self) -> None:
        """Wait until every worker of the job has attached."""
        self._worker.wait_for_start()

    def wait_for_others(self) -> None:
        """Wait until every other worker has closed, and take the final weights. Worker 0 calls it before it saves them.

        This worker must not push afterwards. `average_buffers()` then averages the buffers that the workers left with.
        """
        self._leave_buffers()
        self._worker.wait_for_others()
        self._take_weights()

    def _leave_buffers(self) -> None:
        """Publish this worker's buffers for averages after it has left. No error stops it leaving: it is logged."""
        if self._worker.has_left:
            return
        try:
            self._rounds.leave()
        except Exception as error:
            logger.warning("the model's buffers of worker %d are not published: %s", self._worker.rank, error)

    def close(self, failure: str | None = None) -> None:
        """Leave the job: parameters become private copies of the weights last taken, and the others go on without this worker.

        Runs at exit unless it was called before. With `failure` the other workers end with an error that quotes it. The last
        worker stays, up to the timeout, until every initial worker that its scheme did not wait for has attached. The wrapped
        torch optimizer has the job's state then, of which `state_dict()` gives copies.
        """
        if self._worker.closed or self._worker.forked:
            return
        if failure is None:
            self._keep_state()
            earlier_jobs.leave(self._worker, self._tensors)
        self._leave(failure)

    def _leave(self, failure: str | None) -> None:
        """Leave the job, as `close()` does, without the optimizer's state."""
        if self._worker.closed or self._worker.forked:
            return
        if self._checkpointing is not None:
            self._checkpointing.close(failed=failure is not None)
        self._placement.end()
        if self._has_begun and (changed := self._weights.changed()) >= 0:
            logger.warning(
                "parameter %r was written to after the last step(): other workers read the same memory; close() first",
                self._name(changed),
            )
        for hook in self._hooks:
            hook.remove()
        self._weights.show_copies()
        self._gradients.clone()
        self._weights.leave()
        if failure is None:
            self._leave_buffers()
        try:
            self._worker.close(failure, stays=True)
        finally:
            exit_handlers.forget(self._worker)
            self._store.close()

    def __enter__(self) -> "DistributedOptimizer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(exit_handlers.failure_of(error))

    def _name(self, index: int) -> str:
        parameter: Parameter = self._store.layout.parameters[index]
        return parameter.name
