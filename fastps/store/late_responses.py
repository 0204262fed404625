"""Injected delays: a share of a pull's responses arrives late, as in section 4.2 of the PSP-SGD paper. The waits are real.

A seeded generator draws the late responses, with one draw per step and shard.
"""

import random

from fastps.system.clock import Clock


class LateResponses:
    """The shards whose response to the pull of the current step is delayed.

    Attributes:
        late: shard to the time, in ns, at which its response arrives.
    """

    def __init__(self, share: float, delay_ns: int, seed: int, clock: Clock, shards: int = 0) -> None:
        self._share = share
        self._delay_ns = delay_ns
        self._random = random.Random(seed)
        self._clock = clock
        self._shards = shards
        self.late: dict[int, int] = {}

    def draw(self, step: int) -> None:
        """Draw the late shards of a new step. Delayed responses of the step before are discarded."""
        if not self._share:
            return
        now_ns = self._clock.now_ns()
        self.late = {shard: now_ns + self._delay_ns for shard in range(self._shards) if self._random.random() < self._share}

    def arrive(self) -> None:
        """Remove the shards whose delay is over."""
        now_ns = self._clock.now_ns()
        self.late = {shard: comes_ns for shard, comes_ns in self.late.items() if comes_ns > now_ns}

    def sleep(self, longest_ns: int) -> None:
        """Sleep until the next late response arrives, but at most `longest_ns`."""
        if self.late:
            left_ns = min(self.late.values()) - self._clock.now_ns()
            self._clock.sleep_ns(max(0, min(left_ns, longest_ns)))
