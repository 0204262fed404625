"""How the arena's memory is cut into header, control words, scheduler state, weights, rule state and slots.

A header's measures decide every place in it, so a header that another process wrote is checked by computing it again.
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from fastps.kernels.scheduling.state cimport state_size
from fastps.kernels.shm.arena_h cimport (
    FPS_ABI,
    FPS_GAP_BUCKETS,
    FPS_LINE,
    FPS_MAGIC,
    FPS_MAX_BUFFERS,
    FPS_MAX_LANES,
    FPS_MAX_SHARDS,
    FPS_RECORDS,
    FPS_STATE_BUFFERS,
    FPS_WORKSPACES,
    fps_descriptor,
    fps_folded_push,
    fps_header,
    fps_lane,
    fps_lane_shard,
    fps_push_outcome,
    fps_reader_shard,
    fps_readers,
    fps_shard_header,
    fps_statistics,
    fps_work,
)
from fastps.kernels.update.fold cimport (
    FPS_BFLOAT16,
    FPS_FLOAT32,
    FPS_FLOAT64,
    FPS_IS_USERS,
    FPS_MAX_PUSHES,
    fps_hyper,
    fps_segment,
)
from fastps.kernels.update.rows_h cimport (
    FPS_MAX_ROWS,
    FPS_MAX_TABLES,
    FPS_N_ROW_RULES,
    fps_place_table,
    fps_rows_bytes,
    fps_table,
)


cdef uint64_t _aligned(uint64_t size, uint64_t to) noexcept:
    return (size + to - 1) // to * to


cdef int _check_measures(uint32_t lanes, uint32_t slots, uint32_t ring_size, uint32_t buffers, uint32_t shards,
                         double ema_decay, uint32_t gradient_type, uint32_t shown_type, uint32_t servers,
                         uint32_t readers) except -1:
    if not 1 <= lanes <= FPS_MAX_LANES:
        raise ValueError(f"expected 1 to {FPS_MAX_LANES} workers, found {lanes}")
    if servers > 1:
        raise ValueError(f"expected one server or none, found {servers}")
    if not 2 <= buffers <= FPS_MAX_BUFFERS:
        raise ValueError(f"expected 2 to {FPS_MAX_BUFFERS} weight buffers, found {buffers}")
    if readers > FPS_MAX_BUFFERS - buffers:
        raise ValueError(f"expected 0 to {FPS_MAX_BUFFERS - buffers} readers beside {buffers} weight buffers, found {readers}")
    if ring_size < 2 or ring_size & (ring_size - 1):
        raise ValueError(f"expected the ring's size to be a power of two, at least 2, found {ring_size}")
    if slots < 1 or slots >= ring_size:
        raise ValueError(f"expected 1 to {ring_size - 1} gradient slots in a ring of {ring_size}, found {slots}")
    if not 1 <= shards <= FPS_MAX_SHARDS:
        raise ValueError(f"expected 1 to {FPS_MAX_SHARDS} shards, found {shards}")
    if not 0 <= ema_decay < 1:
        raise ValueError(f"expected a decay of the weights' moving average of 0 (none) to less than 1, found {ema_decay}")
    if gradient_type > FPS_FLOAT64:
        raise ValueError(f"expected a type of gradient of 0 to {FPS_FLOAT64}, found {gradient_type}")
    if shown_type > FPS_BFLOAT16:
        raise ValueError(f"expected a type of shown weights of 0 to {FPS_BFLOAT16}, found {shown_type}")
    return 0


cdef uint64_t _gradient_bytes(uint32_t gradient_type) noexcept:
    """The bytes of a slot for each float of a buffer, of which a double is two."""
    return sizeof(float) if gradient_type in (FPS_FLOAT32, FPS_FLOAT64) else sizeof(uint16_t)


cdef int _check_doubles(uint32_t gradient_type, uint32_t rule, uint32_t shown_type, uint32_t n_tables) except -1:
    """Refuse what no loop in double precision is compiled for."""
    if gradient_type == FPS_FLOAT64 and (FPS_IS_USERS(<int> rule) or shown_type != FPS_FLOAT32 or n_tables):
        raise ValueError("expected doubles with a rule of fastps, without halves and without tables, found"
                         f" rule {rule}, shown weights of type {shown_type} and {n_tables} tables")
    return 0


cdef void _set_rows(fps_header *header, const rows_measures_t *rows) noexcept:
    """Write the measures of the tables."""
    header.n_tables, header.row_rule = rows.n_tables, rows.row_rule
    header.rows_bytes, header.undo_bytes, header.row_slot_bytes = rows.rows_bytes, rows.undo_bytes, rows.row_slot_bytes


cdef uint64_t _weight_bytes(uint32_t shown_type) noexcept:
    """What a weight takes in a buffer: a float, and with a shown type its half."""
    return sizeof(float) if shown_type == FPS_FLOAT32 else sizeof(float) + sizeof(uint16_t)


cdef void _set_slot(fps_header *header, uint64_t gradient_bytes) noexcept:
    """Write the places of a slot's parts."""
    cdef uint64_t bitmap = header.presence_words * sizeof(uint64_t)
    header.slot_presence_offset = header.n_groups * sizeof(fps_hyper)
    header.slot_versions_offset = header.slot_presence_offset + bitmap
    header.slot_nonfinite_offset = header.slot_versions_offset + header.n_shards * sizeof(uint64_t)
    header.slot_gradient_offset = _aligned(header.slot_nonfinite_offset + bitmap, FPS_LINE)
    header.slot_bytes = _aligned(header.slot_gradient_offset + header.buffer_floats * gradient_bytes, PAGE)


