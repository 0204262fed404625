"""Hugging Face Accelerate with fastps: an Accelerator whose workers train through one store, without DistributedDataParallel.

Its states, loaders and gathers are Accelerate's own; only what `prepare` makes of a model and an optimizer differs. It uses no
private name of Accelerate. The extra [hf] installs the package.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fastps.errors import UnsupportedError
from fastps.integrations import attendance, process_group
from fastps.job import environment
from fastps.job.fault_policy import FaultPolicy
from fastps.job.nodes import nodes_of_environment
from fastps.job.policy import Policy
from fastps.store.worker import Worker
from fastps.system.extras import how_to_install
from fastps.torch.optimizer import DistributedOptimizer

try:
    import accelerate
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        is_torch_xla_available,
        parse_flag_from_env,
    )
except ImportError as error:
    raise ImportError(f"fastps.integrations.accelerate needs the package accelerate: {how_to_install('hf')}") from error

_PAUSE_NS = 500_000
_BESIDE = "fastps keeps one copy of weights and optimizer state for all workers"
_SHARDING = {
    "fsdp_plugin": ("ACCELERATE_USE_FSDP", "FSDP"),
    "deepspeed_plugin": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    "deepspeed_plugins": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    "megatron_lm_plugin": ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    "torch_tp_plugin": ("ACCELERATE_USE_TP", "tensor parallelism"),
    "parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "ParallelismConfig"),
}
_WITHOUT_EFFECT = {
    DistributedDataParallelKwargs: "no model is wrapped in DistributedDataParallel",
    GradScalerKwargs: "there is no GradScaler",
    InitProcessGroupKwargs: "fastps begins the process group (FASTPS_TIMEOUT is its timeout)",
}


class JobOptimizer(DistributedOptimizer):
    """A DistributedOptimizer that all workers load at the same time, so that none pushes before worker 0 has loaded."""

    _kept: dict[str, Any] | None = None
    _keeps = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict. A collective call. See DistributedOptimizer."""
        if self._keeps:
            self._kept = state_dict
            return
        super().load_state_dict(state_dict)
        together()

    def finish(self) -> torch.optim.Optimizer:
        """Leave once all workers have pushed all; return the torch optimizer with the job's last state. A collective call."""
        if not self.worker.closed:
            self.wait_for_others()
            self.close()
        return self._inner

    @contextlib.contextmanager
    def loading(self) -> Any:
        """Inside the block a script may load weights and state; at its end worker 0's become the job's. A collective block.

        On several nodes the first worker of each replaces its node's weights, which its other workers then take.
        """
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        loaded = [tensor.detach().clone() for tensor in tensors]
        self._keeps = True
        try:
            with self.shown_weights(loaded):
                loaded = [tensor.data for tensor in tensors]  # what is shown is what is written to
                yield
        finally:
            self._keeps = False
        if self.worker.rank == 0:
            self.replace_weights(loaded)
        together()
        self._job.take_weights()  # replaced weights have no new version
        self._job.weights.remember()  # what the script loaded is no write of a step
        if self._kept is not None:
            kept, self._kept = self._kept, None
            self.load_state_dict(kept)


