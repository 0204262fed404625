"""One shard's fold of rows: the rows that a commit's pushes carry, written into the shard's tables in place.

A table has no second copy, so a commit of rows needs a log: the combiner logs a row's old words before it writes the row. The
flip of the commit word makes the log void. A combiner that recovers a dead one's lock rolls the log back first. The shard lock
admits one writer; helpers of a shared fold do not write rows.
"""

cimport cython
from libc.stdlib cimport calloc, free

from fastps.kernels.base.atomics cimport fps_counter_get, fps_counter_set
from fastps.kernels.combining.shared_fold cimport FOLD_DONE, FOLD_NONFINITE, FOLD_REFUSED
from fastps.kernels.shm.arena_h cimport fps_folded_push
from fastps.kernels.update import fold
from fastps.kernels.update.fold cimport FPS_MAX_PUSHES, fps_fold_job, fps_push
from fastps.kernels.rows.rows_h cimport fps_table

cdef extern from "rows/row_fold.h" nogil:
    ctypedef void *fps_row_loop
    ctypedef struct fps_row_scratch:
        pass

    const fps_row_loop *fps_row_loops(int isa)
    void fps_row_scratch_free(fps_row_scratch *scratch)
    void fps_undo_begin(const fps_undo_log *log, uint64_t version)
    bint fps_undo_roll_back(
        const fps_undo_log *log, const fps_table *tables, int32_t n_tables, char *base, uint64_t version)
    int fps_fold_table(const fps_row_loop *loops, const fps_fold_job *job, int row_rule, const fps_table *tables,
                       int32_t index, char *base, char **pushed, fps_row_scratch *scratch, const fps_undo_log *log,
                       uint64_t *used)
    int64_t fps_pushed_rows(const fps_table *table, const fps_push *push, const char *pushed)
    float fps_largest_row(const fps_table *table, const fps_push *push, const char *pushed)

cdef const fps_row_loop *_chosen = fps_row_loops(fold.CHOSEN_ISA)

cdef enum:
    LONG_BYTES = 1 << 18  # of the log: about 2,000 rows of 16 floats


@cython.final
cdef class RowFold:
    """The rows of `item`, the work item of shard `shard`. Only the lane that holds the shard's lock may use it."""

    def __cinit__(self, Arena arena not None, uint32_t shard, WorkItem item not None):
        cdef uint32_t index
        self.arena = arena
        self.shard = shard
        self.item = item
        for index in range(arena.header.n_tables):
            self.has_tables = self.has_tables or <uint32_t> arena.tables[index].shard == shard
        if self.has_tables:
            self.log = arena.undo_log(shard)
            self.scratch = calloc(1, sizeof(fps_row_scratch))
            self.pushed = <char **> calloc(FPS_MAX_PUSHES, sizeof(char *))
            self.counted = <int64_t *> calloc(FPS_MAX_PUSHES, sizeof(int64_t))
            if not (self.scratch and self.pushed and self.counted):
                raise MemoryError()

    def __dealloc__(self):
        fps_row_scratch_free(<fps_row_scratch *> self.scratch)
        free(self.pushed)
        free(self.counted)

    cdef int run(self, uint64_t version) noexcept nogil:
        """Write the item's rows, after the fold of its dense parameters. `version`: the shard's, before the commit.

        Results that are not finite are rolled back.
        """
        cdef uint64_t used = 0, before
        cdef uint32_t index
        if not self.has_tables:
            return FOLD_DONE
        self.written = 0
        if not self.item.read() or not self._read_pushes():
            return FOLD_REFUSED
        self.item.nonfinite = 0
        fps_undo_begin(&self.log, version)
        for index in range(self.arena.header.n_tables):
            if <uint32_t> self.arena.tables[index].shard != self.shard:
                continue
            before = used
            if fps_fold_table(_chosen, &self.item.job, self.arena.header.row_rule, self.arena.tables, index, self.arena.rows(),
                              self.pushed, <fps_row_scratch *> self.scratch, &self.log, &used) != 0:
                return FOLD_REFUSED
            self._count(index, used - before)
        self.is_long = used >= LONG_BYTES
        self.is_counted = not self.item.nonfinite
        if self.is_counted:
            return FOLD_DONE
        return FOLD_NONFINITE if self.roll_back(version) else FOLD_REFUSED

    cdef bint roll_back(self, uint64_t version) noexcept nogil:
        """Restore the rows of a fold that began at the shard's present version, if there was one. False for a damaged log."""
        return not self.has_tables or fps_undo_roll_back(
            &self.log, self.arena.tables, self.arena.header.n_tables, self.arena.rows(), version)

    cdef void _count(self, uint32_t table, uint64_t logged) noexcept nogil:
        """Count a table's rows in each push, which may write its slot again after the commit, and those that were logged."""
        cdef int index
        self.written += logged // self.arena.tables[table].undo_bytes
        for index in range(self.item.job.n_pushes):
            self.counted[index] += fps_pushed_rows(&self.arena.tables[table], &self.item.pushes[index], self.pushed[index])

    cdef void publish_counts(self, bint is_committed) noexcept nogil:
        """Add the fold's rows to what observers see if it was committed, or forget them. A death in between loses some."""
        cdef int64_t *rows
        cdef uint32_t lane
        cdef int index
        if not self.is_counted:
            return
        self.is_counted = False
        if not is_committed:
            return
        for index in range(self.item.job.n_pushes):
            lane = self.item.push(index).lane
            if lane >= self.arena.header.n_lanes:
                continue
            rows = &self.arena.lane_shard(lane, self.shard).rows
            fps_counter_set(rows, fps_counter_get(rows) + self.counted[index])
        rows = &self.arena.statistics(self.shard).rows_written
        fps_counter_set(rows, fps_counter_get(rows) + self.written)

    cdef bint _read_pushes(self) noexcept nogil:
        cdef fps_folded_push push
        cdef int index
        for index in range(self.item.job.n_pushes):
            self.counted[index] = 0
            push = self.item.push(index)
            if push.lane >= self.arena.header.n_lanes or push.slot >= self.arena.header.n_slots:
                return False
            self.pushed[index] = self.arena.row_slot(push.lane, push.slot)
        return True

    cdef float largest(self, uint32_t index, int32_t *parameter) noexcept nogil:
        """The largest absolute value of the rows of the index-th push of the item that was read, and its parameter.

        Infinite where a value is not finite; -1 without rows.
        """
        cdef float size, most = -1
        cdef uint32_t table
        cdef fps_folded_push push = self.item.push(index)
        if not self.has_tables or push.lane >= self.arena.header.n_lanes or push.slot >= self.arena.header.n_slots:
            return most
        for table in range(self.arena.header.n_tables):
            if <uint32_t> self.arena.tables[table].shard != self.shard:
                continue
            size = fps_largest_row(
                &self.arena.tables[table], &self.item.pushes[index], self.arena.row_slot(push.lane, push.slot))
            if size > most:
                most, parameter[0] = size, self.arena.tables[table].parameter
        return most
