"""Several homes as one upstream: with homes="spread" each node has a share of the weights and of the optimizer's state.

A step goes to all homes at once, each in a thread of its own. Every home decides by itself; under the disciplines that are
allowed, all homes fold the pushes of all nodes into every version.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch

from fastps.network.far_home import FarHome
from fastps.network.home import NearHome
from fastps.network.messages import Header
from fastps.network.parts import Part
from fastps.network.sums import Outgoing, Terms

_LOOK_S = 0.2


def share_of(sent: Outgoing, share: Part) -> Outgoing:
    """The range of an outgoing sum that one home gets."""

    def begin(outs: Sequence[torch.Tensor], first: int) -> tuple[Terms, Iterator[torch.Tensor]]:
        terms, chunks = sent(outs, share.first + first)
        return Terms(terms.hypers, terms.present[share.parameters.start : share.parameters.stop]), chunks

    return begin


class SpreadHomes:
    """The homes of all shares, in the order of `shares`, their ranges.

    `give_up_s`: how long a thread that waits for a lost link may take to end.
    """

    def __init__(self, shares: Sequence[Part], homes: Sequence[FarHome | NearHome], give_up_s: float) -> None:
        self._shares, self._homes = shares, homes
        self._give_up_s = give_up_s
        self._threads = ThreadPoolExecutor(len(homes), "fastps-home")
        self._under_way: list[Future[None]] = []

    def begin(self, weights: torch.Tensor) -> None:
        """Write the weights to begin with. Raises NodeLostError."""
        self._all(lambda share, home: home.begin(weights[share.first : share.last]))

    @property
    def lanes_taken(self) -> int:
        return sum(home.lanes_taken for home in self._homes)

    @property
    def losses(self) -> int:
        return sum(home.losses for home in self._homes)

    def coming(self) -> tuple[int, int]:
        return 0, self._shares[-1].last

    def step(self, header: Header, sent: Outgoing | None, before: torch.Tensor, after: torch.Tensor) -> tuple[int, int]:

        def one(share: Part, home: FarHome | NearHome) -> None:
            floats = slice(share.first, share.last)
            home.step(header, share_of(sent, share) if sent is not None else None, before[floats], after[floats])

        self._all(one)
        return self.coming()

    def finish(self, after: torch.Tensor) -> None:
        self._all(lambda share, home: home.finish(after[share.first : share.last]))

    def _all(self, call: Callable[[Part, FarHome | NearHome], None]) -> None:
        """Call for all homes at once. The first error is raised at once; `leave` then ends the other calls."""
        self._under_way = [
            self._threads.submit(call, share, home) for share, home in zip(self._shares, self._homes, strict=True)
        ]
        waiting: set[Future[None]] = set(self._under_way)
        while waiting:
            done, waiting = wait(waiting, _LOOK_S, FIRST_EXCEPTION)
            for future in done:
                future.result()
            for home in self._homes:
                if isinstance(home, NearHome):
                    home.check()

    def check(self) -> None:
        """See Upstream. Several lost edges are opened again at once, because a home waits only a short time for that."""
        self._all(lambda share, home: home.check() if isinstance(home, FarHome) else None)

    def abort(self, failure: str) -> None:
        for home in self._homes:
            home.abort(failure)

    def leave(self, failure: str | None) -> None:
        for home in self._homes:
            if isinstance(home, FarHome):
                home.leave(failure)
            elif failure:
                home.abort(failure)
        wait(self._under_way, self._give_up_s)
        self._threads.shutdown(wait=False)
        for home in self._homes:
            if isinstance(home, NearHome):
                home.leave(failure)