def together() -> None:
    """Wait for the other workers of the launch, if there are any."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        process_group.barrier()


def show_one_version(optimizers: Iterable[DistributedOptimizer]) -> None:
    """Wait for all workers, fold what they have pushed, and show the same weights in all of them. A collective call."""
    still_open = [optimizer for optimizer in optimizers if not optimizer.worker.has_left]
    together()
    for optimizer in still_open:
        optimizer.worker.try_combine()
        if optimizer.policy.fold == "each":  # elsewhere a push may wait for others that come later
            _await_fold(optimizer.worker)
    together()
    for optimizer in still_open:
        optimizer.take_newest()
    together()


def _await_fold(worker: Worker) -> None:
    late = (
        f"worker {worker.rank} waited {worker.store.timeout_s:g} s for the fold of its last push, before all show one version"
    )
    worker.wait_until(lambda: worker.push_folded, _PAUSE_NS, lambda: late, combines=True)


def refuse_environment() -> None:
    """Raise UnsupportedError for what `accelerate launch` or the machine asks for and fastps does not do."""
    for variable, what in dict(_SHARDING.values()).items():
        if parse_flag_from_env(variable):
            raise sharded(what, variable)
    if is_torch_xla_available():
        raise UnsupportedError(
            "expected workers on CPUs or GPUs, found the package torch_xla, with which Accelerate trains on TPUs: fastps shares"
            " memory of one machine; set USE_TORCH_XLA=0 to train without it"
        )
    _refuse_precision(os.environ.get("ACCELERATE_MIXED_PRECISION"))
    if FaultPolicy.of().continues:
        raise UnsupportedError(
            "expected a job that stops with a lost worker, found on_worker_loss='continue': the others would wait for it in"
            " gathers of torch.distributed for ever; leave --on-worker-loss and --restarts out, and resume from a checkpoint"
        )


def sharded(what: str, found: str) -> UnsupportedError:
    """The error for what would keep weights in another way."""
    return UnsupportedError(f"{what} shards or averages itself, and {_BESIDE}: expected neither, found {found}; leave it out")


def _refuse_precision(precision: Any) -> None:
    if str(precision) in ("fp16", "fp8"):
        raise UnsupportedError(
            f"expected mixed_precision 'bf16' or 'no', found {str(precision)!r}: its loss scaler would skip steps of one worker"
            " alone; bf16 needs no scaler"
        )


def _refuse(options: Mapping[str, Any]) -> None:
    refuse_environment()
    for name, (_, what) in _SHARDING.items():
        if options.get(name) is not None:
            raise sharded(what, f"{name}=")
    _refuse_precision(options.get("mixed_precision"))
    for handler in options.get("kwargs_handlers") or ():
        if type(handler) in _WITHOUT_EFFECT:
            raise UnsupportedError(
                f"{type(handler).__name__} would have no effect, because {_WITHOUT_EFFECT[type(handler)]}: leave it out"
            )


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # its package may be missing where types are checked
    """An `accelerate.Accelerator` whose `prepare` wraps optimizers in fastps, and leaves models as they are.

    It runs alone, under `fastps run -n 4`, torchrun and `accelerate launch`. Loaders are sharded, gathers gather, as with
    Accelerate; the workers may do different numbers of steps in between.

    >>> accelerator = Accelerator(cpu=True, sync="ssp:3")
    >>> model = torch.nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(4, 2)).sum())
    >>> optimizer.step()
    >>> accelerator.end_training()

    Args:
        sync: as for DistributedOptimizer; default: FASTPS_SYNC, else "bsp".
        fastps_options: further arguments of DistributedOptimizer, such as {"push_dtype": torch.bfloat16}.
        options: the arguments of accelerate.Accelerator.

    Raises:
        UnsupportedError: An argument, or the launch, asks for what fastps does not do: FSDP, DeepSpeed, fp16, `asp` over
            several nodes.
        UsageError: Nothing says where the workers of the launch meet.
    """

    _sync: str | Policy | None = None
    _fastps_options: Mapping[str, Any] = {}

    def __init__(
        self, *, sync: str | Policy | None = None, fastps_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        _refuse(options)
        options["cpu"] = begin(bool(options.get("cpu", False)), sync)
        if not options["cpu"] and torch.distributed.is_initialized():
            options["kwargs_handlers"] = [*(options.get("kwargs_handlers") or ()), InitProcessGroupKwargs(backend="gloo")]
        super().__init__(**options)
        self.take(sync, fastps_options)

    def take(self, sync: str | Policy | None = None, fastps_options: Mapping[str, Any] | None = None) -> None:
        """Take the options of the job."""
        self._sync, self._fastps_options = sync, dict(fastps_options or {})
        self._jobs: list[JobOptimizer] = []
        self._given: list[torch.nn.Module] = []
        self._batch_size = 0

    @classmethod
    def adopt(
        cls, made: accelerate.Accelerator, sync: str | Policy | None, fastps_options: Mapping[str, Any] | None
    ) -> "Accelerator":
        """Turn an Accelerator that another library has made into one of fastps; the object stays the same."""
        made.__class__ = cls
        made.take(sync, fastps_options)
        adopted: Accelerator = made
        return adopted

    @property
    def jobs(self) -> Sequence[JobOptimizer]:
        """The optimizers that `prepare` has wrapped, each a worker of a job."""
        return tuple(self._jobs)

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order. See accelerate.Accelerator."""
        for given in args:
            if isinstance(given, torch.utils.data.DataLoader) and not self._batch_size:
                self._batch_size = (given.batch_size or 0) * self.gradient_accumulation_steps
        # Models first, because an optimizer is wrapped after its model has moved to its device.
        order = sorted(range(len(args)), key=lambda index: not isinstance(args[index], torch.nn.Module))
        placement = None if device_placement is None else [device_placement[index] for index in order]
        prepared = super().prepare(*(args[index] for index in order), device_placement=placement)
        if len(args) < 2:
            return prepared
        places = {index: place for place, index in enumerate(order)}
        return tuple(prepared[places[index]] for index in range(len(args)))

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model for its device and precision. It is not wrapped: gradients go through the store."""
        self._given.append(model)
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer in a DistributedOptimizer, the `optimizer` of the result. It joins the job, and may raise."""
        if isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if isinstance(optimizer, DistributedOptimizer):
            raise UnsupportedError(
                "expected a torch optimizer, which prepare wraps, found a DistributedOptimizer: leave it unwrapped, and give"
                " its arguments as sync= and fastps_options="
            )
        own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        model = next((each for each in self._given if own <= {id(tensor) for tensor in each.parameters()}), None)
        options = {"model": model, "batch_size": self._batch_size, **self._fastps_options}
        job = JobOptimizer(optimizer, self._sync, **options)
        self._jobs.append(job)
        attendance.keep_going(job)
        return super().prepare_optimizer(job, device_placement=False)

    def wait_for_everyone(self) -> None:
        """Wait for the other workers; then all of them show one version of the weights."""
        show_one_version(self._jobs)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save weights, the job's optimizer state and each worker's random states. A collective call."""
        self.wait_for_everyone()
        saved = super().save_state(output_dir, safe_serialization, **options)
        together()
        return saved

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Load what `save_state` saved, at any time between steps. A collective call."""
        self.wait_for_everyone()
        with contextlib.ExitStack() as stack:
            for job in self._jobs:
                if not job.worker.has_left:
                    stack.enter_context(job.loading())
            super().load_state(input_dir, load_kwargs, **options)

    def end_jobs(self) -> None:
        """Leave the jobs once all workers have made their last push; the models keep the final weights. A collective call."""
        for job in self._jobs:
            job.finish()
        self._jobs.clear()
        self._given.clear()

    def end_training(self) -> None:
        """Leave the jobs, and end the trackers. A collective call."""
        self.end_jobs()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Leave the jobs, and forget what was prepared. A collective call if something was."""
        self.end_jobs()
        return super().free_memory(*objects)


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def begin(cpu: bool, sync: str | Policy | None = None) -> bool:
    """Begin the process group of the launch. Returns whether workers train on the CPU. Raises UnsupportedError, UsageError."""
    if process_group.begin(sync=sync):
        nodes, of_job = nodes_of_environment(), (environment.rank(), environment.world_size())
        on_node = of_job if nodes is None else (nodes.local_rank, nodes.local_workers)
        # Accelerate reads and sets them for workers on CPUs.
        given: dict[str, Any] = dict(zip(_VARIABLES, (*of_job, *on_node), strict=True))
        if nodes is not None:  # it asks for these where workers are on several nodes, though their group has begun
            given |= {"MASTER_ADDR": nodes.host, "MASTER_PORT": nodes.port}
        for name, value in given.items():
            os.environ.setdefault(name, str(value))
    return cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
