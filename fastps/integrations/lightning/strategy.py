"""FastpsStrategy: the workers of a Trainer, its optimizers as workers of fastps, and the collectives that its loops ask for."""

import logging
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as shared_rank_zero_only

from fastps.integrations import process_group
from fastps.integrations.lightning import checks
from fastps.integrations.lightning.jobs import Jobs
from fastps.integrations.lightning.launchers import FastpsEnvironment, ProcessLauncher, ScriptLauncher, is_launched
from fastps.job.limits import timeout_s
from fastps.job.policy import Policy

logger = logging.getLogger("fastps.lightning")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class FastpsStrategy(ParallelStrategy):
    """Train a LightningModule by several workers with fastps: `Trainer(strategy=FastpsStrategy("dssp:3,15"), devices=4)`.

    Each worker trains on its share of the data, and its optimizers become workers of fastps: one job for each optimizer. The
    module's code stays as it is. Before each validation, each checkpoint and at the end the workers meet and take the newest
    weights, so all of them see the same; between these places the discipline alone decides who waits.

    Example::

        from lightning.pytorch import Trainer
        from fastps.integrations.lightning import FastpsStrategy

        trainer = Trainer(strategy=FastpsStrategy("dssp:3,15"), devices=4, accelerator="cpu", max_epochs=10)
        trainer.fit(module, loader)  # the module has the final weights

    Without a launcher the Trainer starts the workers. Under `fastps run`, torchrun, srun or mpirun it takes the launcher's, on
    one node under every discipline, on several under bsp and hardsync.

    Args:
        sync: a spec such as "dssp:3,15" or a Policy; default: FASTPS_SYNC, else "bsp".
        start_method: how the Trainer starts workers. "popen": the script runs once more for each, as with Lightning's "ddp".
            "spawn", "fork", "forkserver": processes of multiprocessing, as with "ddp_spawn" and "ddp_notebook". Default: "fork"
            in a notebook, else "popen".
        accelerator, parallel_devices, checkpoint_io, precision_plugin: as for every strategy of Lightning.
        options: further arguments of DistributedOptimizer: push_dtype, server, nonfinite, timeout_s, batch_size, ...

    Raises (from Trainer(...) on):
        UsageError: An option is wrong, or the number of devices is not the launcher's number of workers.
        UnsupportedError: The Trainer asks for what fastps does not do: `asp` over several nodes, GPUs, float64, ...
    """

    strategy_name = "fastps"
    parallel_devices: Any
    model: Any

    def __init__(
        self,
        sync: str | Policy | None = None,
        *,
        start_method: StartMethod | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        checks.check_options(options)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=FastpsEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self._options = {**options, "sync": sync}
        self._start_method = start_method or ("fork" if _IS_INTERACTIVE else "popen")
        self._jobs = Jobs(self._options)
        self._meeting: _Meeting | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, method in (("fastps", None), ("fastps_spawn", "spawn"), ("fastps_fork", "fork"), ("fastps_notebook", "fork")):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="fastps, the embedded parameter server", start_method=method)

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or [])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        self.cluster_environment.set_world_size(self.num_processes)
        rank_zero_only.rank = shared_rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        devices = list(self.parallel_devices or [])
        self.num_nodes = checks.check_nodes(self.num_nodes, self._options["sync"])
        checks.check_machine(self.accelerator, devices)
        checks.check_plugins(self._precision_plugin, self._layer_sync)
        checks.check_faults(self._options)
        self.parallel_devices = [self.root_device] * checks.check_workers(self.cluster_environment, devices)
        self.set_world_ranks()
        if self._start_method == "popen" or is_launched():
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes)
        else:
            self._launcher = ProcessLauncher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        limit_s = timeout_s(self._options.get("timeout_s"))
        sync, look = self._options["sync"], self._launcher.check_started
        process_group.begin(self.global_rank, self.world_size, sync=sync, limit_s=limit_s, look=look)

    @property
    def optimizers(self) -> list[Any]:
        return self._optimizers  # type: ignore[no-any-return]

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        ParallelStrategy.optimizers.fset(self, self._jobs.usable(optimizers))

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.world_size > 1:
            _sync_module_states(self.model)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            checks.check_callbacks(trainer, self.lightning_module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            _keep_from_waiting(trainer)
            self._meeting = _Meeting(self)
            trainer.callbacks.insert(0, self._meeting)
            self.on_train_start()

    def on_train_start(self) -> None:
        """Wrap the optimizers, also again if a tuner (LearningRateFinder) has trained before, and has ended that training."""
        if not self._jobs.optimizers:
            self.optimizers = self._jobs.begin(self.optimizers, self.lightning_module)

    def on_train_end(self) -> None:
        """End the jobs: the module has the final weights, and the optimizers are torch's own with the final state.

        A callback of the Trainer calls it first, and Lightning where a tuner has taken the callbacks away.
        """
        if self._jobs.optimizers:
            self.optimizers = self._jobs.end(self.optimizers)

    def teardown(self) -> None:
        self._jobs.close()
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        if trainer is not None and self._meeting in trainer.callbacks:
            trainer.callbacks.remove(self._meeting)
        self._meeting = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Let the other workers end, too. A worker that SIGTERM ends has the exit code of that in every order of events.

        Lightning's own is 0, which it would be or not be: another worker's failure may be noticed first.
        """
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM
        self._jobs.close(f"{type(exception).__name__}: {exception}")

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self._jobs.optimizers:
            if optimizer.policy.needs_samples and not self._options.get("batch_size"):
                optimizer.report_loss(optimizer.worker.loss, int(extract_batch_size(batch)))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Make a step, and report its loss to observers (`fastps top`)."""
        loss = super().optimizer_step(optimizer, closure, model, **kwargs)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and optimizer in self._jobs.optimizers:
            optimizer.worker.loss = float(loss)
        return loss

    def barrier(self, name: str | None = None) -> None:
        """Wait until every worker comes here, and make the null pushes that slower workers wait for meanwhile."""
        if self._meets():
            process_group.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of worker `src`, in every worker."""
        if not self._meets():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all workers, in place; anything else is returned as it is. "mean" and "avg" are the mean."""
        if not isinstance(tensor, torch.Tensor) or not self._meets():
            return tensor
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")  # Gloo has none
        if isinstance(reduce_op, str):
            reduce_op = dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, reduce_op.upper())
        dist.all_reduce(tensor, op=reduce_op or dist.ReduceOp.SUM, group=group)
        if not is_mean:
            return tensor
        count = dist.get_world_size(group)
        return tensor.div_(count) if tensor.is_floating_point() else tensor.copy_(tensor / count)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all workers, stacked. With `sync_grads` gradients flow through."""
        if not self._meets():
            return tensor
        return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)  # type: ignore[no-any-return]

    def _meets(self) -> bool:
        """Whether there are others to wait for. After an error this worker waits for nobody: the others are about to end."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        is_interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        return dist.is_available() and dist.is_initialized() and not is_interrupted

    def _show_newest(self) -> None:
        if self._jobs.optimizers and self._meets():
            self.barrier()
            self._jobs.show_newest()

    def on_validation_start(self) -> None:
        """Let all workers evaluate the same weights, which callbacks may write into."""
        self._show_newest()
        self._jobs.show_private()

    def on_validation_end(self) -> None:
        self._jobs.show_shared()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with the newest weights. Every worker calls it, as Trainer.save_checkpoint does."""
        self._show_newest()
        return super().lightning_module_state_dict()  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state; during training the job's weights are replaced."""
        if not self._jobs.optimizers:
            super().load_model_state_dict(checkpoint, strict=strict)
            return
        self.barrier()
        if self.local_rank == 0:  # of each node, whose weights nobody else replaces before the next step
            for optimizer in self._jobs.optimizers:
                optimizer.replace_weights(checkpoint["state_dict"])
        self._show_newest()


