"""One shard's fold of rows: the rows that a commit's pushes carry, written into the shard's tables in place.

A table has no second copy, so a commit of rows needs a log: the combiner logs a row's old words before it writes the row. The
flip of the commit word makes the log void. A combiner that recovers a dead one's lock rolls the log back first. The shard lock
admits one writer; helpers of a shared fold do not write rows.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.base.atomics cimport fps_counter_get, fps_counter_set
from fastps.kernels.protocol.shared_fold cimport FOLD_DONE, FOLD_NONFINITE, FOLD_REFUSED
from fastps.kernels.shm.arena_h cimport fps_folded_push
from fastps.kernels.update.fold cimport FPS_MAX_PUSHES
from fastps.kernels.update.rows cimport fold_table, largest_row, pushed_rows, undo_begin, undo_roll_back

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
            self.scratch = RowScratch()
            self.pushed = <char **> calloc(FPS_MAX_PUSHES, sizeof(char *))
            self.counted = <int64_t *> calloc(FPS_MAX_PUSHES, sizeof(int64_t))
            if not self.pushed or not self.counted:
                raise MemoryError()

    def __dealloc__(self):
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
        undo_begin(&self.log, version)
        for index in range(self.arena.header.n_tables):
            if <uint32_t> self.arena.tables[index].shard != self.shard:
                continue
            before = used
            if fold_table(&self.item.job, self.arena.header.row_rule, self.arena.tables, index, self.arena.rows(), self.pushed,
                          self.scratch.words, &self.log, &used) != 0:
                return FOLD_REFUSED
            self._count(index, used - before)
        self.is_long = used >= LONG_BYTES
        self.is_counted = not self.item.nonfinite
        if self.is_counted:
            return FOLD_DONE
        return FOLD_NONFINITE if self.roll_back(version) else FOLD_REFUSED

    cdef bint roll_back(self, uint64_t version) noexcept nogil:
        """Restore the rows of a fold that began at the shard's present version, if there was one. False for a damaged log."""
        return not self.has_tables or undo_roll_back(
            &self.log, self.arena.tables, self.arena.header.n_tables, self.arena.rows(), version)

    cdef void _count(self, uint32_t table, uint64_t logged) noexcept nogil:
        """Count a table's rows in each push, which may write its slot again after the commit, and those that were logged."""
        cdef int index
        self.written += logged // self.arena.tables[table].undo_bytes
        for index in range(self.item.job.n_pushes):
            self.counted[index] += pushed_rows(&self.arena.tables[table], &self.item.pushes[index], self.pushed[index])

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
            size = largest_row(&self.arena.tables[table], &self.item.pushes[index], self.arena.row_slot(push.lane, push.slot))
            if size > most:
                most, parameter[0] = size, self.arena.tables[table].parameter
        return most
