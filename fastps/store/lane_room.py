"""The room that each lane has beside its slots: words, and a model's buffers. A replica's has those of other nodes, too.

A room is one slot of buffers, or in a replica several, all of one size. The first is that of the lane's worker. A slot begins
with a line of words. A writer holds the shard lock, or is the only one to write a word that others read until it has changed.
"""

import numpy as np
import numpy.typing as npt

from fastps.job.limits import ROOM_HEADER_BYTES
from fastps.kernels.shm.arena import LANE_JOINING, LANE_LIVE
from fastps.membership.job_memory import JobMemory
from fastps.membership.peers import WORKER_LOST

Slot = npt.NDArray[np.uint8]

# 1 once a worker has published into the slot; the round in which it did; the last round that it read; the bytes of the names
# and shapes; all bytes that it published, the words included; and the slot's place in the order of all nodes' workers.
VALID, PUBLISHED, READ, LENGTH, USED, ORDER = 0, 1, 2, 3, 4, 5
# How often the lane's worker has published weights or state; and in lane 0 whether the workers of all nodes have attached, and
# the last round of which the slots of the other nodes have come; and the parts of the lane's push that were marked too early.
_PUBLICATIONS, _HAVE_STARTED, _GATHERED, _STALE = 8, 9, 10, 11
STALE_SCALED, STALE_NULL, STALE_WRITTEN, STALE_OTHERS = 1 << 56, 1 << 57, 1 << 58, 1 << 59
"""Why parts of a push that are summed already count in another form: beside a bit for each such part."""
FINAL = 1 << 40
"""The round in which the slots come that the workers of all nodes have left with."""


def words_of(slot: Slot) -> npt.NDArray[np.int64]:
    """The words of a slot."""
    return slot[:ROOM_HEADER_BYTES].view(np.int64)


class LaneRooms:
    """The rooms of all lanes of an arena, with slots of `slot_bytes`."""

    def __init__(self, store: JobMemory, slot_bytes: int) -> None:
        self._arena = store.arena
        rooms = [store.extra_view(lane) for lane in range(store.layout.lanes)]
        size = max(slot_bytes, ROOM_HEADER_BYTES)
        self.own = [room[:size] for room in rooms]
        """The slot of each lane's worker."""
        self.others = [room[at : at + size] for room in rooms for at in range(size, len(room) - size + 1, size) if slot_bytes]
        """The slots for workers of other nodes; none without buffers."""
        self._words = [words_of(slot) for slot in self.own]

    def count_publication(self, lane: int) -> None:
        """Say that the lane's worker publishes weights or state that it has written, and holds the shard lock."""
        self._words[lane][_PUBLICATIONS] += 1

    def publications(self) -> tuple[int, ...]:
        """How often each lane's worker has published."""
        return tuple(int(words[_PUBLICATIONS]) for words in self._words)

    @property
    def have_started(self) -> bool:
        """Whether the workers of all nodes have attached. Only the agent sets it."""
        return bool(self._words[0][_HAVE_STARTED])

    @have_started.setter
    def have_started(self, value: bool) -> None:
        self._words[0][_HAVE_STARTED] = value

    @property
    def gathered(self) -> int:
        """The last round of which the slots of the other nodes have come. Only the agent sets it."""
        return int(self._words[0][_GATHERED])

    @gathered.setter
    def gathered(self, value: int) -> None:
        self._words[0][_GATHERED] = value

    def set_stale(self, lane: int, stale: int) -> None:
        """Say of the lane's next push which of its marked parts it has in another form. The post publishes it."""
        self._words[lane][_STALE] = stale

    def stale(self, lane: int) -> int:
        """What the lane's worker has said of its last push."""
        return int(self._words[lane][_STALE])

    def due(self) -> int:
        """The round for which all live workers have published, if the slots of the other nodes have not come; else 0."""
        states = self._arena.lane_states()[: len(self._words)]
        rounds = [
            int(words[PUBLISHED])
            for words, state in zip(self._words, states, strict=True)
            if state in (LANE_LIVE, LANE_JOINING)
        ]
        return min(rounds) if rounds and min(rounds) > self.gathered else 0

    def kept(self) -> list[Slot]:
        """The slots in which workers have published that are not lost."""
        states = self._arena.lane_states()
        return [slot for lane, slot in enumerate(self.own) if words_of(slot)[VALID] and states[lane] not in WORKER_LOST]


class PublishedState:
    """What the workers have published since the agent gave it to the other nodes."""

    def __init__(self, rooms: LaneRooms) -> None:
        self._rooms = rooms
        self._given = self._seen = rooms.publications()

    def is_new(self) -> bool:
        """Whether there is something to give, as of this call."""
        self._seen = self._rooms.publications()
        return self._seen != self._given

    def take(self) -> None:
        """The other nodes have what there was at the last `is_new`."""
        self._given = self._seen
