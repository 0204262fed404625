# Whether a scheduler's state that another process wrote can be followed and walked.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.scheduling.state cimport scheduler_t

# What must hold of a shard's state for as long as the job lasts, as it was when it was first looked at: all up to `version`.
cdef void state_remember(scheduler_t *expected, const scheduler_t *state, int32_t n_workers) noexcept nogil
cdef bint state_can_be_followed(const scheduler_t *state, const scheduler_t *expected) noexcept nogil
cdef bint state_can_be_walked(const scheduler_t *state, int64_t most_kept) noexcept nogil
