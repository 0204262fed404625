# Whether a header's places follow from its measures, for who looks at memory that others made (arena_view.pyx).

from libc.stdint cimport int64_t

from fastps.kernels.shm.arena_h cimport fps_header

cdef enum:
    PAGE = 4096

cdef int check_header(const fps_header *found, int64_t size) except -1
