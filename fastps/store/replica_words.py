"""Words by which the workers of a replica and its agent tell each other what no push says, at the start of the lanes' rooms.

A writer holds the shard lock, or is the only one to write a word that is read again and again until it has changed.
"""

import numpy as np
import numpy.typing as npt

from fastps.job.nodes import REPLICA_ROOM_BYTES
from fastps.membership.job_memory import JobMemory

_PUBLICATIONS, _HAVE_STARTED = 4, 6  # behind the words of a lane's model buffers


class ReplicaWords:
    """The words of all lanes of a replica's arena."""

    def __init__(self, store: JobMemory) -> None:
        self._lanes = [_words(store, lane) for lane in range(store.layout.lanes)]

    def count_publication(self, lane: int) -> None:
        """Say that the lane's worker publishes weights or state that it has written, whose shard lock it holds."""
        self._lanes[lane][_PUBLICATIONS] += 1

    def publications(self) -> tuple[int, ...]:
        """How often each lane's worker has published."""
        return tuple(int(words[_PUBLICATIONS]) for words in self._lanes)

    @property
    def have_started(self) -> bool:
        """Whether the workers of all nodes have attached."""
        return bool(self._lanes[0][_HAVE_STARTED])

    def set_started(self) -> None:
        """Say so. Only the agent calls this."""
        self._lanes[0][_HAVE_STARTED] = 1


class PublishedState:
    """What the workers have published since the agent gave it to the other nodes."""

    def __init__(self, store: JobMemory) -> None:
        self._words = ReplicaWords(store)
        self._given = self._seen = self._words.publications()

    def is_new(self) -> bool:
        """Whether there is something to give, as of this call."""
        self._seen = self._words.publications()
        return self._seen != self._given

    def take(self) -> None:
        """The other nodes have what there was at the last `is_new`."""
        self._given = self._seen


def _words(store: JobMemory, lane: int) -> npt.NDArray[np.int64]:
    return store.extra_view(lane)[:REPLICA_ROOM_BYTES].view(np.int64)
