"""momentum=worker: a worker's own momentum, which it adds to its gradient in the slot before each push (DANA-slim).

v = mu v + g; the push is g + mu v; the fold applies plain SGD. The loop is the fold's own for Nesterov momentum, whose bits are
torch's. The momentum lies in the lane's room of the arena, so that checkpoints have it. A replacement begins without one: its
predecessor may have ended in the middle of a write.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastps.errors import UnsupportedError, UsageError
from fastps.job.layout import Layout
from fastps.job.update_rules import Hyper
from fastps.kernels.update import fold
from fastps.membership.job_memory import JobMemory


class WorkerMomentum:
    """The momentum of one lane's worker."""

    def __init__(self, store: JobMemory, lane: int, replaces: bool) -> None:
        _check(store.layout)
        self._store, self._lane, self.values = store, lane, store.momentum(lane)
        if replaces:
            self.values[:] = 0
        self._zeros = np.zeros(len(self.values), np.float32)  # read only: takes no memory
        self._may_be_bad = store.layout.faults.nonfinite != "allow"
        self._foldings: dict[int, tuple[Any, fold.Folding]] = {}  # by slot: what it was made for
        self._given: Sequence[Hyper] = ()
        self._sent: Sequence[Hyper] = ()

    def add(self, slot: int, hypers: Sequence[Hyper], present: bytes, scale: float) -> tuple[Sequence[Hyper], float]:
        """Add the momentum to a slot's gradient times `scale`. Return the hyper-parameters and the scale of the push.

        A gradient that is not finite stays as it is, and the momentum, too: the push is then rejected. Raises UsageError for a
        dampening.
        """
        if hypers is not self._given:
            if damped := max(hyper.dampening for hyper in hypers):
                raise UsageError(f"sync {self._store.layout.policy.spec!r}: expected dampening 0, found {damped:g}")
            plain = [each._replace(momentum=0.0, flags=each.flags & ~fold.HYPER_NESTEROV) for each in hypers]
            self._given, self._sent = hypers, tuple(plain)
        offset = self._store.arena.gradient_offset(self._lane, slot)
        gradient = np.frombuffer(self._store.memory, np.float32, len(self.values), offset)
        if self._may_be_bad and not np.isfinite(gradient.sum()):
            return self._sent, scale
        made_for = [hyper.momentum for hyper in hypers], present, scale
        if slot not in self._foldings or self._foldings[slot][0] != made_for:
            self._foldings[slot] = made_for, self._folding(gradient, *made_for)
        self._foldings[slot][1].run(0, len(self.values))
        return self._sent, 1.0

    def _folding(self, gradient: Any, momenta: Sequence[float], present: bytes, scale: float) -> fold.Folding:
        """A fold of the gradient into zeros with a rate of -1: its result is the direction, in place of the gradient."""
        bits = int.from_bytes(present, "little")
        parameters = [each for index, each in enumerate(self._store.layout.parameters) if bits >> index & 1]
        segments = [(each.offset, each.length, each.group) for each in parameters]
        hypers = [Hyper(-1.0, momentum, flags=fold.HYPER_NESTEROV) for momentum in momenta]
        state, steps = self.values.reshape(1, -1), np.ones(len(segments), np.int64)
        push = (gradient, hypers, [True] * len(segments), scale)
        written = (gradient, state, steps.copy())  # the loops may write where they read
        return fold.Folding(fold.RULE_SGD, fold.FOLD_SUM, segments, [push], self._zeros, state, steps, *written)


def _check(layout: Layout) -> None:
    """Raise UnsupportedError for a job whose workers cannot keep their own momentum."""
    found = "shards on devices" if layout.owner_lanes else "tables" if layout.tables else f"{layout.gradient_type} gradients"
    if layout.owner_lanes or layout.tables or layout.gradient_type != "float32":
        raise UnsupportedError(f"sync {layout.policy.spec!r}: expected float32 gradients in host memory, found {found}")
