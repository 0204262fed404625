"""The rows that a worker pushes: those of a sparse gradient, collected into its slot, each row once.

The memory of a slot's rows, and of the log of a shard, has no pages at first. A worker reserves both before it writes more rows
than before, so a fold never meets a page that cannot be allocated.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from fastps.kernels.base.atomics cimport fps_undo_reserve
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.rows.rows_h cimport fps_rows, fps_table

cdef extern from "rows/row_collect.h" nogil:
    ctypedef struct fps_row_places:
        void *places "places"

    int64_t fps_row_outside(const fps_table *table, const int64_t *numbers, int64_t count)
    int64_t fps_collect_rows(fps_rows *slot, const fps_table *table, const int64_t *numbers, const float *values, int64_t count,
                             fps_row_places *places)


cdef class RowWriter:
    """The rows in the slots of lane `lane` of `arena`. Only one thread may use it."""

    cdef Arena arena
    cdef uint32_t lane
    cdef fps_row_places places

    def __cinit__(self, Arena arena not None, uint32_t lane):
        arena._check_lane(lane)
        self.arena, self.lane = arena, lane
        memset(&self.places, 0, sizeof(self.places))

    def __dealloc__(self):
        free(self.places.places)

    def outside(self, uint32_t table, const int64_t[::1] numbers not None):
        """The index of the first number that is no row of the table, or -1."""
        cdef int64_t found
        self.arena._check_table(table)
        if numbers.shape[0] == 0:
            return -1
        with nogil:
            found = fps_row_outside(&self.arena.tables[table], &numbers[0], numbers.shape[0])
        return found

    def collect(self, uint32_t slot, uint32_t table, const int64_t[::1] numbers not None, const float[:, ::1] values not None):
        """Write rows into a slot; values of equal numbers are summed. Returns the number of different rows.

        The caller has checked the numbers (`outside`) and reserved the memory. Raises ValueError for values of another shape,
        MemoryError. Releases the GIL.
        """
        cdef fps_table *words
        cdef fps_rows *rows
        cdef int64_t count = numbers.shape[0], found
        self.arena._check_table(table)
        words = &self.arena.tables[table]
        self.arena._check_slot(slot)
        if values.shape[0] != count or values.shape[1] != words.width:
            raise ValueError(
                f"expected {count} rows of {words.width} values, found {values.shape[0]} rows of {values.shape[1]}")
        rows = <fps_rows *> (self.arena.row_slot(self.lane, slot) + words.slot_offset)
        with nogil:
            found = fps_collect_rows(rows, words, &numbers[0] if count else NULL, &values[0, 0] if count else NULL, count,
                                     &self.places)
        if found < 0:
            raise MemoryError(f"no memory for the places of {count} rows")
        return found

    def reserve(self, uint32_t table, int64_t rows):
        """Reserve so many rows more in the log of the table's shard; returns how many bytes of it all workers reserved."""
        cdef fps_table *words
        cdef uint64_t bytes
        self.arena._check_table(table)
        words = &self.arena.tables[table]
        bytes = words.undo_bytes * rows
        return fps_undo_reserve(&self.arena.shard_header(words.shard).undo.reserved, bytes) + bytes
