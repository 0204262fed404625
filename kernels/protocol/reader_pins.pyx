"""The pins of a process that only reads weights: it has no lane, no scheduler knows it, and no fold waits for it.

Each reader brings a weights buffer of its own into the job. It pins one buffer of a shard at a time, so however long it holds
that pin, the workers have as many buffers as without it.
"""

from libc.stdint cimport uint32_t, uint64_t

from fastps.kernels.base.atomics cimport fps_pin_exchange, fps_readers_load, fps_readers_raise
from fastps.kernels.protocol.pins cimport pin_published
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport fps_commit_buffer, fps_commit_version


cdef class ReaderPins:
    """The pins of reader `index` of `arena`, whose memory is writable. The caller owns the reader's socket name.

    Raises IndexError for a reader that the arena has no place for.
    """

    def __cinit__(self, Arena arena not None, uint32_t index):
        if index >= arena.header.n_readers:
            raise IndexError(f"expected a reader below {arena.header.n_readers}, found {index}")
        self.arena = arena
        self.index = index

    def begin(self):
        """Drop the pins that the place's last owner left, and let this reader's pins and buffer count from now on.

        The caller has allocated the pages of the buffers of all readers up to this one.
        """
        with nogil:
            self._begin()

    cdef void _begin(self) noexcept nogil:
        cdef uint64_t *ready = &self.arena.readers_words().ready
        cdef uint64_t seen = fps_readers_load(ready)
        cdef uint32_t shard
        for shard in range(self.arena.header.n_shards):
            fps_pin_exchange(&self.arena.reader_shard(self.index, shard).pin, 0)
        while seen <= self.index and not fps_readers_raise(ready, seen, self.index + 1):
            seen = fps_readers_load(ready)

    def pull_all(self, list buffers not None):
        """Pin the published weights of every shard, and write their buffers into the list. Copies nothing.

        The buffers pinned before are given back. Returns the first shard whose commit word is damaged, or -1.
        """
        cdef uint32_t shard
        cdef uint64_t commit
        if <uint64_t> len(buffers) != self.arena.header.n_shards:
            raise ValueError(f"expected a list of {self.arena.header.n_shards} buffers, found {len(buffers)}")
        for shard in range(self.arena.header.n_shards):
            with nogil:
                commit = self._pull(shard)
            if not self.arena.has_buffer(fps_commit_buffer(commit)):
                return shard
            buffers[shard] = fps_commit_buffer(commit)
        return -1

    cdef uint64_t _pull(self, uint32_t shard) noexcept nogil:
        cdef uint64_t commit = pin_published(
            &self.arena.shard_header(shard).commit, &self.arena.reader_shard(self.index, shard).pin)
        self.versions[shard] = fps_commit_version(commit)
        return commit

    def shard_version(self, uint32_t shard=0):
        """The version of a shard's last pull."""
        self.arena._check_shard(shard)
        return self.versions[shard]

    def unpin(self):
        """End the reads of all pulled buffers."""
        cdef uint32_t shard
        for shard in range(self.arena.header.n_shards):
            fps_pin_exchange(&self.arena.reader_shard(self.index, shard).pin, 0)
