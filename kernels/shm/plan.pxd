# The check of a header that another process wrote.

from libc.stdint cimport int64_t

from fastps.kernels.shm.arena_h cimport fps_header

cdef enum:
    PAGE = 4096

cdef int check_header(const fps_header *found, int64_t size) except -1
