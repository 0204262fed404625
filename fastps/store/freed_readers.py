"""The buffers of readers that have gone, given back to the kernel.

A reader that comes brings a weights buffer into the job. Once it has closed or died, its place's name is free. A worker that
finds the last places free takes their names for a moment, so that no reader comes to them, and all shard locks, under which no
fold chooses a buffer: what nobody reads behind the last buffer in use then loses its pages.
"""

import contextlib
from collections.abc import Callable

from fastps.membership import rendezvous
from fastps.store.attached_lane import AttachedLane

_LOOK_NS = 1_000_000_000


class FreedReaders:
    """Looks for readers that have gone, at most once a second."""

    def __init__(self, worker: AttachedLane) -> None:
        self._worker, self._looked_ns = worker, 0

    def look(self, now_ns: int, freed: Callable[[int], None] = lambda buffer: None) -> None:
        """Give back what readers brought that have gone. `freed` is told each weights buffer that lost its pages."""
        if now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns, arena = now_ns, self._worker.store.arena
        ready = len(arena.buffers_with_pages()) - arena.buffers
        if not ready:
            return
        with contextlib.ExitStack() as names:
            left = ready
            while left and self._take(names, left - 1):
                left -= 1
            # A reader that is just coming has its name, and does not count yet.
            if left < ready and all(self._take(names, place) for place in range(ready, arena.readers)):
                with self._worker.locked_if_free() as is_locked:  # else next time: a reader that comes needs a name
                    if is_locked:
                        self._give_back(left, ready, freed)

    def _take(self, names: contextlib.ExitStack, place: int) -> bool:
        """Take the name of a reader's place, if no reader has it."""
        try:
            names.enter_context(contextlib.closing(rendezvous.ReaderName(self._worker.store.job, place)))
        except OSError:
            return False
        return True

    def _give_back(self, left: int, ready: int, freed: Callable[[int], None]) -> None:
        """Let the buffers of only the first `left` readers count, and those that are in use. All shard locks are held."""
        store = self._worker.store
        used = max(self._worker.lane.last_used(shard, left) for shard in range(store.arena.shards))
        kept = max(left, used + 1 - store.arena.buffers)
        if kept < ready:
            store.arena.lower_readers(kept)
            begin, length = store.arena.reader_weights_range(kept)
            store.memory.give_back(begin + length, store.arena.reader_weights_range(ready)[1] - length)
            for reader in range(kept, ready):
                freed(store.arena.buffers + reader)
