"""Pins: a process pins the published buffers of all shards, so that no fold writes into what it reads.

A pull copies nothing.
"""

from fastps.kernels.base.atomics cimport fps_commit_load, fps_pin_exchange
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.shm.arena_h cimport fps_commit_buffer, fps_commit_version


cdef uint64_t pin_published(const uint64_t *published, uint64_t *pin) noexcept nogil:
    """Pin what is published; returns the commit word. A combiner that flips after the second load sees the pin."""
    cdef uint64_t commit
    while True:
        commit = fps_commit_load(published)
        fps_pin_exchange(pin, fps_commit_buffer(commit) + 1)
        if fps_commit_load(published) == commit or fps_mutant(FPS_MUTANT_FORGET_RECHECK):
            return commit


cdef class Pins:
    """A pin in each shard of `arena`, of lane or reader `index`."""

    def __cinit__(self, Arena arena not None, uint32_t index):
        self.arena = arena
        self.index = index
        self.n_shards = arena.header.n_shards

    def pull(self, uint32_t shard=0):
        """Pin a shard's published weights and return their buffer; `shard_version` then says which version. Copies nothing.

        Ends the read of the buffer before. Returns -1 if the commit word is damaged: it names a buffer that the arena has not.
        """
        self.arena._check_shard(shard)
        return self._buffer_of(self._pull(shard))

    def pull_all(self, list buffers not None):
        """Pull every shard, and write their buffers into the list. Returns the first whose commit word is damaged, or -1."""
        cdef uint32_t shard
        cdef int64_t buffer
        if <uint64_t> len(buffers) != self.n_shards:
            raise ValueError(f"expected a list of {self.n_shards} buffers, found {len(buffers)}")
        for shard in range(self.n_shards):
            buffer = self._buffer_of(self._pull(shard))
            if buffer < 0:
                return shard
            buffers[shard] = buffer
        return -1

    cdef int64_t _buffer_of(self, uint64_t commit) noexcept nogil:
        cdef uint64_t buffer = fps_commit_buffer(commit)
        return <int64_t> buffer if self.arena.has_buffer(buffer) else -1

    cdef uint64_t _pull(self, uint32_t shard) noexcept nogil:
        cdef uint64_t commit = pin_published(&self.arena.shard_header(shard).commit, self.pins[shard])
        self._reads(shard, fps_commit_version(commit))
        return commit

    cdef void _reads(self, uint32_t shard, uint64_t version) noexcept nogil:
        """The shard's version is read from now on."""
        self.versions[shard] = version

    def shard_version(self, uint32_t shard):
        """The version of a shard's last pull."""
        self.arena._check_shard(shard)
        return self.versions[shard]
