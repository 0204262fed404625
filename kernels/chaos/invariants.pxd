# The invariant checker of a simulated job.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.scheduling.state cimport scheduler_t

cdef enum:
    MAX_WORKERS = 8
    MAX_STEPS = 32
    RING_SIZE = 8           # descriptors of a lane
    MAX_WATCHED_SHARDS = 2
    REMEMBERED = 64         # versions whose weights are kept for readers; a power of two
    SHARD_FLOATS = 256      # MAX_WORKERS * MAX_STEPS
    CARRIED_BYTES = 192     # of a version: a line of marks, and two of values
    MAX_VERSIONS = 1024     # whose carried value is remembered
    ROW_FLOATS = 2          # of a table's rows: one for each worker and step, then one that every push has

# What is known of one shard.
cdef struct watched_t:
    uint64_t commit
    uint64_t lock                       # when the rows were compared last
    uint64_t record_state               # the state buffer of the last commit
    int64_t cursor[MAX_WORKERS]
    int64_t granted[MAX_WORKERS]
    int32_t generation[MAX_WORKERS]
    int64_t head[MAX_WORKERS]
    int64_t told_granted[MAX_WORKERS]
    int64_t folded[MAX_WORKERS]                   # pushes, null pushes among them
    int64_t nulls[MAX_WORKERS]
    int64_t dropped[MAX_WORKERS]
    int64_t rule_steps
    char is_folded[MAX_WORKERS][MAX_STEPS]
    float state[SHARD_FLOATS]                    # the rule's plane
    float weights[REMEMBERED][SHARD_FLOATS]              # by version

cdef class InvariantChecker:
    cdef Arena arena
    cdef int32_t n_workers, n_shards
    cdef bint is_sum, is_mean, may_drop, has_state, has_tables
    cdef int64_t bound                  # of clocks at a grant, or -1
    cdef int64_t flips
    cdef watched_t *shards
    cdef char kinds[MAX_WORKERS][MAX_STEPS]
    cdef int64_t posted[MAX_WORKERS]              # descriptors, as their workers know
    cdef int64_t promised[MAX_WORKERS]            # descriptors that were posted before the worker last tried to combine
    cdef int64_t called[MAX_WORKERS]              # descriptors that the present owner has called the server for
    cdef int64_t starts[MAX_WORKERS]              # of the present owner, where an earlier one's words were damaged
    cdef char owners[MAX_WORKERS][MAX_STEPS]      # the generation that posted a descriptor, + 1; 0: none has
    # Of each lane one bit a generation.
    cdef uint32_t wounded[MAX_WORKERS]            # whose words were damaged: what it posted may be dropped
    cdef uint32_t miscounted[MAX_WORKERS]         # whose count of posts was damaged: of what it posted nothing may be counted
    cdef int64_t wounds
    cdef uint64_t carried[MAX_VERSIONS]           # of the last shard, by version: the value that a reader found, or 0
    cdef char message[512]

    cdef void look(self, int32_t runs) noexcept nogil
    cdef void own(self, int32_t index, uint64_t posted) noexcept nogil
    cdef void promise(self, int32_t index, uint64_t position, uint32_t kind) noexcept nogil
    cdef void wound(self, int32_t index, uint64_t first, uint64_t end, bint is_count) noexcept nogil
    cdef bint is_wounded(self, int32_t index, uint32_t generation) noexcept nogil
    cdef bint is_content(self, uint32_t shard, uint64_t version, uint64_t buffer) noexcept nogil
    cdef void watch_rows(self, uint32_t shard, uint64_t buffer, const char *what) noexcept nogil
    cdef void watch_calls(self) noexcept nogil
    cdef void write_slot(self, int32_t index, uint32_t number, int64_t position, uint64_t step) noexcept nogil
    cdef void _bring(self, int32_t index, uint32_t number, uint64_t value, uint64_t step) noexcept nogil
    cdef bint is_carried(self, uint64_t version, uint64_t buffer) noexcept nogil
    cdef void _write_rows(self, int32_t index, uint32_t number, int64_t position) noexcept nogil
    cdef void end(self, uint32_t dead, uint32_t unnoticed) noexcept nogil
    cdef void fail(self, const char *what, int64_t a, int64_t b, int64_t c) noexcept nogil

    cdef uint32_t _generation(self, int32_t index) noexcept nogil
    cdef void _watch_left(self, uint32_t shard, const int64_t *told, const char *what) noexcept nogil
    cdef void _watch_row(self, const char *what, int64_t shard, int64_t row, const float *rows, double expected) noexcept nogil
    cdef float *_range(self, uint32_t shard, uint64_t buffer) noexcept nogil
    cdef void _watch_lane_shards(self, uint32_t shard, const scheduler_t *state) noexcept nogil
    cdef void _watch_flip(self, uint32_t shard, uint64_t commit, int32_t runs) noexcept nogil
    cdef void _watch_cursors(self, uint32_t shard, const scheduler_t *state, int64_t *passed) noexcept nogil
    cdef int64_t _watch_weights(self, uint32_t shard, const scheduler_t *state, uint64_t before, uint64_t after) noexcept nogil
    cdef void _watch_state(self, uint32_t shard, uint64_t record, int64_t n, double gradient) noexcept nogil
    cdef void _check_end(self, uint32_t shard, int32_t index, const scheduler_t *state, bint lives) noexcept nogil
    cdef void _watch_grants(self, uint32_t shard, const scheduler_t *state) noexcept nogil
