"""The leaf: a node's own arena, and its fold. It takes the sum of the pushes to the home and returns with the home's weights.

Other arenas apply the update rule in a fold. A leaf sums its workers' pushes, hands the sum to the home, and takes the weights
that the home grants. It holds the lock of its shard meanwhile, so later pushes wait in their slots. Its workers cannot fold,
because the home has the weights; they end when their agent is lost.
"""

from functools import partial
from typing import Protocol

import torch

from fastps.job.nodes import Nodes
from fastps.kernels.protocol.fold_call import FoldCall
from fastps.membership.job_memory import JobMemory
from fastps.network.messages import Header, Kind
from fastps.network.monitoring.report import Report
from fastps.network.sums import Outgoing, Sums


class Upstream(Protocol):
    """The home as a leaf sees it, in this process or on another node. Every method raises NodeLostError."""

    def coming(self) -> tuple[int, int]:
        """The range of floats that the next step carries: all of them, or with `local_fragments` the next fragment."""

    def step(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int]:
        """Hand a sum to the home, or a step without one, and write the granted weights into `after`.

        `before` has the weights of the step before. Returns the range of floats that is written: the one that the step carries,
        or all of them for a node that was lost and has joined again.
        """

    def finish(self, after: torch.Tensor) -> None:
        """Make no more steps, wait for the other nodes, and write the final weights into `after`."""

    def check(self) -> None:
        """Raise NodeLostError if the home is lost or has failed."""

    def abort(self, failure: str) -> None:
        """End a step that another thread makes."""

    def leave(self, failure: str | None) -> None:
        """End. The other nodes get `failure` as the reason, if there is one. May be called twice."""


class Leaf:
    """The fold of a leaf arena. A report counts the time of its exchanges."""

    def __init__(self, store: JobMemory, nodes: Nodes, upstream: Upstream, report: Report) -> None:
        self._store = store
        self.nodes = nodes
        self._upstream, self._report = upstream, report
        self._sums = Sums(store)

    def fold(self, call: FoldCall) -> None:
        """Take one version from the home; the function given to Lane.fold_with. Raises NodeLostError."""
        header = Header(Kind.NULL)
        sent: Outgoing | None = None
        if pushes := call.pushes:
            samples = sum(push.samples for push in pushes)
            header = Header(Kind.PUSH, weight=len(pushes), samples=samples, loss=self._sums.mean_loss(pushes))
            sent = partial(self._sums.begin, pushes)
        before, after = self._sums.weights(call.weights_in), self._sums.weights(call.weights_out)
        self._exchange(header, sent, before, after)
        self._store.write_halves(call.weights_out)
        self._store.all_steps(call.state_out)[:] = self._store.all_steps(call.state_in) + 1

    def _exchange(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int]:
        began_ns = self._store.clock.now_ns()
        try:
            return self._upstream.step(header, sent, before, after)
        finally:
            self._report.wait_ns += self._store.clock.now_ns() - began_ns

    def check(self) -> None:
        """Raise NodeLostError if the home is lost or has failed."""
        self._upstream.check()

    def end(self, failure: str | None) -> None:
        """End what is under way: nothing, because a step is a part of a fold."""

    def finish(self, weights: int, state: int) -> None:
        """Write the job's final weights into a weights buffer, and the published step counts into a state buffer."""
        self._upstream.finish(self._sums.weights(weights))
        self._store.write_halves(weights)
        _, states = self._store.committed()
        self._store.all_steps(state)[:] = self._store.all_steps(states[0])
