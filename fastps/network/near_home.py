"""The home as the leaf of its own node reaches it: both are in one process."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fastps.errors import Error
from fastps.network.home import Home
from fastps.network.leaf import Outgoing
from fastps.network.link import Memory
from fastps.network.messages import Header
from fastps.network.parts import Part


class NearHome:
    """The home of this node's leaf. Sums are written straight into the home's slots. `others` serve the other nodes."""

    def __init__(self, home: Home, others: Sequence[threading.Thread]) -> None:
        self._home = home
        self._lanes = home.attach(home.nodes.number)
        self._lanes.check_with(home.check)
        self._others = others

    def begin(self, weights: torch.Tensor) -> None:
        """Write the weights to begin with, once they have come. Raises NodeLostError."""
        self._home.await_first(self.check)
        self._copy_weights(self._lanes.pulled(), weights)

    def coming(self) -> tuple[int, int]:
        """See Upstream."""
        return self._lanes.cut.span(self._lanes.session.step + 1)

    def step(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int]:
        """See Upstream."""
        step = self._lanes.session.step + 1
        try:
            if sent is not None:
                self._push(step, header, sent)
            else:
                self._lanes.push_nothing(step)
            self._copy_weights(self._lanes.granted(step), after)
        except Error as error:
            raise self._home.loss_of(error) from error
        return self._lanes.cut.span(step)

    def _push(self, step: int, header: Header, sent: Outgoing) -> None:
        slots = [(part, torch.from_numpy(slot.view(np.float32))) for part, slot in self._lanes.slots(step)]
        terms, chunks = sent.begin([slot for _, slot in slots], self._lanes.cut.span(step)[0])
        for part, slot in slots:
            at = 0
            while at < len(slot):
                chunk, target = next(chunks), slot[at:]
                if chunk.data_ptr() != target.data_ptr():
                    target[: len(chunk)] = chunk
                at += len(chunk)
            self._lanes.push(part, terms, header)

    def finish(self, after: torch.Tensor) -> None:
        """See Upstream."""
        try:
            self._copy_weights(self._lanes.last(), after)
        except Error as error:
            raise self._home.loss_of(error) from error

    @staticmethod
    def _copy_weights(granted: Iterator[tuple[Part, list[Memory]]], weights: torch.Tensor) -> None:
        for part, memories in granted:
            at = part.first
            for memory in memories:
                held = torch.from_numpy(memory.view(np.float32))
                weights[at : at + len(held)] = held
                at += len(held)

    def check(self) -> None:
        """See Upstream."""
        try:
            self._home.check()
            self._lanes.check_peers()
        except Error as error:
            raise self._home.loss_of(error) from error

    def abort(self, failure: str) -> None:
        """See Upstream."""
        self._home.failure = self._home.failure or failure

    def leave(self, failure: str | None) -> None:
        """See Upstream. Waits until the other nodes have left or are lost, because the weights are here."""
        self._home.is_closing.set()
        self._lanes.close(failure)
        for thread in self._others:
            thread.join()
        self._home.close()