class _Meeting(Callback):
    """The strategy's own places among the Trainer's callbacks, before all others."""

    def __init__(self, strategy: FastpsStrategy) -> None:
        self._strategy = strategy

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Meet: metrics that wait for each other come next, and disciplines whose workers wait need each other's pushes."""
        optimizers = self._strategy._jobs.optimizers
        if any(not optimizer.policy.at_once for optimizer in optimizers):
            self._strategy.barrier()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the jobs, before callbacks write averages into the weights or save the last checkpoint."""
        self._strategy.on_train_end()


def _keep_from_waiting(trainer: Any) -> None:
    """Leave out what Lightning broadcasts from worker 0 in every step, whether it was asked to end.

    All workers would wait for worker 0 at every step, under every discipline. A worker that ends by SIGTERM ends the others
    through the store.
    """
    loop, signals = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None
    if hasattr(signals, "_sigterm_notifier_fn"):
        signals._sigterm_notifier_fn = partial(_note_sigterm, trainer)


def _note_sigterm(trainer: Any, number: int, frame: Any) -> None:
    """Let the Trainer end after this step, and pass the signal on to the workers that this process has started."""
    logger.info("worker %d received SIGTERM and ends after this step", trainer.global_rank)
    if not trainer._signal_connector.received_sigterm and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(number)
    trainer._signal_connector.received_sigterm = True


FastpsStrategy.register_strategies(StrategyRegistry)
