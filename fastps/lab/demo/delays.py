"""Injected delays: pushes and pulls that take as long as a network link would need, and responses that come late.

The papers measure communication, and a store in shared memory has none. The waits are real, and count as waited. A link carries
one transfer at a time, so workers that share a link wait for each other. Rudra-base has one link, the server's. Rudra-adv has
one per leaf, because the leaf sits beside its learners. Rudra-adv* has one per worker: weights come down a tree of learners.
"""

import fcntl
import random
from dataclasses import dataclass
from functools import partial

from fastps.store.attached_lane import AttachedLane
from fastps.store.combining import Combining, Push
from fastps.store.worker import Worker


@dataclass(frozen=True)
class Delays:
    """The delays of one worker.

    Attributes:
        transfer_ms: what each push and each pull takes on the worker's link.
        late_share: the share of a pull's responses that comes `late_s` later (PSP-SGD, section 4.2).
        seed: determines which responses are late.
    """

    transfer_ms: float = 0.0
    late_share: float = 0.0
    late_s: float = 0.0
    seed: int = 0


def delay(worker: Worker, delays: Delays) -> None:
    """Delay what an attached worker of a store in host memory pushes and pulls from now on."""
    assert type(worker.combining) is Combining, f"expected a worker in host memory, found {type(worker.combining).__name__}"
    worker.use(Delayed(worker, delays))


class Delayed(Combining):
    """The workers fold; what one pushes and pulls is delayed."""

    is_direct = False

    def __init__(self, worker: AttachedLane, delays: Delays) -> None:
        super().__init__(worker)
        self._delays = delays
        self._link = self._policy.link_of(worker.rank, worker.store.layout.workers)
        self.injected_transfer_ns = int(delays.transfer_ms * 1e6)
        self._random = random.Random(delays.seed + 7919 * worker.rank)
        # The shards whose response is delayed, with the time in ns at which it arrives: None before the shard has responded.
        self._late: dict[int, int | None] = {}

    def hand_on(self, later: AttachedLane) -> None:
        """The later worker has the same delays."""
        assert isinstance(later, Worker)
        delay(later, self._delays)

    # -- transfers -----------------------------------------------------------------------------------

    def _transfer(self) -> int:
        """Wait for the link, a lock on a byte of the arena's file, then for the transfer. Return the time of both together.

        The kernel releases the lock if the process dies.
        """
        if not self.injected_transfer_ns:
            return 0
        began_ns, descriptor = self._clock.now_ns(), self._worker.store.descriptor
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, self._link)
        try:
            self._clock.sleep_ns(self.injected_transfer_ns)
        finally:
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, self._link)
        return self._clock.now_ns() - began_ns

    def send(self, push: Push) -> bool:
        """A push waits for its transfer."""
        return super().send(push) or self.injected_transfer_ns > 0

    def pull(self, buffers: list[int]) -> None:
        """An unchanged version is not transferred (Rudra, section 3.2)."""
        is_new = self._background is None and self._worker.is_behind
        began_ns, self.pull_transfer_ns = self._clock.now_ns(), self._transfer() if is_new else 0
        if self.pull_transfer_ns:
            self._lane.granted_ns = self._clock.now_ns()
            self._lane.wait_ns += self._lane.granted_ns - began_ns
        super().pull(buffers)

    # -- late responses ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Draws which responses to the step's pull are late, and waits for responses, too."""
        if self._delays.late_share and self._lane.awaits:
            self._late = {shard: None for shard in range(self._shards) if self._random.random() < self._delays.late_share}
        if not self._late:
            return super().advance()
        self._lane.advance(self._clock.now_ns(), self._policy.at_once)
        self.advance_late()

    def _wait_for_step(self, granted: int, shards: int) -> int:
        if self._late:
            responded = partial(self._have_responded, granted, shards)
            self._worker.wait_until(responded, 1_000, self._worker.timeout_text, combines=True)
        return super()._wait_for_step(granted, shards)

    def _wait_for_more(self, granted: int) -> int:
        until_ns = self._clock.now_ns() + int(self._policy.pull_timeout * 1e9)
        if self._late:
            self._worker.wait_until(
                lambda: self._have_responded(granted, self._shards) or self._clock.now_ns() >= until_ns,
                1_000,
                self._worker.timeout_text,
                combines=True,
            )
            return self._clock.now_ns()
        return super()._wait_for_more(granted)

    def _have_responded(self, granted: int, shards: int) -> bool:
        """Whether enough of the shards that granted the step have responded. If not, sleep until the next late response."""
        if sum(self._is_fresh(shard, granted) for shard in range(self._shards)) >= shards:
            return True
        known = [comes_ns - self._clock.now_ns() for comes_ns in self._late.values() if comes_ns is not None]
        self._clock.sleep_ns(max(0, min([*known, 1_000_000])))  # a shard that has not responded yet is asked again
        return False

    def _is_fresh(self, shard: int, granted: int) -> bool:
        """Whether a shard has granted the step, and its response has arrived. The delay begins when a shard has responded."""
        now_ns = self._clock.now_ns()
        for late, comes_ns in list(self._late.items()):
            if comes_ns is None and super()._is_fresh(late, granted):
                self._late[late] = now_ns + int(self._delays.late_s * 1e9)
            elif comes_ns is not None and comes_ns <= now_ns:
                del self._late[late]
        return super()._is_fresh(shard, granted) and shard not in self._late
