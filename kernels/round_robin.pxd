# Grants in a fixed order with a gap between them, and batches that fit: R2SP.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.roster cimport scheduler_t

cdef void round_robin_measure(scheduler_t *state, int32_t worker, int64_t samples) noexcept nogil
cdef void round_robin_space(scheduler_t *state) noexcept nogil
cdef void round_robin_grant(scheduler_t *state) noexcept nogil
cdef int64_t round_robin_due(const scheduler_t *state) noexcept nogil
