"""Injected delays: a share of a pull's responses comes late, as in section 4.2 of the PSP-SGD paper. Honest waits, no pretence.

Which responses are late is drawn by a seed, one draw a step and shard. Refuses to know why a worker pulls.
"""

import random

from fastps.system.clock import Clock


class LateResponses:
    """The shards whose response to the current step's pull has not come yet, and when it will.

    Attributes:
        late: shard to the time, in ns, at which its response comes.
    """

    def __init__(self, share: float, delay_ns: int, seed: int, clock: Clock, shards: int = 0) -> None:
        self._share = share
        self._delay_ns = delay_ns
        self._random = random.Random(seed)
        self._clock = clock
        self._shards = shards
        self.late: dict[int, int] = {}

    def draw(self, step: int) -> None:
        """A new step asks all shards: decide which of them will answer late. An answer to an older step is of no use."""
        if not self._share:
            return
        now_ns = self._clock.now_ns()
        self.late = {shard: now_ns + self._delay_ns for shard in range(self._shards) if self._random.random() < self._share}

    def arrive(self) -> None:
        """Forget the delays that are over."""
        now_ns = self._clock.now_ns()
        self.late = {shard: comes_ns for shard, comes_ns in self.late.items() if comes_ns > now_ns}

    def sleep(self, longest_ns: int) -> None:
        """Wait until the next late response comes, but not longer than that."""
        if self.late:
            left_ns = min(self.late.values()) - self._clock.now_ns()
            self._clock.sleep_ns(max(0, min(left_ns, longest_ns)))
