"""The Trainer of Hugging Face's transformers with fastps: its loop, its checkpoints and its metrics, with one store of weights.

`TrainingArguments` and `Trainer` take the places of those of transformers; `TrainerMixin` makes the same of another Trainer.
Two private methods of the Trainer are extended, `_save_checkpoint` and `_finalize_training`; an import names one that is
missing.
The extra [hf] installs the package.
"""

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from fastps.errors import UnsupportedError, UsageError
from fastps.evaluation.rows import metrics_of
from fastps.integrations import accelerate as fastps_accelerate
from fastps.integrations.publishing import Publishing, step_of
from fastps.job.specs import parse_policy
from fastps.system.extras import how_to_install

try:
    import transformers
except ImportError as error:
    raise ImportError(f"fastps.integrations.transformers needs the package transformers: {how_to_install('hf')}") from error

_EXTENDED = ("create_accelerator_and_postprocess", "_save_checkpoint", "_finalize_training", "evaluate", "predict")
if _missing := [name for name in _EXTENDED if not hasattr(transformers.Trainer, name)]:
    raise ImportError(
        f"fastps.integrations.transformers extends {', '.join(_EXTENDED)} of transformers.Trainer, and transformers"
        f" {transformers.__version__} has no {', '.join(_missing)}: expected version 5.24, or one that has them"
    )

_OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
_Base: Any = object  # in place of the class beside a mixin, which `super()` leads to


@dataclass
class _ArgumentsMixin(_Base):  # type: ignore[misc]
    sync: str | None = field(default=None, metadata={"help": "The discipline of fastps, such as ssp:3."})
    fastps_options: dict[str, Any] | str | None = field(default=None, metadata={"help": "Further arguments of the optimizer."})
    average_tokens_across_devices: bool = field(
        default=False, metadata={"help": "Scale the loss by the tokens of all workers, who wait for each other at every step."}
    )

    _is_taken = False  # by a Trainer of this module

    @property
    def place_model_on_device(self) -> Any:
        """See transformers.TrainingArguments. Raises UsageError for a Trainer that would leave `sync` out."""
        if not self._is_taken:
            raise UsageError(
                f"{type(self).__name__} of fastps in a Trainer of transformers itself: expected"
                " fastps.integrations.transformers.Trainer, without which the workers train without fastps; import Trainer from"
                " there, or put TrainerMixin before the Trainer of your own"
            )
        return super().place_model_on_device

    def __post_init__(self) -> None:
        given: Any = self
        if isinstance(given.fastps_options, str):  # of a command line
            given.fastps_options = json.loads(given.fastps_options)
        if isinstance(name := (given.fastps_options or {}).get("push_dtype"), str):
            given.fastps_options = {**given.fastps_options, "push_dtype": getattr(torch, name.removeprefix("torch."), name)}
        _refuse(given)
        given.use_cpu = fastps_accelerate.begin(given.use_cpu, given.sync)
        if torch.distributed.is_initialized():
            given.ddp_backend = "gloo"
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """See transformers.TrainingArguments. Types of torch are in it by name, as JSON needs them."""
        found: dict[str, Any] = super().to_dict()
        given = found["fastps_options"] or {}
        named = {name: str(each).removeprefix("torch.") for name, each in given.items() if isinstance(each, torch.dtype)}
        return {**found, "fastps_options": {**given, **named} or None}


def _refuse(given: Any) -> None:
    fastps_accelerate.refuse_environment()
    for name, what in (("fsdp", "FSDP"), ("deepspeed", "DeepSpeed"), ("parallelism_config", "ParallelismConfig")):
        if getattr(given, name, None):
            raise fastps_accelerate.sharded(what, f"{name}=")
    if given.fp16:
        raise UnsupportedError(
            "expected bf16=True or full precision, found fp16=True: its loss scaler would skip steps of one worker alone"
        )
    if given.auto_find_batch_size:
        raise UnsupportedError(
            "auto_find_batch_size would restart one worker alone: expected it off, found True; give a batch size that fits"
        )
    if given.ddp_backend not in (None, "gloo"):
        raise UnsupportedError(
            f"expected ddp_backend to be left out, found {given.ddp_backend!r}: fastps begins a process group of Gloo"
        )
    for name in _OF_DDP:
        if getattr(given, name, None) is not None:
            raise UnsupportedError(f"{name} would have no effect, because no model is wrapped in DistributedDataParallel")


@dataclass
class TrainingArguments(_ArgumentsMixin, transformers.TrainingArguments):  # type: ignore[misc]  # may be missing
    """The arguments of transformers.TrainingArguments, and those of a job.

    With several workers `average_tokens_across_devices` is off unless it is given: it makes every step wait for all workers.

    Args:
        sync: as for fastps.DistributedOptimizer; default: FASTPS_SYNC, else "bsp".
        fastps_options: further arguments of DistributedOptimizer, as a dict; a type may be a name, as in a file of JSON:
            {"push_dtype": "bfloat16"}.
    """


