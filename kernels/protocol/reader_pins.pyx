"""A process that only reads weights: its pins, and its sleep. It has no lane, no scheduler knows it, and no fold waits for it.

Each reader brings a weights buffer of its own into the job. It pins one buffer of a shard at a time, so however long it holds
that pin, the workers have as many buffers as without it.
"""

cimport cython

from fastps.kernels.base.atomics cimport *
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_commit_version


@cython.final
cdef class ReaderPins(Pins):
    """The pins of reader `index` of `arena`, whose memory is writable. The caller owns the reader's socket name.

    Raises IndexError for a reader that the arena has no place for.
    """

    def __cinit__(self, Arena arena not None, uint32_t index):
        cdef uint32_t shard
        if index >= arena.header.n_readers:
            raise IndexError(f"expected a reader below {arena.header.n_readers}, found {index}")
        for shard in range(self.n_shards):
            self.pins[shard] = &arena.reader_shard(index, shard).pin

    cpdef void begin(self) noexcept nogil:
        """Drop the pins that the place's last owner left, and let this reader's pins and buffer count from now on.

        The caller has allocated the pages of the buffers of all readers up to this one.
        """
        cdef uint64_t *ready = &self.arena.readers_words().ready
        cdef uint64_t seen = fps_readers_load(ready)
        self.unpin()
        while seen <= self.index and not fps_readers_raise(ready, seen, self.index + 1):
            seen = fps_readers_load(ready)

    cpdef void unpin(self) noexcept nogil:
        """End the reads of all pulled buffers."""
        cdef uint32_t shard
        for shard in range(self.n_shards):
            fps_pin_exchange(self.pins[shard], 0)

    def ask_to_stop(self):
        """Ask the training to stop: its script may look at that, and nothing else follows."""
        fps_counter_set(&self.arena.readers_words().stop, 1)

    def holds(self, list buffers not None):
        """Whether this reader, as it is in shared memory, still pins these buffers, one a shard: a forked child asks."""
        cdef uint32_t shard
        for shard in range(self.n_shards):
            if fps_pin_load(self.pins[shard]) != <uint64_t> buffers[shard] + 1:
                return False
        return True

    # -- sleeping ----------------------------------------------------------------------------------

    def wait(self, uint64_t version, int64_t slice_ns):
        """Sleep until every shard has `version`. Releases the GIL.

        False if `slice_ns` ended before, if a signal came, or if another reader's version woke all: call again. A combiner that
        commits the version wakes all readers that sleep. One that is killed after its commit wakes nobody, and the slice ends
        the sleep.
        """
        cdef bint reached
        with nogil:
            reached = self._wait(version, slice_ns)
        return reached

    cdef bint _wait(self, uint64_t version, int64_t slice_ns) noexcept nogil:
        cdef uint32_t event
        if self._newest() >= version or self._is_there(version, &event):
            return True
        fps_event_sleep(&self.arena.readers_words().event, event, slice_ns)
        return self._newest() >= version

    cdef bint _is_there(self, uint64_t version, uint32_t *event) noexcept nogil:
        """Say that this reader is about to sleep for `version`. Returns whether it need not: the version is there.

        `event` is read first: the combiner that takes this wish moves it, so no reader sleeps with a wish that
        nobody knows. The version is read last: a combiner that has not seen the wish flipped before.
        """
        cdef bint is_there = fps_mutant(FPS_MUTANT_LOOK_FIRST) and self._newest() >= version
        event[0] = fps_event_load(&self.arena.readers_words().event)
        self._want(version)
        if fps_mutant(FPS_MUTANT_EVENT_LATE):
            event[0] = fps_event_load(&self.arena.readers_words().event)
        return is_there if fps_mutant(FPS_MUTANT_LOOK_FIRST) else self._newest() >= version

    cdef void _want(self, uint64_t version) noexcept nogil:
        """Lower the version that readers sleep for to this one, if it is higher."""
        cdef uint64_t *wanted = &self.arena.readers_words().wanted
        cdef uint64_t seen = fps_wanted_load(wanted)
        while not fps_wanted_lower(wanted, seen, version if seen == 0 else min(seen, version)):
            seen = fps_wanted_load(wanted)

    cdef uint64_t _newest(self) noexcept nogil:
        """The version that every shard has reached."""
        cdef uint64_t newest = fps_commit_version(fps_commit_load(&self.arena.shard_header(0).commit))
        cdef uint32_t shard
        for shard in range(1, self.n_shards):
            newest = min(newest, fps_commit_version(fps_commit_load(&self.arena.shard_header(shard).commit)))
        return newest
