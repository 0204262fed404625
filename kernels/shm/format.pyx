"""A fresh arena: what its memory holds before the first process attaches."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastps.kernels.shm.view cimport ArenaView
from fastps.kernels.shm.arena_h cimport FPS_RECORDS, fps_commit_pack, fps_header, fps_shard_header
from fastps.kernels.update.fold cimport fps_segment
from fastps.kernels.rows.rows_h cimport fps_table
from fastps.kernels.scheduling.policy cimport policy_from_values
from fastps.kernels.scheduling.state cimport *


def format_memory(unsigned char[::1] memory not None, bytes described not None, list segments not None, *, list shards=None,
                  int started=0, list versions=None, list clocks=None, uint64_t drawn=0, **policy_values):
    """Write a fresh arena into zeroed `memory`: header and tables, segments, shards, schedulers, first records.

    `described`: the header and the tables, of `plan`. `segments`: (offset, length, group) in floats, one a parameter.
    `shards`: (first, last) in floats, one a shard; by default one that holds everything. `started`: lanes whose workers are
    counted from the beginning, 0: all; the others may join. `versions` (one a shard), `clocks` (one a started lane) and
    `drawn` continue where a job ended. The policy's values are those of fastps.kernels.scheduling.scheduler.Scheduler.
    """
    cdef fps_header *header = <fps_header *> &memory[0]
    cdef fps_segment *segment
    cdef fps_shard_header *shard_header
    cdef policy_t policy
    cdef uint32_t index
    cdef ArenaView arena
    memcpy(header, <char *> described, sizeof(fps_header))
    memcpy(&memory[0] + header.tables_offset, <char *> described + sizeof(fps_header), header.n_tables * sizeof(fps_table))
    started = started or header.n_lanes
    clocks = clocks or [0] * started
    if not 1 <= started <= <int> header.n_lanes or len(clocks) != started or min(clocks) < 0:
        raise ValueError(f"expected clocks of at least 0 for 1 to {header.n_lanes} workers, found {clocks} for {started}")
    policy_from_values(&policy, policy_values, header.n_lanes)
    for index, (offset, length, group) in enumerate(segments):
        segment = <fps_segment *> (&memory[0] + header.segments_offset) + index
        segment.offset, segment.length, segment.group, segment.parameter = offset, length, group, index
    shards = shards or [(0, header.buffer_floats)]
    if len(shards) != header.n_shards:
        raise ValueError(f"expected {header.n_shards} shards, found {len(shards)}")
    for index, (first, last) in enumerate(shards):
        shard_header = <fps_shard_header *> (&memory[0] + header.shard_headers_offset) + index
        shard_header.first, shard_header.last = first, last
    arena = ArenaView(memory)
    versions = versions or [0] * len(shards)
    if len(versions) != len(shards) or not all(0 <= version < 1 << 40 for version in versions):
        raise ValueError(f"expected {header.n_shards} versions of 0 to 2^40, found {versions}")
    for index in range(header.n_shards):
        _format_shard(arena, index, &policy, clocks, versions[index])
    arena.shard_header(0).drawn = drawn


cdef int _format_shard(ArenaView arena, uint32_t shard, const policy_t *policy, list clocks, int64_t version) except -1:
    cdef scheduler_t *state = arena.scheduler(shard, 0)
    cdef uint32_t lane
    cdef int record
    arena.shard_header(shard).due_ns = -1
    state_initialise(state, arena.header.n_lanes, policy)
    state.version = version
    for lane in range(arena.header.n_lanes):
        state_remove(state, lane)
    for lane, clock in enumerate(clocks):
        state_add(state, lane, clock, -1)
        state_workers(state)[lane].granted = clock + 1
    arena.shard_header(shard).commit = fps_commit_pack(version, 0, 0, 0)
    for record in range(FPS_RECORDS):
        arena.shard_header(shard).records[record].version = version
    arena.scheduler(shard, 1).n_workers = arena.header.n_lanes
    state_copy(arena.scheduler(shard, 1), arena.scheduler(shard, 0))
    for lane in range(arena.header.n_lanes):
        arena.lane_shard(lane, shard).granted = state_workers(state)[lane].granted
    return 0
