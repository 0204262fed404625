# The scheduler's decisions, for the live store and the simulator.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.scheduling.state cimport scheduler_t

cdef enum:
    ACTION_KEEP = 0       # the push waits for others
    ACTION_FOLD = 1       # fold this push
    ACTION_FOLD_ALL = 2   # fold every push kept so far, together
    ACTION_FOLD_LIST = 3  # fold the oldest kept push of each worker of state_folds, one after the other
    ACTION_DROP = 4       # this push came too late
    ACTION_NONE = 5       # nothing to fold

cdef int scheduler_push(
    scheduler_t *state, int32_t worker, int64_t now_ns, int64_t timestamp, int64_t samples) noexcept nogil
cdef int scheduler_close(scheduler_t *state) noexcept nogil
cdef int scheduler_leave(scheduler_t *state, int32_t worker, int64_t now_ns) noexcept nogil
cdef void scheduler_join(scheduler_t *state, int32_t worker, int64_t now_ns, int64_t clock) noexcept nogil
cdef int64_t scheduler_due(const scheduler_t *state) noexcept nogil
cdef int scheduler_fire(scheduler_t *state) noexcept nogil
