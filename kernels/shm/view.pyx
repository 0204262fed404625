"""A checked view of an arena's memory: where each of its parts lies, and its measures."""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from fastps.kernels.base.atomics cimport fps_length_acquire, fps_length_release, fps_readers_load
from fastps.kernels.scheduling.state cimport scheduler_t
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.shm.plan cimport PAGE, carried_places, check_header, place_tables, places_of
from fastps.kernels.update.fold cimport FPS_FLOAT32, FPS_FLOAT64, fps_segment
from fastps.kernels.rows.rows_h cimport fps_rows_values_offset, fps_table, fps_undo_log

cdef enum:
    FLOATS_OF_LINE = FPS_LINE // 4  # parameters and shards begin on a line, which non-temporal stores need


cdef int _check(const char *what, uint32_t number, int64_t count) except -1 nogil:
    if number >= count:
        with gil:
            raise IndexError(f"expected a {what.decode()} of 0 to {count - 1}, found {number}")
    return 0


cdef class ArenaView:
    """A checked view of an arena in `memory` (a writable buffer; it stays exported as long as the view lives).

    Raises ValueError when the memory holds no arena of this version, or is shorter than its header says.
    """

    def __cinit__(self, memory not None):
        cdef const unsigned char[::1] view = memory
        self.memory = view
        self.base = <char *> &view[0]
        self.header = &self.own_header
        if <uintptr_t> self.base % FPS_LINE:
            raise ValueError(f"expected memory that begins on a cache line of {FPS_LINE} bytes")
        if view.shape[0] >= PAGE:
            memcpy(self.header, self.base, sizeof(fps_header))
        if self.header.magic != FPS_MAGIC:
            raise ValueError("expected an arena of fastps, found other memory")
        if self.header.abi != FPS_ABI:
            raise ValueError(f"expected an arena of layout {FPS_ABI}, found layout {self.header.abi}: "
                             "all processes of a job must run the same fastps")
        check_header(self.header, view.shape[0])
        self._copy_places()
        self._copy_tables()
        self.lanes, self.buffers, self.readers = self.header.n_lanes, self.header.n_buffers, self.header.n_readers
        self.server_lane = <int64_t> self.header.n_lanes if self.header.n_servers else -1
        self.slots, self.shards, self.n_tables = self.header.n_slots, self.header.n_shards, self.header.n_tables
        self.buffer_floats, self.total_bytes = self.header.buffer_floats, self.header.total_bytes
        self.carried_bytes = self.header.carried_bytes
        self.shown_type, self.is_double = self.header.shown_type, self.header.gradient_type == FPS_FLOAT64
        self.state_planes, self.ema_decay = self.header.state_planes, self.header.ema_decay

    def __dealloc__(self):
        free(self.segments)
        free(self.tables)

    cdef int _copy_places(self) except -1:
        """Copy the places of parameters and shards, checked once, for every fold."""
        cdef uint32_t index
        cdef int64_t floats = self.header.buffer_floats
        self.segments = <fps_segment *> calloc(max(1, self.header.n_parameters), sizeof(fps_segment))
        if self.segments == NULL:
            raise MemoryError()
        for index in range(self.header.n_parameters):
            if not self._copy_place(index):
                raise ValueError(f"expected parameter {index} within {floats} floats and {self.header.n_groups} groups, found "
                                 f"{self.segments[index].length} floats from {self.segments[index].offset} on, group"
                                 f" {self.segments[index].group}")
            self.n_empty += self.segments[index].length == 0
        for index in range(self.header.n_shards):
            self.first[index], self.last[index] = self.shard_header(index).first, self.shard_header(index).last
            if not 0 <= self.first[index] <= self.last[index] <= floats or self.first[index] % FLOATS_OF_LINE:
                raise ValueError(
                    f"expected a shard within {floats} floats, found {self.first[index]} to {self.last[index]}")
        return 0

    cdef bint _copy_place(self, uint32_t index) noexcept nogil:
        """Copy the place of a parameter. Returns whether it is one."""
        cdef fps_segment *segment = &self.segments[index]
        cdef fps_segment *shared = <fps_segment *> (self.base + self.header.segments_offset) + index
        cdef int64_t floats = self.header.buffer_floats, width = 2 if self.header.gradient_type == FPS_FLOAT64 else 1
        segment[0] = shared[0]
        segment.length = fps_length_acquire(&shared.length)
        # Without floats here the parameters lie on devices, and no fold runs here.
        return not (segment.offset < 0 or segment.offset % FLOATS_OF_LINE or segment.length < 0 or segment.length % width
                    or (floats > 0 and (segment.offset > floats or segment.length > floats - segment.offset))
                    or not 0 <= segment.group < <int64_t> self.header.n_groups or segment.parameter != <int64_t> index)

    cdef void find_thawed(self) noexcept nogil:
        """Copy the places of parameters that were frozen before. The caller folds, so no parameter thaws meanwhile."""
        cdef uint32_t index
        cdef fps_segment before
        for index in range(self.header.n_parameters if self.n_empty else 0):
            before = self.segments[index]
            if before.length == 0 and not self._copy_place(index):
                self.segments[index] = before  # damaged: it stays without floats

    cdef int _copy_tables(self) except -1:
        """Copy the descriptions of tables, computed again from their measures."""
        cdef const fps_table *found = <const fps_table *> (self.base + self.header.tables_offset)
        cdef fps_header own = self.own_header
        cdef fps_table *table
        cdef uint32_t index
        self.tables = <fps_table *> calloc(max(1, self.header.n_tables), sizeof(fps_table))
        if self.tables == NULL:
            raise MemoryError()
        for index in range(self.header.n_tables):
            table = &self.tables[index]
            table.rows, table.width, table.parameter = found[index].rows, found[index].width, found[index].parameter
            table.group, table.shard = found[index].group, found[index].shard
            if (not 0 <= table.parameter < <int64_t> self.header.n_parameters
                    or not 0 <= table.group < <int64_t> self.header.n_groups):
                raise ValueError(f"expected table {index} to be one of {self.header.n_parameters} parameters in one of"
                                 f" {self.header.n_groups} groups, found {table.parameter} in group {table.group}")
        place_tables(self.tables, &own)
        if (memcmp(self.tables, found, self.header.n_tables * sizeof(fps_table)) != 0
                or memcmp(&own, self.header, sizeof(own)) != 0):
            raise ValueError("the arena's tables are damaged: their places do not follow from their measures")
        return 0

    cdef fps_lane *lane(self, uint32_t index) noexcept nogil:
        return <fps_lane *> (self.base + self.header.lanes_offset + index * self.header.lane_bytes)

    cdef fps_lane_shard *lane_shard(self, uint32_t lane, uint32_t shard) noexcept nogil:
        return <fps_lane_shard *> (<char *> self.lane(lane) + self.header.lane_shards_offset) + shard

    cdef fps_push_outcome *push_outcome(self, uint32_t lane, uint32_t shard, uint64_t position) noexcept nogil:
        return (<fps_push_outcome *> (<char *> self.lane(lane) + self.header.push_outcomes_offset)
                + shard * self.header.ring_size + (position & (self.header.ring_size - 1)))

    cdef fps_readers *readers_words(self) noexcept nogil:
        return <fps_readers *> (self.base + self.header.reader_words_offset)

    cdef fps_reader_shard *reader_shard(self, uint32_t reader, uint32_t shard) noexcept nogil:
        return <fps_reader_shard *> (self.readers_words() + 1) + <uint64_t> reader * self.header.n_shards + shard

    cdef fps_shard_header *shard_header(self, uint32_t shard) noexcept nogil:
        return <fps_shard_header *> (self.base + self.header.shard_headers_offset) + shard

    cdef fps_statistics *statistics(self, uint32_t shard) noexcept nogil:
        return <fps_statistics *> (self.base + self.header.statistics_offset + shard * self.header.statistics_bytes)

    cdef fps_work *work(self, uint32_t shard, uint64_t workspace) noexcept nogil:
        return <fps_work *> (self.base + self.header.work_offset
                             + (FPS_WORKSPACES * shard + workspace) * self.header.work_bytes)

    cdef scheduler_t *scheduler(self, uint32_t shard, uint64_t record) noexcept nogil:
        return <scheduler_t *> (self.base + self.header.scheduler_offset
                                + (FPS_RECORDS * shard + record) * self.header.scheduler_bytes)

    cdef char *slot(self, uint32_t lane, uint32_t slot) noexcept nogil:
        return (self.base + self.header.slots_offset
                + (<uint64_t> lane * self.header.n_slots + slot) * self.header.slot_bytes)

    cdef bint has_buffer(self, uint64_t buffer) noexcept nogil:
        return buffer <= self.spare_weights()

    cdef uint64_t spare_weights(self) noexcept nogil:
        """The weights buffer behind those of the readers, for a time in which a combiner that stopped may write another."""
        return <uint64_t> self.header.n_buffers + self.header.n_readers

    cdef bint has_state(self, uint64_t buffer) noexcept nogil:
        """The spare one is the last, FPS_STATE_BUFFERS."""
        return buffer <= FPS_STATE_BUFFERS

    cdef float *weights(self, uint64_t buffer) noexcept nogil:
        if buffer < self.header.n_buffers:
            return <float *> (self.base + self.header.weights_offset + buffer * self.header.weights_bytes)
        buffer -= self.header.n_buffers
        return <float *> (self.base + self.header.reader_weights_offset + buffer * self.header.weights_bytes)

    cdef uint16_t *halves(self, uint64_t buffer) noexcept nogil:
        """A buffer's weights in the shown type; NULL without one."""
        if self.header.shown_type == FPS_FLOAT32:
            return NULL
        return <uint16_t *> (self.weights(buffer) + self.header.buffer_floats)

    cdef char *carried(self, uint64_t buffer) noexcept nogil:
        """What the version in a weights buffer carries besides: a line whose first word is 1 if it is there, and values."""
        return <char *> self.weights(buffer) + self.header.weights_carried_offset

    cdef char *brought(self, uint32_t lane, uint32_t slot) noexcept nogil:
        """What a push brings for its version to carry: a line whose first word is the push's step + 1, and values."""
        return self.slot(lane, slot) + self.header.slot_carried_offset

    cdef char *state(self, uint64_t buffer) noexcept nogil:
        if buffer == FPS_STATE_BUFFERS:
            return self.base + self.header.spare_state_offset
        return self.base + self.header.state_offset + buffer * self.header.state_bytes

    # -- checks of numbers: a lane that the arena does not have would lie anywhere ----------------------

    cdef int _check_lane(self, uint32_t lane) except -1 nogil:
        return _check(b"lane", lane, self.header.n_lanes + self.header.n_servers)

    cdef int _check_shard(self, uint32_t shard) except -1 nogil:
        return _check(b"shard", shard, self.header.n_shards)

    cdef int _check_slot(self, uint32_t slot) except -1 nogil:
        return _check(b"slot", slot, self.header.n_slots)

    cdef int _check_table(self, uint32_t table) except -1 nogil:
        return _check(b"table", table, self.header.n_tables)

    # -- tables -------------------------------------------------------------

    cdef char *rows(self) noexcept nogil:
        return self.base + self.header.rows_offset

    cdef char *row_slot(self, uint32_t lane, uint32_t slot) noexcept nogil:
        return (self.base + self.header.row_slots_offset
                + (<uint64_t> lane * self.header.n_slots + slot) * self.header.row_slot_bytes)

    cdef fps_undo_log undo_log(self, uint32_t shard) noexcept nogil:
        """The log of a shard's rows."""
        cdef fps_undo_log log
        log.words = &self.shard_header(shard).undo
        log.entries = self.base + self.header.undo_offset + shard * self.header.undo_bytes
        log.room = self.header.undo_bytes
        return log

    def table_offset(self, uint32_t table):
        """Byte offset of a table's weights."""
        self._check_table(table)
        return self.header.rows_offset + self.tables[table].weights_offset

    def table_plane_offset(self, uint32_t table, uint32_t plane):
        """Byte offset of one of a table's state tensors."""
        self._check_table(table)
        if plane >= <uint32_t> self.tables[table].n_planes:
            raise IndexError(f"expected a state tensor of 0 to {self.tables[table].n_planes - 1}, found {plane}")
        return self.header.rows_offset + self.tables[table].planes_offset[plane]

    def table_slot_ranges(self, int lane, int slot, uint32_t table, int64_t rows):
        """(offset, length) in bytes of the memory for so many rows of a table in a slot: count and numbers, then values."""
        cdef char *begin
        self._check_table(table)
        begin = self.row_slot(lane, slot) + self.tables[table].slot_offset
        return ((begin - self.base, 64 + 4 * rows),
                (begin - self.base + fps_rows_values_offset(&self.tables[table]), 4 * rows * self.tables[table].width))

    def undo_range(self, uint32_t table):
        """(offset, length) in bytes of the log of a table's shard, and the bytes of one of the table's rows in it."""
        self._check_table(table)
        return (self.header.undo_offset + self.tables[table].shard * self.header.undo_bytes, self.header.undo_bytes,
                self.tables[table].undo_bytes)

    # -- places, for views --------------------------------------------------

    def weights_offset(self, int buffer):
        """Byte offset of a weights buffer."""
        return <char *> self.weights(buffer) - self.base

    def halves_offset(self, int buffer):
        """Byte offset of the same weights in the shown type. Raises ValueError without one."""
        cdef uint16_t *halves = self.halves(buffer)
        if halves == NULL:
            raise ValueError("expected an arena that has weights in half precision, found one that has not")
        return <char *> halves - self.base

    def carried_offset(self, int buffer):
        """Byte offset of what the version in a weights buffer carries: its line of marks, then values."""
        return self.carried(buffer) - self.base

    def brought_offset(self, int lane, int slot):
        """Byte offset of what the push in a lane's slot brings for its version to carry: its line of marks, then values."""
        return self.brought(lane, slot) - self.base

    def carried_places(self):
        """(offset, length) in bytes of all that versions carry and pushes bring, without the buffers of readers."""
        return carried_places(self.header) if self.header.carried_bytes else []

    def reader_weights_range(self, int readers):
        """(offset, length) in bytes of the weights buffers of the first `readers` readers: whole pages, the arena's last."""
        return self.header.reader_weights_offset, readers * self.header.weights_bytes

    def buffers_with_pages(self):
        """The numbers of the weights buffers of workers, and of readers that have come so far."""
        return range(self.header.n_buffers + min(fps_readers_load(&self.readers_words().ready), self.header.n_readers))

    def spare_ranges(self):
        """(offset, length) in bytes of the spare weights buffer, and of the spare state buffer: whole pages."""
        return ((self.header.spare_weights_offset, self.header.weights_bytes),
                (self.header.spare_state_offset, self.header.state_bytes))

    def length_of(self, uint32_t parameter):
        """The floats that a parameter has in each buffer: 0 while it is frozen."""
        _check(b"parameter", parameter, self.header.n_parameters)
        return fps_length_acquire(&(<fps_segment *> (self.base + self.header.segments_offset) + parameter).length)

    def thaw(self, uint32_t parameter, int64_t length):
        """Give a frozen parameter its floats. The caller holds all shard locks, and every buffer has its values."""
        _check(b"parameter", parameter, self.header.n_parameters)
        fps_length_release(&(<fps_segment *> (self.base + self.header.segments_offset) + parameter).length, length)

    def places_of(self, int64_t first, int64_t floats):
        """(offset, length) in bytes of these floats in every weights buffer of the workers, plane of the state and slot."""
        return places_of(self.header, first, floats)

    def slots_range(self, int lane):
        """(offset, length) in bytes of a lane's slots: whole pages."""
        return self.slot(lane, 0) - self.base, self.header.n_slots * self.header.slot_bytes

    def slot_offset(self, int lane, int slot):
        """Byte offset of a lane's slot: an fps_hyper a param_group, then the words of presence."""
        return self.slot(lane, slot) - self.base

    def gradient_offset(self, int lane, int slot):
        """Byte offset of the gradient in a lane's slot."""
        return self.slot(lane, slot) + self.header.slot_gradient_offset - self.base

    def presence_offset(self, int lane, int slot):
        """Byte offset of the presence bitmap in a lane's slot."""
        return self.slot(lane, slot) + self.header.slot_presence_offset - self.base

    def nonfinite_offset(self, int lane, int slot):
        """Byte offset of the bitmap of parameters that a device found non-finite, in a lane's slot."""
        return self.slot(lane, slot) + self.header.slot_nonfinite_offset - self.base

    def steps_offset(self, int buffer):
        """Byte offset of int64[parameters]: how often the rule was applied to each parameter."""
        return self.state(buffer) - self.base

    def plane_offset(self, int buffer, int plane):
        """Byte offset of one plane of the rule's state."""
        cdef char *planes = self.state(buffer) + self.header.state_steps_bytes
        return planes + plane * self.header.buffer_floats * sizeof(float) - self.base

    def extra_offset(self, int lane):
        """Byte offset of the lane's slot for model buffers."""
        return self.header.extra_offset + lane * self.header.extra_bytes
