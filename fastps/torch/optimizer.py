"""fastps.DistributedOptimizer: two lines that put a torch training loop on the embedded parameter server.

A hook copies each gradient into the worker's slot during backward, while the gradient is in the cache. `step()`, and nothing
else, takes new weights: it points `p.data` at the published buffer. The model's forward and backward stay untouched, and
`close()` undoes every change.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.optim import optimizer as torch_optimizer

from fastps.advice.auto_sync import WarmUp, move, room_bytes
from fastps.checkpoint.format import Array
from fastps.checkpoint.periodic import Checkpointing
from fastps.checkpoint.runs import Run
from fastps.checkpoint.snapshot import Pinned
from fastps.errors import UsageError
from fastps.job import environment, limits
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import GradientType, Layout, place
from fastps.job.options import value_of
from fastps.job.policy import Policy
from fastps.job.precision import check_types
from fastps.job.specs import parse_policy
from fastps.membership.job_memory import JobMemory
from fastps.store import jobs_of_process
from fastps.store.observer import WorkerStatistics
from fastps.store.worker import Worker
from fastps.system import exit_handlers
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.malloc import keep_freed_memory
from fastps.torch import foreign, join, names, profiling, state, tables
from fastps.torch.any_optimizer import owner
from fastps.torch.attachment import Attachment
from fastps.torch.checkpoint import described_group, saved_buffers
from fastps.torch.gradients import OF_A_SCALER, loss_scaling
from fastps.torch.join import Joining
from fastps.torch.model_buffers import ModelBuffers
from fastps.torch.optimizer_state import OptimizerState, check_kind, refuse_calls
from fastps.torch.placements.host import HostPlacement
from fastps.torch.placements.placed import placed
from fastps.torch.update_rules import PARAMETER_TYPES, Hypers, pushed_type, rows_of, rule_of, without
from fastps.torch.weights import shown

if TYPE_CHECKING:
    from fastps.kernels.shm.arena import Histograms

_GLOBAL_HOOKS = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


class DistributedOptimizer(OptimizerState):
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

    Limits: parameters are float32 or all float64, or halves with float32 master weights. What a script writes to them reaches
    no other worker; the next `step()` starts from it if all workers of "bsp" wrote the same, and raises an error that names
    the parameter otherwise. Evaluate other weights with `shown_weights`; load others with `replace_weights`. Under disciplines
    that do not wait for the fold (asp, ssp, dssp) `p.grad` is None after `step()`: other workers read its memory.

    Args:
        optimizer: a RuleOptimizer, or any torch optimizer; for tables (layers with sparse=True) SGD, Adagrad, SparseAdam or a
            RowWiseAdagradOptimizer. It shares its param_groups with this optimizer, so lr schedulers work on either.
        sync: a spec such as "dssp:3,15" or a Policy; default: FASTPS_SYNC, else "bsp". "auto" runs the first 32 steps under
            bsp and chooses a discipline from their times (docs/how-to/profiling.md).
        batch_size: samples in this worker's batch, for schemes that count them; report_loss may give each step's own number.
        model: gives the parameters their names, and `average_buffers` the buffers (BatchNorm); without it the names are those
            in the smallest module that holds all the parameters.
        on_worker_loss, nonfinite, max_workers: how the job handles faults (fault_policy.FaultPolicy); default: the environment.
        max_readers: the most processes at a time that `fastps.reader` lets read; default: FASTPS_MAX_READERS, else 8.
        server: the processes that fold: "workers" (those that wait), or "process" (a server process that worker 0 starts);
            default: FASTPS_SERVER, else "workers". docs/architecture/decisions/013-optional-server.md compares them.
        checkpoint, every: write a checkpoint into this directory after every so many updates, while the workers go on;
            default: FASTPS_CHECKPOINT (a script's next optimizers: optimizer1 there, ...) and FASTPS_CHECKPOINT_EVERY.
        resume: a checkpoint, or a directory of checkpoints, to resume from; default: FASTPS_RESUME.
        seeds: seeds to save with each checkpoint, for a resumed run to read.
        push_dtype: the type of pushed gradients; default: that of all parameters, else float32. torch.bfloat16 or float16
            halves the bytes of a push of float32; sums and updates stay float32. A gradient beyond float16's 65,504 becomes
            infinite there. If it is not the parameters' type, `p.grad` stays set after `step()`.
        timeout_s: longest wait in seconds, but for a step of a worker that lives; default: FASTPS_TIMEOUT, else 300.
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
        foreign.check_kinds(sync=sync, model=model, batch_size=batch_size, job=job, rank=rank, workers=workers, seeds=seeds)
        policy = parse_policy(environment.sync_of(sync))
        self._identity = environment.identity(job, rank, workers)
        self._names_job, self._is_told = job is not None, workers is not None
        self._inner, self._rule = optimizer, rule_of(optimizer, policy)
        self._left_out, self._tensors = join.tensors_of(optimizer)
        foreign.check_model(model, self._tensors)
        pushed = join.gradient_type(push_dtype := push_dtype or pushed_type(self._tensors), self._tensors)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._buffers, self._placement = ModelBuffers(model), self._place(push_dtype)
        self._tensors = self._placement.tensors
        faults = FaultPolicy.of(on_worker_loss, nonfinite, max_workers)
        self._server = owner.server_of(self._rule, policy, faults, self._identity.workers, server)
        self._max_readers = value_of("FASTPS_MAX_READERS", max_readers)
        layout = self._layout(model, policy, faults, pushed)
        if job is None and workers is None:
            self._identity = self._identity.of_instance(jobs_of_process.count_next())
        wanted = Checkpointing.wanted(checkpoint, every, number := self._identity.instance)
        jobs_of_process.end(self._tensors, limits.timeout_s(timeout_s), clock)
        join.check_parameters(self._tensors, layout, is_counted=job is None and workers is None)
        resumed = join.resumed_from(resume, stated := self._placement.stated_layout(layout), model, optimizer, number)
        join.check_checkpoints(wanted, resumed, self._identity.rank, stated, timeout_s)
        layout = join.with_frozen(layout, self._tensors if self._placement.keeps_own else (), optimizer.state, resumed)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # else its lr schedulers warn that step() was not called
        self._hypers_read, self._model, self._seeds = Hypers(self._rule), model, dict(seeds or {})
        self._share_state()
        start = self._placement.start(resumed) if resumed is not None else None
        versions = start.beginning(layout)["versions"] if start is not None else []
        self._job = Attachment(self._placement, self._buffers, self.close, versions)
        join.limit_threads(layout.workers)  # before a recorder notes how many there are
        joined = self._join(layout, Joining(self._identity, self._names_job, start, timeout_s, clock, self._buffers.carried))
        self.run = Run.of(joined.store, resumed)
        self._begin(joined, batch_size, wanted)
        keep_freed_memory(4 * layout.buffer_floats)
        self._follow_state(self._placement.state_follows)

    def _begin(self, worker: Worker, batch_size: int, checkpointing: tuple[Path, int] | None) -> None:
        foreign.keep_untraced()
        self._job.use(worker)
        self._alone = owner.fold_of(worker.combining) if worker.store.layout.steps_alone else None
        self._warm_up = WarmUp(worker.store, worker) if self.policy.warm_up else None
        self._batch_size = worker.drawn_samples = batch_size
        self._samples = self._untold = 0 if self.policy.tune else batch_size  # 0: as many as were drawn
        self._job.hook(refuse_calls(self._inner, owner.fold_of(worker.combining), loads=self._rule.runs_in_python))
        if worker.begun_at:  # torch would warn of a schedule that the script steps to where the job is
            self._opt_called = True
        if checkpointing is not None:
            pin = partial(self.pin_whole_version, {}, waits=False) if self._placement.saves else None
            version = partial(self._placement.saved_version, worker)
            self._job.checkpointing = Checkpointing(worker, *checkpointing, pin, self.model_buffers, version, run=self.run)

    def _take_advice(self, warm_up: WarmUp) -> None:
        """End the warm-up: continue under the discipline that it recommends, in a new arena if the discipline changes."""
        self._warm_up = None
        policy = warm_up.choose()
        if policy is None:
            return
        next_instance = self._identity.instance + 1 if self._names_job else jobs_of_process.count_next()
        self._identity = self._identity.of_instance(next_instance)
        moved = move(self._job.worker, policy, self._identity.name, list(self._hypers_read.of(self.param_groups)))
        self._job.change_to(moved)

    def _layout(self, model: torch.nn.Module | None, policy: Policy, faults: FaultPolicy, pushed: GradientType) -> Layout:
        rows = rows_of(self.param_groups, model, self._left_out, modules := names.around(self._tensors, model))
        numbers = tables.tables_of(self._tensors, self._rule, modules)
        groups = without(self.param_groups, self._left_out)
        tables.check(numbers, [row[0] for row in rows], groups, self._rule, policy, self._placement)
        check_types(types := [PARAMETER_TYPES[tensor.dtype] for tensor in self._tensors])
        parameters = place(rows, policy.shards, numbers, types)
        extra_bytes, carried = self._buffers.nbytes + room_bytes(policy), self._buffers.carried.layout(parameters[-1].shard)
        layout = Layout(parameters, len(groups), self._rule, policy, self._identity.workers, extra_bytes, faults, pushed)
        layout = self._placement.layout(replace(layout, server=self._server, max_readers=self._max_readers, carried=carried))
        if self._rule.runs_in_python:
            owner.check(layout, self._placement.name)
        return layout

    def _place(self, push_dtype: torch.dtype) -> HostPlacement:
        return placed(self._tensors, push_dtype, is_told=self._is_told)

    def _join(self, layout: Layout, to: Joining) -> Worker:
        def write_state(store: JobMemory) -> None:
            """Start the job with the state that the optimizer had when it was wrapped (loaded from a checkpoint, say)."""
            state.write_first(self._job.tensors.enter(store), self._rule, self._entries())

        hypers = list(self._hypers_read.of(self.param_groups))
        if self._rule.runs_in_python:
            made = partial(owner.combining_of, self._inner, self._job.tensors, self._job.after_fold)
            plan = owner.plan_of(layout, self._inner, self._tensors) if to.identity.rank == 0 else None
            to = replace(to, combining=made, plan=plan)
        return self._placement.join(layout, hypers, to, write_state if any(self._entries()) else None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does; with set_to_none=False existing gradients become zeros."""
        self._job.gradients.zero(set_to_none)

    def expose_gradients(self) -> None:
        """Point every p.grad at the slot of the next push. The slot holds old values: write all gradients, then `step()`.

        Gradients that do not come from autograd then need no copy. Call it before each step; it does nothing while the slot
        stays the same and every p.grad is still set. Keep no such p.grad after `step()` without a copy. Raises UsageError with
        a 16-bit `push_dtype` or with a staged model.
        """
        job = self._job
        if job.gradients.is_apart:
            job.worker.advance()
        job.gradients.expose(job.worker.lane.slot)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients, as under DDP; several backwards do so without it, too. Inside, `step()` raises UsageError."""
        outer, self._job.gradients.accumulates = self._job.gradients.accumulates, True
        try:
            yield
        finally:
            self._job.gradients.accumulates = outer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push this worker's gradients, wait for the grant, take the newest weights. Returns the closure's loss, if any.

        Parameters without a gradient stay unchanged, as in torch. Raises WorkerDiedError, TimeoutExceededError,
        ParameterChangedError, UsageError. If an error or Ctrl-C ends the wait, the next call resumes it before it pushes.
        """
        try:
            if profiler._is_profiler_enabled:
                with profiling.ranges(self._job.worker, self._job):
                    return self._hooked_step(closure)
            hooks = self._optimizer_step_post_hooks or _GLOBAL_HOOKS[0] or _GLOBAL_HOOKS[1]
            is_hooked = hooks or len(self._optimizer_step_pre_hooks) > 1  # one refuses step() of the wrapped optimizer
            return self._hooked_step(closure) if is_hooked else self._step(closure)
        except BaseException:
            for name in OF_A_SCALER:  # which removes them after a step that ends well
                self.__dict__.pop(name, None)
            raise

    # torch wraps step() in a profiler record and its hooks, which costs 50 us a call; a step without hooks needs neither.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        alone, closure = self._alone, None if closure is None else self._closure_of_step(closure)
        loss = closure() if closure is not None and alone is None else None
        job, warm_up = self._job, self._warm_up
        worker, gradients = job.worker, job.gradients
        if gradients.accumulates:
            raise UsageError("step() was called inside no_sync(): leave the block before the step that pushes")
        worker.check_usable()
        if not job.has_begun:
            foreign.check_not_averaged(self._tensors)
            if self._identity.workers > 1:
                foreign.warn_at_first_step(self._model, self._tensors)
        if gradients.is_apart:
            worker.advance()  # finishes the previous step, whose wait an error ended
        if job.is_early or job.weights.changed() >= 0 or job.is_written():
            job.adopt_writes()
        inner, state = self._inner, self._state
        if self._left_out or state.is_lent or inner.state is not state or inner.param_groups is not self.param_groups:
            self._take_writes()
        presence = gradients.collect(slot := worker.lane.slot)
        if job.equal_gradients.is_on:
            job.equal_gradients.compare(slot)
        scale, skipped = 1.0, False
        if "grad_scale" in self.__dict__ or "found_inf" in self.__dict__:
            scale, skipped = loss_scaling(self.__dict__)  # only a GradScaler's step sets them
        if job.is_late:
            skipped = skipped or job.begins_void()
        clip = gradients.clip_factor(job.clip, scale) if job.clip else 1.0
        job.before_push(slot, scale, is_null=skipped)
        if warm_up is not None and worker.steps + 1 == warm_up.steps:
            warm_up.publish()
        hypers, options = self._hypers_read.of(self.param_groups), job.equal_options
        if hypers is not options.pushed or options.is_due:
            options.check(hypers)
            if self._is_own:
                self._send_options()
        if alone is not None:  # whose own step() calls it
            alone.closure, alone.result = None if skipped else closure, None
        try:
            worker.push(hypers, presence=presence, scale=scale * clip, null=skipped, samples=self._samples)
            if not skipped:
                gradients.release(slot)
            worker.advance()
        except BaseException:
            if worker.lane.awaits:
                job.after_error(slot)
            raise
        job.take_weights(() if skipped else gradients.present if alone is None else range(len(self._tensors)))
        if scale != 1.0:
            gradients.multiply(scale)  # undo a GradScaler's scale, as torch does
        if warm_up is not None and worker.steps == warm_up.steps:
            self._take_advice(warm_up)
        if job.checkpointing is not None:
            job.checkpointing.after_step()
        return loss if alone is None else alone.result

    _hooked_step = torch.optim.Optimizer.profile_hook_step(_step)

    @property
    def version(self) -> int:
        """The number of updates that all workers together have made so far; in virtual time, until this worker's last pull."""
        worker = self._job.worker
        return (worker if worker.combining.is_driven else worker.store).version

    @property
    def stop_asked(self) -> bool:
        """Whether a reader has asked this training to stop, as an evaluator does whose metric gets no better."""
        return self._job.store.arena.is_asked_to_stop()

    @property
    def policy(self) -> Policy:
        """The discipline in force; with sync="auto" it can change after the warm-up."""
        return self._job.store.layout.policy

    @property
    def placement(self) -> str:
        """Where the job's shards are: "host", "staged" (shards in host memory, model on a GPU) or "device"."""
        return self._placement.name

    @property
    def worker(self) -> Worker:
        """The attached Worker of this optimizer; with sync="auto" it can change after the warm-up."""
        return self._job.worker

    def statistics(self) -> list[WorkerStatistics]:
        """Current statistics, one row per worker: steps, waiting, staleness and others."""
        return self._placement.statistics(self._job.worker)

    def histograms(self) -> "list[Histograms]":
        """Each shard's histograms: gaps between updates, staleness, arrivals within a version."""
        return [self._job.store.arena.histograms(shard) for shard in range(self._job.store.arena.shards)]

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Show the moving average of the weights as the parameters inside the block; without `ema` they stay unchanged.

        theta_bar of Chen et al. 2017, section 1.1: "we will often evaluate performance on" it.
        """
        if not self._job.store.layout.policy.ema:
            return contextlib.nullcontext()
        self._job.worker.check_moment("averaged_weights()")
        averages, own = state.averages(self._job.worker, self._job.tensors), self._job.weights.own
        return shown(self._tensors, [tensor.data if i in own else averages[i] for i, tensor in enumerate(self._tensors)])

    def average_buffers(self) -> None:
        """Set this model's buffers to the average over all workers, for evaluation. A collective call.

        Every live worker must call it equally often; it waits until all have. A worker that left in good order counts with the
        buffers that it left with. Means are averaged, variances are averaged by their moments, and counters take the maximum.
        Raises TimeoutExceededError naming the workers that have not called it, WorkerDiedError, UsageError without `model=`.
        """
        self._job.rounds.average()

    @contextlib.contextmanager
    def private_weights(self) -> Iterator[None]:
        """Show copies of the present weights as the parameters inside the block, which may write into them.

        For libraries that exchange weights in place for an evaluation (averages). The block's writes are gone after it.

        >>> import fastps
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        ...     before = model.weight.item()
        ...     with optimizer.private_weights(), torch.no_grad():
        ...         _ = model.weight.fill_(7.0)
        ...     model.weight.item() == before
        True
        """
        self._job.worker.check_open()
        if self._job.weights.changed() >= 0:
            self._job.check_writes()
        try:
            with self.shown_weights([tensor.detach().clone(memory_format=torch.preserve_format) for tensor in self._tensors]):
                yield
        finally:
            self._job.weights.remember()

    def shown_weights(self, values: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Show these tensors as the parameters inside the block, one each in the order of the param_groups.

        Use it to evaluate other weights, such as the best so far or an average: the next step would take what is written into
        the parameters for a change. To change the job's weights, use `DistributedOptimizer.replace_weights`.

        Raises ValueError for tensors of other shapes.
        """
        return shown(self._tensors, list(values))

    def report_loss(self, loss: float, samples: int = 0) -> None:
        """Report this worker's loss and batch size to observers; the next push carries them."""
        self._job.worker.loss, self._samples = loss, samples or self._untold

    def pin_whole_version(self, extra: Mapping[str, Any], *, waits: bool = True) -> Pinned:
        """Pin the whole published version for a checkpoint; see PinnedVersion."""
        groups = [described_group(group) for group in self.param_groups]
        pin = partial(self._placement.pin, self._job.worker, groups, {"seeds": self._seeds, **extra}, waits=waits)
        return self._pin_with_state(pin) if self._is_own else pin()

    def model_buffers(self) -> dict[str, Array]:
        """This worker's buffers (BatchNorm) of the model given as `model=`, by name; checkpoints save them."""
        return saved_buffers(self._model)

    @property
    def batch_size(self) -> int:
        """The next step's batch size: the grant's if it carries one (tune=true), else the one given at wrapping."""
        return self._job.worker.batch_size or self._batch_size

    def wait_for_start(self) -> None:
        """Wait until every worker of the job has attached."""
        self._job.worker.wait_for_start()

    def wait_for_others(self) -> None:
        """Wait until every other worker has closed, and take the final weights. Worker 0 calls it before it saves them.

        This worker must not push afterwards. `average_buffers()` then averages the buffers that the workers left with.
        """
        self._job.wait_for_others()

    def close(self, failure: str | None = None) -> None:
        """Leave the job: parameters become private copies of the weights last taken, and the others go on without this worker.

        Runs at exit unless it was called before. With `failure` the other workers end with an error that quotes it. The last
        worker stays, up to the timeout, until every initial worker that its scheme did not wait for has attached. The wrapped
        torch optimizer has the job's state then, of which `state_dict()` gives copies.
        """
        if self._job.worker.closed or self._job.worker.forked:
            return
        if failure is None:
            if exit_handlers.finishes():
                self.wait_for_others()
            self._keep_state()
        else:
            self._state.detach(reads=False)  # code that cleans up after the error may look at `state`
        self._job.leave(failure)

    def unwrap(self) -> torch.optim.Optimizer:
        """End the job, and return the torch optimizer with the job's last state. Every worker calls it, after the same step.

        The parameters are private copies of the weights. Worker 0 waits until the others have called it or closed, so it has
        what all of them pushed. To go on with more parameters, add them to the torch optimizer, and wrap it again: the new job
        begins with worker 0's weights and state. If every worker calls `wait_for_others()` before, all have the job's last
        weights and state. After `close()`, the torch optimizer has the state of that moment.

        >>> import fastps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> inner = optimizer.unwrap()
        >>> inner.add_param_group({"params": model.append(torch.nn.Linear(2, 1))[1].parameters(), "lr": 0.01})
        >>> fastps.DistributedOptimizer(inner).close()

        Raises UnsupportedError in a job of several nodes, WorkerDiedError, TimeoutExceededError.
        """
        if not self._job.worker.closed:
            self._job.worker.store.layout.check_has_state("unwrap()")
            if self._job.worker.rank == 0:
                self.wait_for_others()
            self.close()
        if self._untaken is not None:
            raise UsageError(f"unwrap(): {self._untaken}")
        return self._inner

    def __enter__(self) -> "DistributedOptimizer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(exit_handlers.failure_of(error))
