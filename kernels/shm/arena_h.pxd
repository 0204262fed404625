# The one declaration of arena.h for Cython. The header says what each word is; words that belong together share a line.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.rows.rows_h cimport fps_undo

cdef extern from "shm/arena.h" nogil:
    const uint64_t FPS_MAGIC
    const uint32_t FPS_ABI
    enum:
        FPS_LINE, FPS_MESSAGE_BYTES
        FPS_MAX_LANES, FPS_MAX_BUFFERS, FPS_MAX_BATCH, FPS_MAX_SHARDS, FPS_MAX_CHUNKS
        FPS_STATE_BUFFERS, FPS_WORKSPACES, FPS_RECORDS
        FPS_GAP_BUCKETS, FPS_STALENESS_BUCKETS
        FPS_PUSH, FPS_NULL, FPS_LEAVE
        FPS_OUTCOME_FOLDED, FPS_OUTCOME_DROPPED, FPS_OUTCOME_REJECTED
        FPS_LANE_FREE, FPS_LANE_JOINING, FPS_LANE_LIVE, FPS_LANE_LEAVING, FPS_LANE_LEFT, FPS_LANE_FAILED, FPS_LANE_DEAD
        FPS_LANE_SERVING, FPS_LANE_EXPELLED
        FPS_DAMAGED_RING, FPS_DAMAGED_KIND, FPS_DAMAGED_SLOT, FPS_DAMAGED_TURN

    ctypedef struct fps_descriptor:
        uint64_t step, read_version
        int64_t post_ns
        double scale, loss
        uint32_t slot, kind, samples, weight

    ctypedef struct fps_lane:
        uint64_t tail, early
        uint32_t event, sleeping, helping, state
        int64_t process_id, first_core, cores
        int64_t begins, miscounted, damage
        int64_t steps, wait_ns, compute_ns, loss_bits, samples, stale_blocks, push_ns, written
        char *message

    ctypedef struct fps_lane_shard:
        uint64_t head
        int64_t granted, batch
        int64_t folded, dropped, staleness_sum, staleness_max
        uint64_t pin, ready, next
        int64_t rejected, rejected_step, rejected_parameter, rows

    uint32_t fps_member_pack(uint32_t generation, uint32_t state)
    uint32_t fps_member_state(uint32_t member)
    uint32_t fps_member_generation(uint32_t member)
    uint32_t fps_help_of(uint32_t shard, uint64_t workspace)
    uint64_t fps_damage_pack(uint64_t generation, uint64_t what, uint64_t found)

    ctypedef struct fps_record:
        uint64_t version
        uint32_t weights_buffer, state_buffer

    ctypedef struct fps_shard_header:
        uint64_t lock, commit
        fps_record *records
        int64_t due_ns, last_update_ns
        int64_t first, last
        int64_t recorded, rejections
        uint64_t reader, drawn
        fps_undo undo

    ctypedef struct fps_folded_push:
        uint32_t lane, slot, samples, weight
        uint64_t step
        double scale, rate_scale

    ctypedef struct fps_work:
        uint64_t ticket, done
        int64_t chunk_floats
        double scale, rate_scale
        int32_t mode, streaming
        uint32_t weights_in, weights_out, state_in, n_pushes, state_out
        fps_folded_push *pushes

    uint64_t fps_ticket_pack(uint64_t chunks, uint64_t left)
    uint64_t fps_ticket_chunks(uint64_t ticket)
    uint64_t fps_ticket_left(uint64_t ticket)
    uint64_t fps_chunks_of(uint64_t chunks, uint64_t part, uint64_t parts)
    uint64_t fps_ticket_choose(uint64_t ticket, uint64_t own)

    ctypedef struct fps_statistics:
        int64_t *gaps
        int64_t *staleness
        int64_t updates, average_staleness_sum, rows_written
        int64_t arrivals[1][512]

    int fps_time_bucket(int64_t ns)
    int64_t fps_bucket_time(int bucket)

    ctypedef struct fps_header:
        uint64_t magic
        uint32_t abi
        uint32_t n_lanes, n_servers, n_readers
        uint32_t n_buffers, n_slots, ring_size, presence_words
        uint32_t n_shards, n_groups, n_parameters, n_tables
        uint32_t rule, state_planes, row_rule, checks_finite, gradient_type, shown_type
        double ema_decay
        uint64_t buffer_floats, carried_bytes, total_bytes
        uint64_t shard_headers_offset, segments_offset, tables_offset, reader_words_offset
        uint64_t statistics_offset, statistics_bytes, scheduler_offset, scheduler_bytes, work_offset, work_bytes
        uint64_t lanes_offset, lane_bytes, lane_shards_offset, push_outcomes_offset
        uint64_t weights_offset, weights_bytes, weights_carried_offset, reader_weights_offset, spare_weights_offset
        uint64_t state_offset, state_bytes, state_steps_bytes, spare_state_offset
        uint64_t slots_offset, slot_bytes
        uint64_t slot_presence_offset, slot_versions_offset, slot_nonfinite_offset, slot_gradient_offset
        uint64_t slot_carried_offset
        uint64_t extra_offset, extra_bytes
        uint64_t rows_offset, rows_bytes, row_slots_offset, row_slot_bytes, undo_offset, undo_bytes

    ctypedef struct fps_readers:
        uint64_t ready, wanted
        uint32_t event
        int64_t stop

    ctypedef struct fps_reader_shard:
        uint64_t pin

    ctypedef struct fps_push_outcome:
        uint64_t position, version
        int64_t decided_ns
        int32_t staleness
        uint32_t kind

    uint64_t FPS_PENDING, FPS_LEFT, FPS_BY_HAND
    uint64_t fps_lock_pack(uint64_t epoch, uint64_t generation, uint64_t owner)
    uint64_t fps_lock_owner(uint64_t lock)
    uint64_t fps_lock_epoch(uint64_t lock)
    uint64_t fps_lock_generation(uint64_t lock)
    uint64_t fps_left_pack(uint64_t lane, uint64_t workspace)
    uint64_t fps_lock_left(uint64_t lock)
    uint64_t fps_lock_left_workspace(uint64_t lock)
    uint64_t fps_lock_own(uint64_t lock)
    uint64_t fps_lock_free(uint64_t lock)
    uint64_t fps_commit_pack(uint64_t version, uint64_t epoch, uint64_t buffer, uint64_t record)
    uint64_t fps_commit_version(uint64_t commit)
    uint64_t fps_commit_epoch(uint64_t commit)
    uint64_t fps_commit_buffer(uint64_t commit)
    uint64_t fps_commit_record(uint64_t commit)
    uint64_t fps_commit_workspace(uint64_t commit)
    const int FPS_DIGEST_BITS
    int64_t fps_written_pack(uint64_t posts, uint64_t digest)
    const int FPS_EARLY_BITS
    uint64_t fps_early_pack(uint64_t posts, uint64_t parts)
    int64_t fps_granted_pack(int64_t generation, int64_t steps)
    int64_t fps_granted_steps(int64_t granted)
    int64_t fps_granted_generation(int64_t granted)
    uint64_t fps_reader_pack(uint64_t generation, uint64_t lane, uint64_t state, uint64_t weights)
    uint64_t fps_reader_weights(uint64_t reader)
    uint64_t fps_reader_state(uint64_t reader)
    uint64_t fps_reader_owner(uint64_t reader)
