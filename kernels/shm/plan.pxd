# The check of a header that another process wrote, and the places of tables.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena_h cimport fps_header
from fastps.kernels.update.rows_h cimport fps_table

cdef enum:
    PAGE = 4096

# The measures of an arena's tables; sizes in bytes.
ctypedef struct rows_measures_t:
    uint32_t n_tables
    uint32_t row_rule
    uint64_t rows_bytes
    uint64_t undo_bytes      # of each shard
    uint64_t row_slot_bytes  # of each slot

cdef int check_header(const fps_header *found, int64_t size) except -1
cdef int describe_tables(fps_table *words, list tables) except -1
cdef int place_tables(
    fps_table *tables, uint32_t n_tables, uint32_t row_rule, uint32_t shards, rows_measures_t *found) except -1
