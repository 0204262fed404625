# A lane: one worker's way in. Ring functions for the store's turn (turn.pyx), inline because a post is a few stores.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

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

    ctypedef struct fps_descriptor:
        uint64_t step
        uint64_t read_version
        int64_t post_ns
        double scale
        double loss
        uint32_t slot
        uint32_t kind
        uint32_t samples

    ctypedef struct fps_lane:
        uint64_t tail
        uint32_t event
        uint32_t sleeping
        uint32_t helping
        uint32_t state
        int64_t process_id
        int64_t first_core
        int64_t cores
        int64_t steps
        int64_t wait_ns
        int64_t compute_ns
        int64_t loss_bits
        int64_t samples
        int64_t stale_blocks
        char *message

    ctypedef struct fps_seat:
        uint64_t head
        int64_t granted
        int64_t batch
        int64_t folded
        int64_t dropped
        int64_t staleness_sum
        int64_t staleness_max
        int64_t generation
        uint64_t pin
        uint64_t next
        int64_t rejected
        int64_t rejected_step
        int64_t rejected_parameter

cdef extern from "base/atomics.h" nogil:
    void FPS_ASSERT(bint condition)
    void fps_tail_release(uint64_t *tail, uint64_t value)
    uint64_t fps_tail_acquire(const uint64_t *tail)
    void fps_head_release(uint64_t *head, uint64_t value)
    uint64_t fps_head_acquire(const uint64_t *head)
    void fps_pause()
    void fps_plain_store()
    bint fps_mutant(int number)
    enum:
        FPS_MUTANT_TAIL_FIRST


# The ring lies behind its lane's control words, and the seats behind the ring; `ring_size` is a power of two.
cdef inline fps_descriptor *lane_descriptor(fps_lane *lane, uint32_t ring_size, uint64_t position) noexcept nogil:
    return <fps_descriptor *> (lane + 1) + (position & (ring_size - 1))


# Post one descriptor: only the lane's one producer may call this. `done`: descriptors that every shard is done with.
# Returns 0, or -1 when the ring is full.
cdef inline int lane_post(
        fps_lane *lane, uint32_t ring_size, uint64_t done, const fps_descriptor *descriptor) noexcept nogil:
    cdef uint64_t tail = lane.tail  # the producer's own word: nobody else writes it
    if tail - done >= ring_size:
        return -1
    if fps_mutant(FPS_MUTANT_TAIL_FIRST):
        fps_tail_release(&lane.tail, tail + 1)
    fps_plain_store()
    lane_descriptor(lane, ring_size, tail)[0] = descriptor[0]
    fps_tail_release(&lane.tail, tail + 1)
    return 0
