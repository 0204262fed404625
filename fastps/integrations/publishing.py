"""What callbacks of other frameworks do to publish a training's weights, and to take an evaluator's rows back.

The training needs no optimizer of fastps. Of several processes that train together the first publishes, and all stop alike.
"""

import os
import time
from typing import Any

import torch

from fastps.evaluation.rows import Row, read
from fastps.torch.publisher import Publisher


class Publishing:
    """A Publisher that a trainer's steps drive.

    Args:
        job: the name by which readers and evaluators find it.
        every: publish after so many steps.
        rows: the file of an evaluator's rows, to be read back; none if empty.
        options: further arguments of `fastps.Publisher`.
    """

    def __init__(self, job: str, every: int, rows: str | os.PathLike[str], **options: Any) -> None:
        self._job, self._every, self._rows, self._options = job, every, rows, options
        self._publisher: Publisher | None = None
        self._published = -1  # the step of the newest version

    def begin(self, model: torch.nn.Module, step: int, *, is_first: bool) -> None:
        """Begin with what the model has at `step`. `is_first`: whether this process publishes. Raises what Publisher raises."""
        self.end()
        self._published, self._began_s, self._read = step, time.time(), 0
        if is_first:
            first_version = self._options.get("first_version", step // self._every)
            self._publisher = Publisher(model, self._job, **{**self._options, "first_version": first_version})

    def after_step(self, step: int, **tag: Any) -> tuple[list[Row], bool]:
        """Publish, if it is time to. Returns the rows that have come since, and whether the training is asked to stop.

        A collective call where several processes train, each K-th step.
        """
        if step % self._every or step == self._published:
            return [], False
        self._publish(step, tag)
        return self._new_rows(), _agreed(self._publisher is not None and self._publisher.stop_asked)

    def finish(self, step: int, **tag: Any) -> list[Row]:
        """Publish the last step, unless it is, and end the job. Returns the rows that have come since."""
        if step != self._published:
            self._publish(step, tag)
        rows = self._new_rows()
        self.end()
        return rows

    def end(self) -> None:
        """End the job as it is. May be called twice."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _publish(self, step: int, tag: dict[str, Any]) -> None:
        self._published = step
        if self._publisher is not None:
            self._publisher.publish(tag={"step": step, **tag})

    def _new_rows(self) -> list[Row]:
        if self._publisher is None or not self._rows:
            return []
        rows, self._read = read(self._rows, self._read)
        return [row for row in rows if row["unix_s"] >= self._began_s]  # the file may have those of a training before


def step_of(row: Row) -> int:
    """The trainer's step at which a row's version was published.

    >>> step_of({"version": 3, "tag": {"step": 300}}), step_of({"version": 3})
    (300, 3)
    """
    step = row.get("tag", {}).get("step", row["version"])
    return step if isinstance(step, int) else int(row["version"])


def _agreed(stop: bool) -> bool:
    """What the first process says, where torch.distributed has several."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return stop
    said = [stop]
    torch.distributed.broadcast_object_list(said, src=0)
    return said[0]
