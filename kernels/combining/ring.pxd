# The functions of a lane's ring, inline because a post is a few stores.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.base.atomics cimport fps_tail_release
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.shm.arena_h cimport fps_descriptor, fps_lane

# The ring lies behind its lane's control words, and the lane-shard words behind the ring; `ring_size` is a power of two.
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
    FPS_FAILPOINT()
    lane_descriptor(lane, ring_size, tail)[0] = descriptor[0]
    fps_tail_release(&lane.tail, tail + 1)
    return 0
