"""A simulated world: several workers in one thread that run the real lanes, shard locks and shared folds on a real arena.

One seed gives one history: it decides which worker runs when, which one is stopped or killed, and what each clock says. This
file makes a job, plays it, and reports its outcome.
"""

import mmap
import os

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

from fastps.kernels.chaos.workers import Workers
from fastps.kernels.shm.format import format_memory
from fastps.kernels.shm.plan import plan

from fastps.kernels.chaos.invariants cimport CARRIED_BYTES, MAX_WORKERS, RING_SIZE, ROW_FLOATS, SHARD_FLOATS, InvariantChecker
from fastps.kernels.chaos.machine cimport Machine, fps_mapping, fps_mapping_close, fps_mapping_open
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.update.fold cimport FPS_RULE_ADAGRAD, FPS_RULE_SGD
from fastps.kernels.rows.rows_h cimport FPS_ROWS_ADAGRAD, FPS_ROWS_SGD


cdef class World:
    """Runs one simulated job after the other; keeps the arena's memory in between, and each worker's private view of it."""

    cdef object memory
    cdef fps_mapping *views[MAX_WORKERS]

    def __cinit__(self):
        self.memory = b""

    def __dealloc__(self):
        self._unmap()

    cdef void _unmap(self) noexcept:
        cdef int32_t index
        for index in range(MAX_WORKERS if len(self.memory) else 0):
            fps_mapping_close(self.views[index])

    cdef int _map(self, int64_t size) except -1:
        """Make memory of this size, and a view of it for each worker."""
        cdef int32_t index
        self._unmap()
        descriptor = os.memfd_create("chaos")
        os.truncate(descriptor, size)
        for index in range(MAX_WORKERS):
            self.views[index] = fps_mapping_open(descriptor, size, 0, 1)
        self.memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        return 0

    def run(self, uint64_t seed, *, int workers, int steps, int shards, int slots, bint adagrad, bint is_sum, bint is_mean,
            bint may_drop, int64_t bound, bint partial, bint at_once, int shared_least, double skew_ns, dict policy not None,
            bint reads=False, bint tables=False, bint server=False, bint fetches=False, **settings):
        """Play one seed; returns what happened as a dict.

        Args:
            workers, steps, shards, slots: measures; `adagrad`: a rule with state, else SGD.
            is_sum, is_mean, may_drop, bound: what the invariant checker must know of the policy, whose values are `policy`.
            shared_least: the shortest fold that is shared, in floats moved. skew_ns: how wrong clocks are at most.
            tables: each shard has a table, of which every push has rows.
            server: one more process combines for the workers, until it dies. reads: each worker is a reader, too, that comes
            and goes, and gives back what those brought that have gone; each push brings a value for its version to carry.
            partial, at_once, fetches, settings: as Workers says.
        """
        arena = self._make(workers, shards, slots, adagrad, policy, reads, tables, server, fetches)
        if server:
            arena.serve(1)
        checker = InvariantChecker(arena, workers, steps, is_sum=is_sum, is_mean=is_mean, may_drop=may_drop, bound=bound)
        job = Workers(arena, checker, seed, steps=steps, partial=partial, at_once=at_once, fetches=fetches,
                      reads_rows=tables and bound == 0 and not may_drop and not partial and not at_once, **settings)
        (<Machine> job).views = self.views
        job.play(skew_ns, shared_least)
        job.end()
        return {**job.outcome(), **checker.outcome()}

    def _make(self, int workers, int shards, int slots, bint adagrad, dict policy, bint reads, bint tables, bint server,
              bint fetches):
        """A fresh arena in the same memory."""
        described = [(SHARD_FLOATS + 1, ROW_FLOATS, shards + shard, 0, shard) for shard in range(shards if tables else 0)]
        header, size, _ = plan(
            lanes=workers, slots=slots, ring_size=RING_SIZE, groups=1, parameters=shards + len(described),
            buffer_floats=shards * SHARD_FLOATS, rule=FPS_RULE_ADAGRAD if adagrad else FPS_RULE_SGD,
            state_planes=1 if adagrad else 0, extra_bytes=0,
            buffers=workers * (3 if fetches else 1) + 2, shards=shards, readers=workers if reads else 0, tables=described,
            servers=server, carried_bytes=CARRIED_BYTES if reads else 0,
            row_rule=FPS_ROWS_ADAGRAD if adagrad else FPS_ROWS_SGD)
        if size > len(self.memory):
            self._map(2 * size)
        cdef unsigned char[::1] view = self.memory
        memset(&view[0], 0, size)
        segments = [(SHARD_FLOATS * i, SHARD_FLOATS, 0) for i in range(shards)]
        segments += [(SHARD_FLOATS * i, 0, 0) for i in range(len(described))]
        format_memory(self.memory, header, segments,
                      shards=[(SHARD_FLOATS * i, SHARD_FLOATS * (i + 1)) for i in range(shards)], **policy)
        return Arena(self.memory)
