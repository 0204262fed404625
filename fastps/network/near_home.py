"""The home as node 0's own leaf reaches it: both are in one process."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fastps.errors import Error
from fastps.kernels.protocol.fold_call import FoldedPush
from fastps.membership.job_memory import JobMemory
from fastps.network.home import Home
from fastps.network.link import Memory
from fastps.network.messages import Header
from fastps.network.parts import Part
from fastps.network.sums import Sums


class NearHome:
    """The home of node 0's leaf. Sums are written straight into the home's slots. `others` serve the other nodes."""

    def __init__(self, leaf: JobMemory, home: Home, others: Sequence[threading.Thread]) -> None:
        self._sums = Sums(leaf)
        self._home = home
        self._lanes = home.attach(0)
        self._others = others

    def step(self, header: Header, pushes: Sequence[FoldedPush], before: int, after: int) -> None:
        """See Upstream."""
        try:
            if pushes:
                self._push(header, pushes)
            else:
                self._lanes.push_nothing(self._lanes.session.step + 1)
            self._copy_weights(self._lanes.granted(self._lanes.session.step), after)
        except Error as error:
            raise self._home.loss_of(error) from error

    def _push(self, header: Header, pushes: Sequence[FoldedPush]) -> None:
        slots = [torch.from_numpy(slot.view(np.float32)) for slot in self._lanes.slots]
        terms, chunks = self._sums.begin(pushes, slots)
        for part, slot in enumerate(slots):
            at = 0
            while at < len(slot):
                chunk, target = next(chunks), slot[at:]
                if chunk.data_ptr() != target.data_ptr():
                    target[: len(chunk)] = chunk
                at += len(chunk)
            self._lanes.push(part, terms, header)

    def finish(self, after: int) -> None:
        """See Upstream."""
        try:
            self._copy_weights(self._lanes.last(), after)
        except Error as error:
            raise self._home.loss_of(error) from error

    def _copy_weights(self, granted: Iterator[tuple[Part, list[Memory]]], after: int) -> None:
        weights = self._sums.weights(after)
        for part, memories in granted:
            at = part.first
            for memory in memories:
                held = torch.from_numpy(memory.view(np.float32))
                weights[at : at + len(held)] = held
                at += len(held)

    def check(self) -> None:
        """See Upstream."""
        try:
            self._lanes.look_around()
        except Error as error:
            raise self._home.loss_of(error) from error

    def leave(self, failure: str | None) -> None:
        """See Upstream. Waits until the other nodes have left or are lost, because the weights are here."""
        self._home.is_closing.set()
        self._lanes.close(failure)
        for thread in self._others:
            thread.join()
        self._home.close()
