# The scheduler as an object, for the benchmark, which calls the decisions on its state.

from fastps.kernels.scheduling.state cimport scheduler_t, worker_t


cdef class Scheduler:
    cdef scheduler_t *state
    cdef scheduler_t *other  # the record that the next commit is made in, or NULL: there is one record
    cdef bytearray memory
    cdef bytearray other_memory

    cdef void _begin(self) noexcept
    cdef worker_t *_worker(self, int worker) except NULL
    cdef tuple _outcome(self, int action, int worker)
