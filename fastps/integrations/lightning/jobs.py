"""The jobs of one fit: a worker of fastps for each of the module's optimizers, from the start of training to its end.

Lightning has barriers that disciplines do not know of. A worker that waits in one keeps these jobs going, also by null pushes,
so workers whose epochs differ in length do not wait for each other's pushes.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.core.optimizer import _MockOptimizer

from fastps.errors import Error, UsageError
from fastps.integrations import attendance
from fastps.torch.optimizer import DistributedOptimizer


class Jobs:
    """The open DistributedOptimizers of this process, with the same `options` for each; none before and after training."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._private: contextlib.ExitStack | None = None
        self._ended: list[tuple[DistributedOptimizer, torch.optim.Optimizer]] = []  # with what each has wrapped
        self.optimizers: list[DistributedOptimizer] = []

    def begin(self, optimizers: Sequence[Any], module: torch.nn.Module) -> list[Any]:
        """Wrap each torch optimizer; every worker wraps the same ones in the same order. Lightning's stand-in stays."""
        _refuse_wrapped(optimizers)
        begun: list[Any] = []
        for optimizer in optimizers:
            if isinstance(optimizer, _MockOptimizer):
                begun.append(optimizer)
                continue
            begun.append(DistributedOptimizer(optimizer, model=module, **self._options))
            self.optimizers.append(begun[-1])
            attendance.keep_going(begun[-1])
        return begun

    def show_newest(self) -> None:
        """Show the newest weights, and the average of all workers' buffers (BatchNorm). All workers call it at one place."""
        if self._private is not None:
            return
        for optimizer in self.optimizers:
            optimizer.take_newest()
        for optimizer in self.optimizers[:1]:
            optimizer.average_buffers()

    def show_private(self) -> None:
        """Show private copies of the weights until `show_shared`: callbacks may write into them during an evaluation."""
        if self._private is None:
            self._private = contextlib.ExitStack()
            for optimizer in self.optimizers:
                self._private.enter_context(optimizer.private_weights())

    def show_shared(self) -> None:
        """Show the job's weights again."""
        if self._private is not None:
            private, self._private = self._private, None
            private.close()

    def end(self, optimizers: Sequence[Any]) -> list[Any]:
        """Wait for the others, take the final weights and state, and return the torch optimizers with them."""
        self.show_shared()
        for optimizer in self.optimizers:
            optimizer.wait_for_others()
        for optimizer in self.optimizers[:1]:
            optimizer.average_buffers()
        self._ended += [(optimizer, optimizer.unwrap()) for optimizer in self.optimizers]
        self.optimizers = []
        return self.usable(optimizers)

    def usable(self, optimizers: Sequence[Any]) -> list[Any]:
        """These optimizers, with torch's own in place of those whose job has ended: a tuner keeps them, and gives them back."""
        inner = {id(ended): own for ended, own in self._ended}
        return [inner.get(id(optimizer), optimizer) for optimizer in optimizers]

    def close(self, failure: str | None = None) -> None:
        """Leave the jobs without waiting. With `failure` the other workers end with an error that quotes it."""
        closing, self.optimizers = self.optimizers, []
        with contextlib.suppress(Error):
            self.show_shared()
        for optimizer in closing:
            with contextlib.suppress(Error):
                optimizer.close(failure)


def _refuse_wrapped(optimizers: Sequence[Any]) -> None:
    wrapped = [optimizer for optimizer in optimizers if isinstance(optimizer, DistributedOptimizer)]
    for optimizer in wrapped:
        optimizer.close("it was wrapped twice")
    if wrapped:
        raise UsageError(
            "configure_optimizers returned a DistributedOptimizer: expected the torch optimizer, because FastpsStrategy wraps"
            " it; give sync= and other options to FastpsStrategy, or leave the strategy out under `fastps run --env fastps`"
        )
