"""A callback that publishes a module's weights, for trainings with any strategy, and takes an evaluator's rows back."""

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fastps.evaluation.rows import Row, metrics_of
from fastps.integrations.publishing import Publishing, step_of


class PublishCallback(Callback):
    """Publishes the module after every K optimizer steps, as `fastps.Publisher` does, with the step as the tag.

        trainer = Trainer(callbacks=[PublishCallback("digits", every=100, rows="digits.jsonl")])

    Args:
        job: the name by which readers and evaluators find it.
        every: publish after so many optimizer steps.
        rows: the file of an evaluator's rows. Its numbers go to the Trainer's loggers, at the step that was evaluated, and to
            `callback_metrics`, for ModelCheckpoint and others, under `prefix` and their names.
        prefix: see `rows`.
        options: further arguments of `fastps.Publisher`.

    If a reader asks the training to stop, the Trainer stops after the next step that is published. Several processes that train
    alike (ddp) publish those of the first; strategies that shard weights are refused by their tensors.
    """

    def __init__(
        self, job: str, every: int = 100, rows: str | os.PathLike[str] = "", prefix: str = "eval_", **options: Any
    ) -> None:
        self._publishing, self._prefix = Publishing(job, every, rows, **options), prefix

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the first version."""
        self._publishing.begin(pl_module, trainer.global_step, is_first=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Publish each K-th step, log what the evaluator found, and stop if asked."""
        rows, is_asked = self._publishing.after_step(trainer.global_step, epoch=trainer.current_epoch)
        for row in rows:
            self._log(trainer, row)
            pl_module.log_dict({self._prefix + name: float(value) for name, value in metrics_of(row).items()}, logger=False)
        trainer.should_stop = trainer.should_stop or is_asked

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the last step, and end the job."""
        for row in self._publishing.finish(trainer.global_step, epoch=trainer.current_epoch):
            self._log(trainer, row)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the job as it is."""
        self._publishing.end()

    def _log(self, trainer: Trainer, row: Row) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({self._prefix + name: value for name, value in metrics_of(row).items()}, step_of(row))
