# The check of a header that another process wrote, and the places of tables.

from libc.stdint cimport int64_t

from fastps.kernels.shm.arena_h cimport fps_header
from fastps.kernels.rows.rows_h cimport fps_table

cdef enum:
    PAGE = 4096

cdef int check_header(const fps_header *found, int64_t size) except -1
cdef int place_tables(fps_table *tables, fps_header *header) except -1
cdef list carried_places(const fps_header *header)
cdef list places_of(const fps_header *header, int64_t first, int64_t floats)
