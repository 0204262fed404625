# The one declaration of arena.h for Cython.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.rows.rows_h cimport fps_undo

cdef extern from "shm/arena.h" nogil:
    const uint64_t FPS_MAGIC
    const uint32_t FPS_ABI
    enum:
        FPS_LINE
        FPS_MAX_LANES
        FPS_MAX_BUFFERS
        FPS_MAX_BATCH
        FPS_MAX_SHARDS
        FPS_MESSAGE_BYTES
        FPS_PUSH
        FPS_NULL
        FPS_LEAVE
        FPS_LANE_FREE
        FPS_LANE_LIVE
        FPS_LANE_LEFT
        FPS_LANE_FAILED
        FPS_LANE_LEAVING
        FPS_LANE_DEAD
        FPS_LANE_JOINING
        FPS_LANE_SERVING
        FPS_LANE_EXPELLED
        FPS_DAMAGED_RING
        FPS_DAMAGED_KIND
        FPS_DAMAGED_SLOT
        FPS_DAMAGED_TURN

    ctypedef struct fps_descriptor:
        uint64_t step
        uint64_t read_version
        int64_t post_ns
        double scale
        double loss
        uint32_t slot
        uint32_t kind
        uint32_t samples
        uint32_t weight

    ctypedef struct fps_lane:
        uint64_t tail
        uint32_t event
        uint32_t sleeping
        uint32_t helping
        uint32_t state
        int64_t process_id
        int64_t first_core
        int64_t cores
        int64_t begins
        int64_t miscounted
        int64_t damage
        int64_t steps
        int64_t wait_ns
        int64_t compute_ns
        int64_t loss_bits
        int64_t samples
        int64_t stale_blocks
        int64_t push_ns
        char *message

    ctypedef struct fps_lane_shard:
        uint64_t head
        int64_t granted
        int64_t batch
        int64_t folded
        int64_t dropped
        int64_t staleness_sum
        int64_t staleness_max
        uint64_t pin
        uint64_t ready
        uint64_t next
        int64_t rejected
        int64_t rejected_step
        int64_t rejected_parameter
        int64_t rows

    enum:
        FPS_STATE_BUFFERS
        FPS_WORKSPACES
        FPS_RECORDS

    uint32_t fps_member_pack(uint32_t generation, uint32_t state)
    uint32_t fps_member_state(uint32_t member)
    uint32_t fps_member_generation(uint32_t member)
    uint32_t fps_help_of(uint32_t shard, uint64_t workspace)
    uint64_t fps_damage_pack(uint64_t generation, uint64_t what, uint64_t found)

    ctypedef struct fps_record:
        uint64_t version
        uint32_t weights_buffer
        uint32_t state_buffer

    ctypedef struct fps_shard_header:
        uint64_t lock
        uint64_t commit
        fps_record *records
        int64_t due_ns
        int64_t last_update_ns
        int64_t first
        int64_t last
        int64_t recorded
        int64_t rejections
        uint64_t reader
        uint64_t drawn
        fps_undo undo

    ctypedef struct fps_folded_push:
        uint32_t lane
        uint32_t slot
        uint32_t samples
        uint32_t weight
        uint64_t step
        double scale
        double rate_scale

    ctypedef struct fps_work:
        uint64_t ticket
        uint64_t done
        int64_t chunk_floats
        double scale
        double rate_scale
        int32_t mode
        int32_t streaming
        uint32_t weights_in
        uint32_t weights_out
        uint32_t state_in
        uint32_t n_pushes
        uint32_t state_out
        fps_folded_push *pushes

    enum:
        FPS_MAX_CHUNKS

    uint64_t fps_ticket_pack(uint64_t chunks, uint64_t left)
    uint64_t fps_ticket_chunks(uint64_t ticket)
    uint64_t fps_ticket_left(uint64_t ticket)
    uint64_t fps_chunks_of(uint64_t chunks, uint64_t part, uint64_t parts)
    uint64_t fps_ticket_choose(uint64_t ticket, uint64_t own)

    enum:
        FPS_GAP_BUCKETS
        FPS_STALENESS_BUCKETS

    ctypedef struct fps_statistics:
        int64_t *gaps
        int64_t *staleness
        int64_t updates
        int64_t average_staleness_sum
        int64_t rows_written
        int64_t arrivals[1][512]

    int fps_time_bucket(int64_t ns)
    int64_t fps_bucket_time(int bucket)

    ctypedef struct fps_header:
        uint64_t magic
        uint32_t abi
        uint32_t n_lanes
        uint32_t n_buffers
        uint32_t n_slots
        uint32_t ring_size
        uint32_t n_groups
        uint32_t n_parameters
        uint32_t presence_words
        uint32_t rule
        uint32_t state_planes
        uint32_t n_shards
        uint32_t checks_finite
        uint32_t gradient_type
        uint32_t shown_type
        uint32_t n_readers
        uint32_t n_tables
        uint32_t row_rule
        uint32_t n_servers
        double ema_decay
        uint64_t buffer_floats
        uint64_t shard_headers_offset
        uint64_t statistics_offset
        uint64_t statistics_bytes
        uint64_t work_offset
        uint64_t work_bytes
        uint64_t segments_offset
        uint64_t tables_offset
        uint64_t lanes_offset
        uint64_t lane_bytes
        uint64_t lane_shards_offset
        uint64_t reader_words_offset
        uint64_t push_outcomes_offset
        uint64_t scheduler_offset
        uint64_t scheduler_bytes
        uint64_t rows_offset
        uint64_t rows_bytes
        uint64_t weights_offset
        uint64_t weights_bytes
        uint64_t state_offset
        uint64_t state_bytes
        uint64_t state_steps_bytes
        uint64_t slots_offset
        uint64_t slot_bytes
        uint64_t slot_presence_offset
        uint64_t slot_versions_offset
        uint64_t slot_nonfinite_offset
        uint64_t slot_gradient_offset
        uint64_t extra_offset
        uint64_t extra_bytes
        uint64_t reader_weights_offset
        uint64_t spare_weights_offset
        uint64_t spare_state_offset
        uint64_t undo_offset
        uint64_t undo_bytes
        uint64_t row_slots_offset
        uint64_t row_slot_bytes
        uint64_t total_bytes

    ctypedef struct fps_readers:
        uint64_t ready
        uint64_t wanted
        uint32_t event

    ctypedef struct fps_reader_shard:
        uint64_t pin

    ctypedef struct fps_push_outcome:
        uint64_t position
        uint64_t version
        int64_t decided_ns
        int32_t staleness
        uint32_t kind

    enum:
        FPS_OUTCOME_FOLDED
        FPS_OUTCOME_DROPPED
        FPS_OUTCOME_REJECTED

    uint64_t FPS_PENDING
    uint64_t FPS_LEFT
    uint64_t FPS_BY_HAND
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
    int64_t fps_granted_pack(int64_t generation, int64_t steps)
    int64_t fps_granted_steps(int64_t granted)
    int64_t fps_granted_generation(int64_t granted)
    uint64_t fps_reader_pack(uint64_t generation, uint64_t lane, uint64_t state, uint64_t weights)
    uint64_t fps_reader_weights(uint64_t reader)
    uint64_t fps_reader_state(uint64_t reader)
    uint64_t fps_reader_owner(uint64_t reader)
