"""How the arena's memory is cut into header, control words, scheduler state, weights, rule state and slots.

A header's measures decide every place in it, so a header that another process wrote is checked by computing it again.
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from fastps.kernels.scheduling.state cimport state_size
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport *
from fastps.kernels.rows.rows_h cimport *


cdef uint64_t _aligned(uint64_t size, uint64_t to) noexcept:
    return (size + to - 1) // to * to


cdef int _check_measures(const fps_header *header) except -1:
    """Refuse a measure that is out of range, and what no loop in double precision is compiled for."""
    if not 1 <= header.n_lanes <= FPS_MAX_LANES:
        raise ValueError(f"expected 1 to {FPS_MAX_LANES} workers, found {header.n_lanes}")
    if header.n_servers > 1:
        raise ValueError(f"expected one server or none, found {header.n_servers}")
    if not 2 <= header.n_buffers <= FPS_MAX_BUFFERS:
        raise ValueError(f"expected 2 to {FPS_MAX_BUFFERS} weight buffers, found {header.n_buffers}")
    if header.n_readers > FPS_MAX_BUFFERS - header.n_buffers:
        raise ValueError(f"expected 0 to {FPS_MAX_BUFFERS - header.n_buffers} readers beside {header.n_buffers} weight buffers,"
                         f" found {header.n_readers}")
    if header.ring_size < 2 or header.ring_size & (header.ring_size - 1):
        raise ValueError(f"expected the ring's size to be a power of two, at least 2, found {header.ring_size}")
    if header.n_slots < (1 if header.n_parameters else 0) or header.n_slots >= header.ring_size:
        raise ValueError(f"expected 1 to {header.ring_size - 1} gradient slots in a ring of {header.ring_size}, found"
                         f" {header.n_slots}")
    if not 1 <= header.n_shards <= FPS_MAX_SHARDS:
        raise ValueError(f"expected 1 to {FPS_MAX_SHARDS} shards, found {header.n_shards}")
    if header.n_tables > FPS_MAX_TABLES:
        raise ValueError(f"expected at most {FPS_MAX_TABLES} tables, found {header.n_tables}")
    if header.row_rule >= FPS_N_ROW_RULES:
        raise ValueError(f"expected a rule of rows of 0 to {FPS_N_ROW_RULES - 1}, found {header.row_rule}")
    if not 0 <= header.ema_decay < 1:
        raise ValueError("expected a decay of the weights' moving average of 0 (none) to less than 1, found"
                         f" {header.ema_decay}")
    if header.gradient_type > FPS_FLOAT64:
        raise ValueError(f"expected a type of gradient of 0 to {FPS_FLOAT64}, found {header.gradient_type}")
    if header.shown_type > FPS_BFLOAT16:
        raise ValueError(f"expected a type of shown weights of 0 to {FPS_BFLOAT16}, found {header.shown_type}")
    if header.gradient_type == FPS_FLOAT64 and (
            FPS_IS_USERS(<int> header.rule) or header.shown_type != FPS_FLOAT32 or header.n_tables):
        raise ValueError("expected doubles with a rule of fastps, without halves and without tables, found"
                         f" rule {header.rule}, shown weights of type {header.shown_type} and {header.n_tables} tables")
    return 0


cdef int _place(fps_header *header) except -1:
    """Give every part its place, by the header's measures; parts that different processes write begin on their own pages."""
    cdef uint64_t offset, lanes = header.n_lanes, servers = header.n_servers, shards = header.n_shards
    cdef uint64_t slots = header.n_slots, ring_size = header.ring_size, parameters = header.n_parameters
    # The bytes of a weight in a buffer (with a shown type, its half, too), and of a float in a slot (a double is two floats).
    cdef uint64_t weight_bytes = sizeof(float) if header.shown_type == FPS_FLOAT32 else sizeof(float) + sizeof(uint16_t)
    cdef uint64_t gradient_bytes = sizeof(float) if header.gradient_type in (FPS_FLOAT32, FPS_FLOAT64) else sizeof(uint16_t)
    cdef uint64_t bitmap = (parameters + 63) // 64 * sizeof(uint64_t)
    header.magic, header.abi = FPS_MAGIC, FPS_ABI
    header.presence_words = <uint32_t> (bitmap // sizeof(uint64_t))
    header.buffer_floats = _aligned(header.buffer_floats, FPS_LINE // sizeof(float))
    offset = header.shard_headers_offset = PAGE
    offset = header.work_offset = offset + _aligned(shards * sizeof(fps_shard_header), PAGE)
    header.work_bytes = _aligned(sizeof(fps_work) + FPS_MAX_PUSHES * sizeof(fps_folded_push), PAGE)
    offset = header.segments_offset = offset + FPS_WORKSPACES * shards * header.work_bytes
    offset = header.tables_offset = offset + _aligned(parameters * sizeof(fps_segment), PAGE)
    offset = header.lanes_offset = offset + _aligned(header.n_tables * sizeof(fps_table), PAGE)
    header.lane_shards_offset = sizeof(fps_lane) + ring_size * sizeof(fps_descriptor)
    header.push_outcomes_offset = header.lane_shards_offset + shards * sizeof(fps_lane_shard)
    header.lane_bytes = header.push_outcomes_offset + shards * ring_size * sizeof(fps_push_outcome)
    offset = header.reader_words_offset = offset + _aligned((lanes + servers) * header.lane_bytes, PAGE)
    offset = header.statistics_offset = offset + _aligned(
        sizeof(fps_readers) + header.n_readers * shards * sizeof(fps_reader_shard), PAGE)
    header.statistics_bytes = sizeof(fps_statistics) + lanes * FPS_GAP_BUCKETS * sizeof(int64_t)
    offset = header.scheduler_offset = offset + _aligned(shards * header.statistics_bytes, PAGE)
    header.scheduler_bytes = _aligned(state_size(lanes), PAGE)
    offset = header.rows_offset = offset + FPS_RECORDS * shards * header.scheduler_bytes
    offset = header.weights_offset = offset + header.rows_bytes
    header.carried_bytes = _aligned(header.carried_bytes, FPS_LINE)
    header.weights_carried_offset = _aligned(header.buffer_floats * weight_bytes, FPS_LINE)
    header.weights_bytes = _aligned(header.weights_carried_offset + header.carried_bytes, PAGE)
    offset = header.state_offset = offset + header.n_buffers * header.weights_bytes
    header.state_steps_bytes = _aligned(parameters * sizeof(int64_t), FPS_LINE)
    header.state_bytes = _aligned(header.state_steps_bytes + header.state_planes * header.buffer_floats * sizeof(float), PAGE)
    offset = header.slots_offset = offset + FPS_STATE_BUFFERS * header.state_bytes
    header.slot_presence_offset = header.n_groups * sizeof(fps_hyper)
    header.slot_versions_offset = header.slot_presence_offset + bitmap
    header.slot_nonfinite_offset = header.slot_versions_offset + shards * sizeof(uint64_t)
    header.slot_gradient_offset = _aligned(header.slot_nonfinite_offset + bitmap, FPS_LINE)
    header.slot_carried_offset = _aligned(header.slot_gradient_offset + header.buffer_floats * gradient_bytes, FPS_LINE)
    header.slot_bytes = _aligned(header.slot_carried_offset + header.carried_bytes, PAGE)
    offset = header.extra_offset = offset + lanes * slots * header.slot_bytes
    header.extra_bytes = _aligned(header.extra_bytes, PAGE)
    offset = header.reader_weights_offset = offset + (lanes + servers) * header.extra_bytes
    offset = header.spare_weights_offset = offset + header.n_readers * header.weights_bytes
    offset = header.spare_state_offset = offset + header.weights_bytes
    offset = header.undo_offset = offset + header.state_bytes
    offset = header.row_slots_offset = offset + shards * header.undo_bytes
    header.total_bytes = offset + lanes * slots * header.row_slot_bytes
    return _check_size(header)


cdef int place_tables(fps_table *tables, fps_header *header) except -1:
    """Complete the descriptions of tables, whose rows, width, parameter, group and shard are set, and write their measures."""
    cdef uint32_t index, shard
    cdef uint64_t logged
    header.rows_bytes = header.undo_bytes = header.row_slot_bytes = 0
    for index in range(header.n_tables):
        if (not 1 <= tables[index].rows <= FPS_MAX_ROWS or tables[index].width < 1
                or <uint32_t> tables[index].shard >= header.n_shards):
            raise ValueError(f"expected a table of 1 to {FPS_MAX_ROWS} rows, a width of 1 or more and a shard of 0 to"
                             f" {header.n_shards - 1}, found {tables[index].rows} rows of {tables[index].width} in shard"
                             f" {tables[index].shard}")
        header.rows_bytes = fps_place_table(&tables[index], header.row_rule, header.rows_bytes)
        tables[index].slot_offset = header.row_slot_bytes
        header.row_slot_bytes += fps_rows_bytes(&tables[index])
    header.rows_bytes = _aligned(header.rows_bytes, PAGE)
    header.row_slot_bytes = _aligned(header.row_slot_bytes, PAGE)
    for shard in range(header.n_shards):
        logged = 0
        for index in range(header.n_tables):
            if <uint32_t> tables[index].shard == shard:
                logged += tables[index].undo_bytes * tables[index].rows
        header.undo_bytes = max(header.undo_bytes, _aligned(logged, PAGE))
    return 0


cdef int _check_size(const fps_header *header) except -1:
    """Refuse measures whose size wraps around 2^64: their places would lie anywhere."""
    cdef double floats = 4.0 * header.buffer_floats + header.carried_bytes
    cdef double tables = 1024.0 * header.n_parameters + 1024.0 * header.n_groups
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


cdef list places_of(const fps_header *header, int64_t first, int64_t floats):
    """(offset, length) in bytes of these floats in every weights buffer of the workers, plane of the state and slot."""
    cdef uint64_t plane_bytes = header.buffer_floats * sizeof(float)
    cdef int width = 4 if header.gradient_type in (FPS_FLOAT32, FPS_FLOAT64) else 2
    weights = [header.weights_offset + each * header.weights_bytes for each in range(header.n_buffers)]
    state = [header.state_offset + each * header.state_bytes + header.state_steps_bytes + plane * plane_bytes
             for each in range(FPS_STATE_BUFFERS) for plane in range(header.state_planes)]
    slots = [header.slots_offset + each * header.slot_bytes + header.slot_gradient_offset
             for each in range(header.n_lanes * header.n_slots)]
    halves = [begin + plane_bytes for begin in weights] if header.shown_type != FPS_FLOAT32 else []
    return ([(begin + 4 * first, 4 * floats) for begin in weights + state]
            + [(begin + width * first, width * floats) for begin in slots]
            + [(begin + 2 * first, 2 * floats) for begin in halves])


cdef list carried_places(const fps_header *header):
    """(offset, length) in bytes of what versions carry in every weights buffer of the workers, and of what pushes bring."""
    places = [(header.weights_offset + each * header.weights_bytes + header.weights_carried_offset, header.carried_bytes)
              for each in range(header.n_buffers)]
    return places + [(header.slots_offset + each * header.slot_bytes + header.slot_carried_offset, header.carried_bytes)
                     for each in range(header.n_lanes * header.n_slots)]


cdef list _needed(const fps_header *header, list frozen, int later):
    """The ranges of bytes that get pages before the first process attaches.

    Without those of `frozen` runs of floats, and of as many weights buffers of the workers, the last ones, as `later` says.
    What versions carry beside parameters gets its pages with the first reader.
    """
    cdef uint64_t halves_offset = header.spare_weights_offset + header.buffer_floats * sizeof(float)
    ranges, kept, begin = carried_places(header) if header.n_parameters else [], [], 0
    for first, floats in frozen:
        kept.append((header.spare_weights_offset + 4 * first, 4 * floats))
        if header.shown_type != FPS_FLOAT32:
            kept.append((halves_offset + 2 * first, 2 * floats))
        ranges += places_of(header, first, floats)
    for buffer in range(header.n_buffers - later, header.n_buffers):
        ranges.append((header.weights_offset + buffer * header.weights_bytes, header.weights_bytes))
    for offset, length in sorted(ranges):
        if (end := max(begin, _aligned(offset, PAGE))) < (following := (offset + length) // PAGE * PAGE):
            kept.append((begin, end - begin))
            begin = following
    return [*kept, (begin, header.reader_weights_offset - begin)]


def plan(*, int lanes, int slots, int ring_size, int groups, int parameters, int64_t buffer_floats, int rule, int state_planes,
         int64_t extra_bytes, int buffers, int shards=1, double ema_decay=0, bint checks_finite=False,
         int gradient_type=FPS_FLOAT32, int shown_type=FPS_FLOAT32, int servers=0, int readers=0, list tables=None,
         int row_rule=0, list frozen=None, int64_t carried_bytes=0, int later=0):
    """The header of an arena of these measures and the descriptions of its tables, as bytes, the arena's size, and the ranges
    (offset, length) of it that need pages from the beginning: the others get them later, such as the buffers of readers.

    `servers`: 1 for a lane more, behind the workers', for a server process. `readers`: the most processes that only read.
    `gradient_type`: FLOAT64 if every number of the arena is a double, which takes two floats.
    `shown_type`: the half precision in which each weights buffer has the weights once more; FPS_FLOAT32: none.
    `tables`: (rows, width, parameter, group, shard) of each parameter of which pushes carry rows; `row_rule`: their rule.
    `carried_bytes`: what a version carries besides weights, a line of marks included.
    `frozen`: (first, floats) of each run of a buffer's floats without gradients so far: only the spare buffer has them.
    `later`: how many weights buffers of the workers, the last ones, get pages later.

    Sizes are in floats (4 bytes) where the name says so, else in bytes. Raises ValueError for a measure out of range.
    """
    cdef fps_header header
    cdef fps_table words[FPS_MAX_TABLES]
    cdef fps_table *table
    if lanes < 1:
        raise ValueError(f"expected 1 to {FPS_MAX_LANES} workers, found {lanes}")
    memset(&header, 0, sizeof(header))
    header.n_lanes, header.n_slots, header.ring_size, header.n_buffers = lanes, slots, ring_size, buffers
    header.n_servers, header.n_readers, header.n_shards = servers, readers, shards
    header.n_groups, header.n_parameters, header.buffer_floats = groups, parameters, buffer_floats
    header.rule, header.state_planes, header.ema_decay, header.checks_finite = rule, state_planes, ema_decay, checks_finite
    header.gradient_type, header.shown_type, header.extra_bytes = gradient_type, shown_type, extra_bytes
    header.carried_bytes = carried_bytes
    header.n_tables, header.row_rule = len(tables or []), row_rule
    _check_measures(&header)
    memset(words, 0, sizeof(words))
    for index, (rows, width, parameter, group, shard) in enumerate(tables or []):
        table = &words[index]
        table.rows, table.width, table.parameter, table.group, table.shard = rows, width, parameter, group, shard
    place_tables(words, &header)
    _place(&header)
    described = (<char *> &header)[:sizeof(fps_header)] + (<char *> words)[:header.n_tables * sizeof(fps_table)]
    return described, header.total_bytes, _needed(&header, frozen or [], later)


cdef int check_header(const fps_header *found, int64_t size) except -1:
    """Compute the header again from its measures: a place that differs would be dereferenced otherwise."""
    cdef fps_header own = found[0]
    _check_measures(found)
    _place(&own)
    if memcmp(&own, found, sizeof(own)) != 0 or own.total_bytes > <uint64_t> size:
        raise ValueError("the arena's header is damaged: its places do not follow from its measures")
    return 0