cdef int _plan(fps_header *header, uint32_t lanes, uint32_t slots, uint32_t ring_size, uint32_t groups, uint32_t parameters,
               uint64_t buffer_floats, uint32_t rule, uint32_t state_planes, uint64_t extra_bytes, uint32_t buffers,
               uint32_t shards, double ema_decay, bint checks_finite, uint32_t gradient_type, uint32_t shown_type,
               uint32_t servers, uint32_t readers, const rows_measures_t *rows) except -1:
    """Give every part its place; parts that different processes write begin on a page of their own."""
    cdef uint64_t offset, gradient_bytes = _gradient_bytes(gradient_type)
    _check_measures(lanes, slots, ring_size, buffers, shards, ema_decay, gradient_type, shown_type, servers, readers)
    _check_doubles(gradient_type, rule, shown_type, rows.n_tables)
    memset(header, 0, sizeof(fps_header))
    header.magic = FPS_MAGIC
    header.abi = FPS_ABI
    header.n_lanes = lanes
    header.n_buffers = buffers
    header.n_slots, header.ring_size = slots, ring_size
    header.n_groups, header.n_parameters = groups, parameters
    header.presence_words = (parameters + 63) // 64
    header.rule = rule
    header.state_planes = state_planes
    header.n_shards = shards
    header.checks_finite = checks_finite
    header.ema_decay = ema_decay
    header.gradient_type, header.shown_type = gradient_type, shown_type
    header.n_servers, header.n_readers = servers, readers
    _set_rows(header, rows)
    header.buffer_floats = _aligned(buffer_floats, FPS_LINE // sizeof(float))
    offset = header.shard_headers_offset = PAGE
    offset = header.work_offset = offset + _aligned(shards * sizeof(fps_shard_header), PAGE)
    header.work_bytes = _aligned(sizeof(fps_work) + FPS_MAX_PUSHES * sizeof(fps_folded_push), PAGE)
    offset = header.segments_offset = offset + FPS_WORKSPACES * shards * header.work_bytes
    offset = header.tables_offset = offset + _aligned(parameters * sizeof(fps_segment), PAGE)
    offset = header.lanes_offset = offset + _aligned(rows.n_tables * sizeof(fps_table), PAGE)
    header.lane_shards_offset = sizeof(fps_lane) + ring_size * sizeof(fps_descriptor)
    header.push_outcomes_offset = header.lane_shards_offset + shards * sizeof(fps_lane_shard)
    header.lane_bytes = header.push_outcomes_offset + shards * ring_size * sizeof(fps_push_outcome)
    offset = header.reader_words_offset = offset + _aligned((lanes + servers) * header.lane_bytes, PAGE)
    offset = header.statistics_offset = offset + _aligned(
        sizeof(fps_readers) + <uint64_t> readers * shards * sizeof(fps_reader_shard), PAGE)
    header.statistics_bytes = sizeof(fps_statistics) + lanes * FPS_GAP_BUCKETS * sizeof(int64_t)
    offset = header.scheduler_offset = offset + _aligned(shards * header.statistics_bytes, PAGE)
    header.scheduler_bytes = _aligned(state_size(lanes), PAGE)
    offset = header.rows_offset = offset + FPS_RECORDS * shards * header.scheduler_bytes
    offset = header.weights_offset = offset + rows.rows_bytes
    header.weights_bytes = _aligned(header.buffer_floats * _weight_bytes(shown_type), PAGE)
    offset = header.state_offset = offset + buffers * header.weights_bytes
    header.state_steps_bytes = _aligned(parameters * sizeof(int64_t), FPS_LINE)
    header.state_bytes = _aligned(header.state_steps_bytes + state_planes * header.buffer_floats * sizeof(float), PAGE)
    offset = header.slots_offset = offset + FPS_STATE_BUFFERS * header.state_bytes
    _set_slot(header, gradient_bytes)
    offset = header.extra_offset = offset + lanes * slots * header.slot_bytes
    header.extra_bytes = _aligned(extra_bytes, PAGE)
    offset = header.reader_weights_offset = offset + (lanes + servers) * header.extra_bytes
    offset = header.spare_weights_offset = offset + readers * header.weights_bytes
    offset = header.spare_state_offset = offset + header.weights_bytes
    offset = header.undo_offset = offset + header.state_bytes
    offset = header.row_slots_offset = offset + shards * header.undo_bytes
    header.total_bytes = offset + <uint64_t> lanes * slots * header.row_slot_bytes
    return _check_size(header)


cdef int describe_tables(fps_table *words, list tables) except -1:
    """Write (rows, width, parameter, group, shard) of each table."""
    cdef fps_table *table
    if len(tables) > FPS_MAX_TABLES:
        raise ValueError(f"expected at most {FPS_MAX_TABLES} tables, found {len(tables)}")
    memset(words, 0, len(tables) * sizeof(fps_table))
    for index, (rows, width, parameter, group, shard) in enumerate(tables):
        table = &words[index]
        table.rows, table.width, table.parameter, table.group, table.shard = rows, width, parameter, group, shard
    return 0


cdef int place_tables(
        fps_table *tables, uint32_t n_tables, uint32_t row_rule, uint32_t shards, rows_measures_t *found) except -1:
    """Complete the descriptions of tables, whose rows, width, parameter, group and shard are set, and measure them."""
    cdef uint32_t index, shard
    cdef uint64_t logged
    if n_tables > FPS_MAX_TABLES:
        raise ValueError(f"expected at most {FPS_MAX_TABLES} tables, found {n_tables}")
    if row_rule >= FPS_N_ROW_RULES:
        raise ValueError(f"expected a rule of rows of 0 to {FPS_N_ROW_RULES - 1}, found {row_rule}")
    memset(found, 0, sizeof(rows_measures_t))
    found.n_tables, found.row_rule = n_tables, row_rule
    for index in range(n_tables):
        if not 1 <= tables[index].rows <= FPS_MAX_ROWS or tables[index].width < 1 or <uint32_t> tables[index].shard >= shards:
            raise ValueError(f"expected a table of 1 to {FPS_MAX_ROWS} rows, a width of 1 or more and a shard of 0 to"
                             f" {shards - 1}, found {tables[index].rows} rows of {tables[index].width} in shard"
                             f" {tables[index].shard}")
        found.rows_bytes = fps_place_table(&tables[index], row_rule, found.rows_bytes)
        tables[index].slot_offset = found.row_slot_bytes
        found.row_slot_bytes += fps_rows_bytes(&tables[index])
    found.rows_bytes = _aligned(found.rows_bytes, PAGE)
    found.row_slot_bytes = _aligned(found.row_slot_bytes, PAGE)
    for shard in range(shards):
        logged = 0
        for index in range(n_tables):
            if <uint32_t> tables[index].shard == shard:
                logged += tables[index].undo_bytes * tables[index].rows
        found.undo_bytes = max(found.undo_bytes, _aligned(logged, PAGE))
    return 0


cdef int _check_size(const fps_header *header) except -1:
    """Refuse measures whose size wraps around 2^64: their places would lie anywhere."""
    cdef double floats = 4.0 * header.buffer_floats, tables = 1024.0 * header.n_parameters + 1024.0 * header.n_groups
    cdef double all_lanes = <double> header.n_lanes + header.n_servers
    cdef double lanes = all_lanes * (<double> header.n_slots * (floats + tables + PAGE) + header.extra_bytes)
    cdef double rings = all_lanes * header.ring_size * 64 * (1 + header.n_shards)
    cdef double all_buffers = 1.0 + header.n_buffers + header.n_readers
    cdef double buffers = all_buffers * 1.5 * floats + (1 + FPS_STATE_BUFFERS) * (tables + header.state_planes * floats)
    cdef double rows = 1.0 * header.rows_bytes + 1.0 * header.n_shards * header.undo_bytes
    lanes += all_lanes * header.n_slots * header.row_slot_bytes + rows
    if lanes + rings + buffers + tables > 2.0 ** 56:
        raise ValueError(f"expected an arena of at most 2^56 bytes, found {lanes + rings + buffers + tables:g}")
    return 0


def plan(*, int lanes, int slots, int ring_size, int groups, int parameters, int64_t buffer_floats, int rule, int state_planes,
         int64_t extra_bytes, int buffers, int shards=1, double ema_decay=0, bint checks_finite=False,
         int gradient_type=FPS_FLOAT32, int shown_type=FPS_FLOAT32, int servers=0, int readers=0, list tables=None,
         int row_rule=0):
    """The header of an arena of these measures, as bytes; its last word is the arena's size.

    `servers`: 1 for a lane more, behind the workers', for a server process. `readers`: the most processes that only read.
    `gradient_type`: FLOAT64 if every number of the arena is a double, which takes two floats.
    `shown_type`: the half precision in which each weights buffer has the weights once more; FPS_FLOAT32: none.
    `tables`: (rows, width, parameter, group, shard) of each parameter of which pushes carry rows; `row_rule`: their rule.

    Sizes are in floats (4 bytes) where the name says so, else in bytes. Raises ValueError for a measure out of range.
    """
    cdef fps_header header
    cdef rows_measures_t rows
    cdef fps_table words[FPS_MAX_TABLES]
    if lanes < 1:
        raise ValueError(f"expected 1 to {FPS_MAX_LANES} workers, found {lanes}")
    describe_tables(words, tables or [])
    place_tables(words, len(tables or []), row_rule, max(shards, 1), &rows)
    _plan(&header, lanes, slots, ring_size, groups, parameters, buffer_floats, rule, state_planes, extra_bytes, buffers,
          shards, ema_decay, checks_finite, gradient_type, shown_type, servers, readers, &rows)
    return bytes((<char *> &header)[:sizeof(fps_header)]), header.total_bytes


def reader_weights_offset(bytes header_bytes not None):
    """Where the buffers of readers begin, in bytes: what lies behind gets pages only when it is needed."""
    if len(header_bytes) != sizeof(fps_header):
        raise ValueError(f"expected a header of {sizeof(fps_header)} bytes, found {len(header_bytes)}")
    return (<const fps_header *> <const char *> header_bytes).reader_weights_offset


cdef int check_header(const fps_header *found, int64_t size) except -1:
    """Compute the header again from its measures: a place that differs would be dereferenced otherwise."""
    cdef fps_header own
    cdef rows_measures_t rows
    rows.n_tables, rows.row_rule, rows.rows_bytes = found.n_tables, found.row_rule, found.rows_bytes
    rows.undo_bytes, rows.row_slot_bytes = found.undo_bytes, found.row_slot_bytes
    _plan(&own, found.n_lanes, found.n_slots, found.ring_size, found.n_groups, found.n_parameters, found.buffer_floats,
          found.rule, found.state_planes, found.extra_bytes, found.n_buffers, found.n_shards, found.ema_decay,
          found.checks_finite, found.gradient_type, found.shown_type, found.n_servers, found.n_readers, &rows)
    if memcmp(&own, found, sizeof(own)) != 0 or own.total_bytes > <uint64_t> size:
        raise ValueError("the arena's header is damaged: its places do not follow from its measures")
    return 0