@dataclass
class Seq2SeqTrainingArguments(_ArgumentsMixin, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]  # may be missing
    """The arguments of transformers.Seq2SeqTrainingArguments, and those of TrainingArguments here."""


class TrainerMixin(_Base):  # type: ignore[misc]
    """Put before a Trainer of transformers, as in `class MyTrainer(TrainerMixin, transformers.Trainer)`, it trains with fastps.

    Its arguments are TrainingArguments of this module. All workers show one version of the weights while they evaluate and
    while they save, and after training, when they have left the job; a later `train()` begins a new one.
    """

    optimizer: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, as one whose `prepare` joins a job. Raises UnsupportedError for arguments of transformers."""
        given = self.args
        if not isinstance(given, _ArgumentsMixin):
            raise UnsupportedError(
                f"expected fastps.integrations.transformers.TrainingArguments, found {type(given).__module__}"
                f".{type(given).__name__}: import TrainingArguments from there, too"
            )
        given._is_taken = True
        super().create_accelerator_and_postprocess()
        batch_size = given.per_device_train_batch_size * given.gradient_accumulation_steps
        options: Any = given.fastps_options or {}
        fastps_accelerate.Accelerator.adopt(self.accelerator, given.sync, {"batch_size": batch_size, **options})

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        """Make the optimizer. Raises UnsupportedError if every step would wait for all workers, and the discipline does not."""
        if isinstance(job := getattr(self.optimizer, "optimizer", None), fastps_accelerate.JobOptimizer):
            self.optimizer = job.finish()  # the training before was interrupted
        made = super().create_optimizer(*arguments, **options)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            sync = parse_policy(self.args.sync or os.environ.get("FASTPS_SYNC", "bsp"))
            if not sync.waits_for_fold:
                raise UnsupportedError(
                    f"average_tokens_across_devices makes every step wait for all workers, and {sync.spec} exists to avoid"
                    " that: leave it out, or train under bsp"
                )
        return made

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate one version of the weights. A collective call."""
        self._show_one_version()
        return super().evaluate(*arguments, **options)

    def predict(self, *arguments: Any, **options: Any) -> Any:
        """Predict with one version of the weights. A collective call."""
        self._show_one_version()
        return super().predict(*arguments, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self._show_one_version()
        super()._save_checkpoint(*arguments, **options)
        fastps_accelerate.together()  # wait until it is written: its state then belongs to the weights' version

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        """Leave the job with its last weights and state; what follows may load others into the model."""
        self.accelerator.wait_for_everyone()
        self.optimizer = self.optimizer.optimizer.finish()
        self.accelerator.end_jobs()
        return super()._finalize_training(*arguments, **options)

    def _show_one_version(self) -> None:
        if any(not job.worker.has_left for job in self.accelerator.jobs):
            self.accelerator.wait_for_everyone()


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]  # may be missing
    """transformers.Trainer with fastps. See TrainerMixin.

        from fastps.integrations.transformers import Trainer, TrainingArguments

        trainer = Trainer(model, TrainingArguments("out", sync="ssp:3"), train_dataset=rows)
        trainer.train()

    The script runs alone, under `fastps run -n 4`, torchrun and `accelerate launch`.
    """


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]  # may be missing
    """transformers.Seq2SeqTrainer with fastps. See TrainerMixin."""


class PublishCallback(transformers.TrainerCallback):  # type: ignore[misc]  # may be missing
    """Publishes the model of any Trainer after every K steps, as `fastps.Publisher` does, with the step as the tag.

        trainer.add_callback(PublishCallback(trainer, "digits", every=100, rows="digits.jsonl"))

    Args:
        trainer: the Trainer, of transformers or of this module.
        job: the name by which readers and evaluators find it.
        every: publish after so many steps.
        rows: the file of an evaluator's rows. The Trainer logs its numbers as `eval_NAME`, and the step that was evaluated as
            `eval_of_step`.
        options: further arguments of `fastps.Publisher`.

    If a reader asks the training to stop, the Trainer stops after the next step that is published. Of several processes that
    train alike the first publishes.
    """

    def __init__(self, trainer: Any, job: str, every: int = 100, rows: str | os.PathLike[str] = "", **options: Any) -> None:
        self._trainer, self._publishing = trainer, Publishing(job, every, rows, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Publish the first version."""
        self._publishing.begin(parts["model"], state.global_step, is_first=state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Publish each K-th step, log what the evaluator found, and stop if asked."""
        rows, is_asked = self._publishing.after_step(state.global_step, epoch=state.epoch)
        self._log(rows)
        control.should_training_stop = control.should_training_stop or is_asked

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Publish the last step, and end the job."""
        self._log(self._publishing.finish(state.global_step, epoch=state.epoch))

    def _log(self, rows: list[Any]) -> None:
        for row in rows:
            numbers = {f"eval_{name}": value for name, value in metrics_of(row).items()}
            self._trainer.log({**numbers, "eval_of_step": step_of(row)})
