# The scheduler's plain C structs and nogil functions, for the store (turn.pyx) and the simulator (events.pyx).
# State is one block of memory without pointers, so that it can lie in the arena twice and be copied.

from libc.stdint cimport int32_t, int64_t

cdef enum:
    FOLD_EACH = 0       # every push is folded when it is received
    FOLD_ALL = 1        # the pushes of all live workers are folded together

    GRANT_AT_ONCE = 0       # go on after every push
    GRANT_NEXT_VERSION = 1  # go on when this version's fold is committed
    GRANT_BOUNDED = 2       # go on while not more than a bound ahead of the slowest

    RELEASE_PRINTED = 0     # a waiting worker goes on when it is within the lower bound again
    RELEASE_NEXT_PUSH = 1   # a waiting worker goes on at the slowest worker's next push

    ACTION_KEEP = 0      # the push waits for others
    ACTION_FOLD = 1      # fold this push
    ACTION_FOLD_ALL = 2  # fold every push kept so far
    ACTION_NONE = 3      # nothing to fold

# The policy's values, as numbers.
cdef struct policy_t:
    int32_t fold
    int32_t grant
    int32_t release
    int32_t hard_bound
    int64_t low
    int64_t high

cdef struct worker_t:
    int64_t clock           # pushes received (t_p of DSSP's Algorithm 1)
    int64_t granted         # steps it may have begun
    int64_t push_ns[2]      # latest and second latest push (table A of Algorithm 2)
    int64_t credit          # extra steps left (r_p of Algorithm 1)
    int64_t consumed        # descriptors of its lane that the scheduler has seen
    int64_t cursor          # descriptors of its lane that are done with
    int64_t folded
    int64_t dropped
    int64_t staleness_sum
    int64_t staleness_max
    int64_t touched_at      # commit in which this struct last changed
    int64_t granted_at      # commit in which it was last granted
    int32_t history         # pushes that push_ns holds: 0, 1 or 2
    int32_t live
    int32_t waiting
    int32_t bucket          # the bucket of its clock
    int32_t next            # the bucket's workers in order of arrival
    int32_t previous
    int32_t next_waiting
    int32_t previous_waiting

# All workers of one clock. Buckets form a list in order of their clocks, so that the slowest and the fastest are at its ends.
cdef struct bucket_t:
    int64_t clock
    int64_t touched_at
    int32_t first
    int32_t last
    int32_t next
    int32_t previous

cdef struct scheduler_t:
    policy_t policy
    int64_t version         # folds so far, counted as the policy counts them
    int64_t now_ns          # time of the last event
    int64_t sequence        # commits so far: marks what changed in this one
    int32_t n_workers
    int32_t n_live
    int32_t n_arrived       # live workers that wait for this version's fold
    int32_t n_kept          # pushes kept for it, of workers that left since, too
    int32_t first_bucket
    int32_t last_bucket
    int32_t free_bucket
    int32_t first_waiting
    int32_t last_waiting
    int32_t n_touched_workers
    int32_t n_touched_buckets

cdef int64_t scheduler_bytes(int64_t n_workers) noexcept nogil
cdef void scheduler_initialise(scheduler_t *state, int32_t n_workers, const policy_t *policy) noexcept nogil
cdef void scheduler_copy(scheduler_t *target, const scheduler_t *source) noexcept nogil
cdef void scheduler_catch_up(scheduler_t *target, const scheduler_t *source) noexcept nogil
cdef void scheduler_begin(scheduler_t *state) noexcept nogil

cdef worker_t *scheduler_workers(const scheduler_t *state) noexcept nogil
cdef int32_t *scheduler_touched_workers(const scheduler_t *state) noexcept nogil
cdef void scheduler_touch(scheduler_t *state, int32_t worker) noexcept nogil

cdef int scheduler_push(scheduler_t *state, int32_t worker, int64_t now_ns) noexcept nogil
cdef int scheduler_leave(scheduler_t *state, int32_t worker, int64_t now_ns) noexcept nogil
cdef int32_t scheduler_slowest(const scheduler_t *state) noexcept nogil
cdef int policy_from_values(
    policy_t *policy, str fold, str grant, int64_t low, int64_t high, str release, bint hard_bound) except -1
