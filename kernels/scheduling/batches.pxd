# Batches that equalize the workers' times.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.scheduling.state cimport scheduler_t, worker_t

cdef enum:
    NEWEST_WEIGHT = 8   # the newest iteration counts one part in so many
    MOST_GROWTH = 16    # largest tuned batch, as a multiple of the worker's first

cdef void batches_learn(worker_t *w, int64_t samples, int64_t took_ns) noexcept nogil
cdef int64_t batches_of_time(const worker_t *w, double target_ns, int64_t least, int64_t most) noexcept nogil
cdef void batches_measure(scheduler_t *state, int32_t worker, int64_t samples) noexcept nogil
cdef void batches_level(scheduler_t *state) noexcept nogil
