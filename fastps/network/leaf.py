"""The leaf: the fold of a node's own arena. It takes the sum of the pushes to the home and returns with the home's weights.

Other arenas apply the update rule in a fold. A leaf sums its workers' pushes, hands the sum to the home, and takes the weights
that the home grants. It holds the lock of its shard meanwhile, so later pushes wait in their slots.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fastps.job.nodes import Nodes
from fastps.kernels.protocol.fold_call import FoldCall, FoldedPush
from fastps.membership.job_memory import JobMemory
from fastps.network.messages import Header, Kind


class Upstream(Protocol):
    """The home as a leaf sees it, in this process or on another node. Every method raises NodeLostError."""

    def step(self, header: Header, pushes: Sequence[FoldedPush], before: int, after: int) -> None:
        """Hand a sum to the home, or a step without one, and write the granted weights into the leaf's buffer `after`.

        `before` is the buffer of the leaf's present version.
        """
        ...

    def finish(self, after: int) -> None:
        """Make no more steps, wait for the other nodes, and write the final weights into the leaf's buffer `after`."""
        ...

    def check(self) -> None:
        """Raise NodeLostError if the home is lost or has failed."""
        ...

    def leave(self, failure: str | None) -> None:
        """End. The other nodes get `failure` as the reason, if there is one. May be called twice."""
        ...


class Leaf:
    """The fold of a leaf arena."""

    def __init__(self, store: JobMemory, nodes: Nodes, upstream: Upstream) -> None:
        self._store = store
        self.nodes = nodes
        self.upstream = upstream

    def fold(self, call: FoldCall) -> None:
        """Take one version from the home; the function given to Lane.fold_with. Raises NodeLostError."""
        self.upstream.step(self._header(call.pushes), call.pushes, call.weights_in, call.weights_out)
        self._store.all_steps(call.state_out)[:] = self._store.all_steps(call.state_in) + 1

    def finish(self, weights: int, state: int) -> None:
        """Write the job's final weights into a weights buffer, and the published step counts into a state buffer."""
        self.upstream.finish(weights)
        _, states = self._store.committed()
        self._store.all_steps(state)[:] = self._store.all_steps(states[0])

    def _header(self, pushes: Sequence[FoldedPush]) -> Header:
        if not pushes:
            return Header(Kind.NULL)
        losses = [self._store.arena.counters(push.lane)["loss"] for push in pushes]
        samples = sum(push.samples for push in pushes)
        return Header(Kind.PUSH, weight=len(pushes), samples=samples, loss=float(np.mean(losses)))
