# Bounded staleness: SSP and DSSP.

from libc.stdint cimport int32_t

from fastps.kernels.scheduling.state cimport scheduler_t

cdef void bounded_decide(scheduler_t *state, int32_t worker) noexcept nogil
cdef void bounded_release(scheduler_t *state, int32_t pusher) noexcept nogil
