"""The fold of a leaf that trains by itself and meets the other nodes every `local_steps` versions (DiLoCo, arXiv 2311.08105).

The leaf applies the job's own update rule. The version that completes a round goes to the home: the difference between the
home's weights that the node took last and its weights now is pushed like a gradient, and the outer rule of the home makes new
weights of the differences (Algorithm 1, lines 11 to 14). The optimizer's state stays on the node. An exchange is part of the
fold that completes the round, so no worker reads the weights before it.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from fastps.job.nodes import Nodes, outer_hyper
from fastps.kernels.protocol.fold_call import FoldCall, FoldedPush
from fastps.kernels.update.fold import Folding
from fastps.membership.job_memory import JobMemory
from fastps.network.edge import chunk_ranges
from fastps.network.leaf import Upstream
from fastps.network.messages import Header, Kind
from fastps.network.sums import Sums, Terms


class Difference:
    """What a node has moved, as a sum that travels: the weights of the last exchange less those of now."""

    def __init__(self, before: torch.Tensor, now: torch.Tensor, terms: Terms) -> None:
        self._before, self._now, self._terms = before, now, terms

    def begin(self, outs: Sequence[torch.Tensor], first: int = 0) -> tuple[Terms, Iterator[torch.Tensor]]:
        """See Outgoing."""
        return self._terms, self._chunks(outs, first)

    def _chunks(self, outs: Sequence[torch.Tensor], begin: int) -> Iterator[torch.Tensor]:
        for out in outs:
            for first, last in chunk_ranges(0, len(out)):
                chunk = out[first:last]
                torch.sub(self._before[begin + first : begin + last], self._now[begin + first : begin + last], out=chunk)
                yield chunk
            begin += len(out)


class LocalLeaf:
    """The fold of a leaf arena whose node makes `local_steps` versions between two exchanges."""

    def __init__(self, store: JobMemory, nodes: Nodes, upstream: Upstream) -> None:
        self._store = store
        self.nodes = nodes
        self.upstream = upstream
        self._sums = Sums(store)
        layout = store.layout
        self._segments = [(each.offset, each.length, each.group) for each in layout.parameters]
        self._taken = self._sums.weights(0).clone()  # the home's weights of the last exchange
        self._received = torch.empty_like(self._taken)
        outer = [outer_hyper(nodes.policy)] * layout.groups
        self._terms = Terms(outer, np.ones(len(layout.parameters), np.bool_))
        self._versions = 0  # since the last exchange
        self._samples, self._losses = 0, 0.0

    def fold(self, call: FoldCall) -> None:
        """Make one version, and exchange with the home if it completes a round. Raises NodeLostError."""
        self._apply(call)
        self._versions += 1
        self._samples += sum(push.samples for push in call.pushes)
        if call.pushes:
            self._losses = self._mean_loss(call.pushes)
        if self._versions == self.nodes.policy.local_steps:
            self._exchange(self._sums.weights(call.weights_out))

    def _apply(self, call: FoldCall) -> None:
        """Apply the job's update rule to the pushes, from buffer to buffer."""
        store, rule = self._store, self._store.layout.rule
        weights, weights_out = (self._sums.weights(buffer).numpy() for buffer in (call.weights_in, call.weights_out))
        state, state_out = self._planes(call.state_in), self._planes(call.state_out)
        steps, steps_out = store.all_steps(call.state_in), store.all_steps(call.state_out)
        if not call.pushes:
            for now, then in ((weights, weights_out), (state, state_out), (steps, steps_out)):
                then[:] = now
            return
        Folding(
            rule.number, call.mode, self._segments, [self._push(push) for push in call.pushes],
            weights, state, steps, weights_out, state_out, steps_out,
            scale=call.scale, rate_scale=call.rate_scale, user_rule=rule.address,
        ).run(0, len(weights))  # fmt: skip

    def _planes(self, buffer: int) -> npt.NDArray[np.float32]:
        """All optimizer-state tensors of a state buffer, one row each."""
        floats, count = self._store.layout.buffer_floats, len(self._store.layout.rule.planes)
        if not count:
            return np.zeros((0, floats), np.float32)
        first = self._store.arena.plane_offset(buffer, 0)
        return np.frombuffer(self._store.memory, np.float32, count * floats, first).reshape(count, floats)

    def _push(self, push: FoldedPush) -> tuple[object, list[tuple[float, ...]], list[bool], float, float]:
        hypers, present = self._store.slot_words(push.lane, push.slot)
        gradient = self._sums.slot(push.lane, push.slot).numpy()
        return gradient, [tuple(hyper) for hyper in hypers], present.tolist(), push.scale, push.rate_scale

    def _mean_loss(self, pushes: Sequence[FoldedPush]) -> float:
        return float(np.mean([self._store.arena.counters(push.lane)["loss"] for push in pushes]))

    def _exchange(self, weights: torch.Tensor) -> None:
        """Push what the node has moved, and take the home's weights, mixed with its own by `local_mix`.

        Every node counts once in a mean, however many workers it has: it is one replica of the paper.
        """
        header = Header(Kind.PUSH, weight=1, samples=self._samples, loss=self._losses)
        difference = Difference(self._taken, weights, self._terms)
        self.upstream.step(header, difference, self._taken, self._received)
        self._taken, self._received = self._received, self._taken
        torch.lerp(weights, self._taken, self.nodes.policy.local_mix, out=weights)
        self._versions = self._samples = 0

    def finish(self, weights: int, state: int) -> None:
        """Push what has moved since the last exchange, and write the job's final weights and this node's state into buffers."""
        committed, states = self._store.committed()
        if self._versions:
            self._exchange(self._sums.weights(committed[0]).clone())
        self.upstream.finish(self._sums.weights(weights))
        self._planes(state)[:] = self._planes(states[0])
        self._store.all_steps(state)[:] = self._store.all_steps(states[0])
