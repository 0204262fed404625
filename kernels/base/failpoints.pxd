# The one declaration of failpoints.h for Cython.

from libc.stdint cimport int64_t, uint32_t

cdef extern from "base/failpoints.h" nogil:
    void FPS_FAILPOINT()
    bint fps_mutant(int number)

    # The mutants that Cython code names: of posts and commits, of recovery, of buffers, of rows, of readers that sleep, of
    # combiners that stopped, of workers that join, of lanes that are damaged, of servers.
    enum:
        FPS_MUTANT_TAIL_FIRST, FPS_MUTANT_FLIP_FIRST, FPS_MUTANT_ACKNOWLEDGE_FIRST, FPS_MUTANT_FORGET_CURSOR
        FPS_MUTANT_FORGET_HEADS, FPS_MUTANT_BREAK_AT_ONCE, FPS_MUTANT_DONE_FIRST, FPS_MUTANT_FORGET_GENERATION
        FPS_MUTANT_FORGET_RECHECK, FPS_MUTANT_FORGET_READERS, FPS_MUTANT_FORGET_READY, FPS_MUTANT_STATE_IN_PLACE
        FPS_MUTANT_FORGET_UNDO, FPS_MUTANT_ROWS_LATE
        FPS_MUTANT_FORGET_WANTED, FPS_MUTANT_LOOK_FIRST, FPS_MUTANT_EVENT_LATE
        FPS_MUTANT_SAME_WORKSPACE, FPS_MUTANT_FOLLOW_COMMIT, FPS_MUTANT_FORGET_CONFIRM, FPS_MUTANT_FORGET_LEFT
        FPS_MUTANT_BACK_EARLY
        FPS_MUTANT_FIRST_CLOCK, FPS_MUTANT_ONE_COUNT
        FPS_MUTANT_FORGET_RING, FPS_MUTANT_READ_EXPELLED
        FPS_MUTANT_FORGET_CALL, FPS_MUTANT_CALL_LATE, FPS_MUTANT_FORGET_TAKING_OVER, FPS_MUTANT_SERVE_ON
        FPS_MUTANT_CARRY_LATE, FPS_MUTANT_GIVE_BACK_BLIND, FPS_MUTANT_SPARE_PINNED, FPS_MUTANT_PUBLISH_FIRST
        FPS_N_MUTANTS

    # Only in a build with FASTPS_HOOKS=1.
    ctypedef struct fps_failpoint_table:
        int64_t accesses, stores, die_at, stop_at, mutant
        void (*at_access)() noexcept nogil
        void (*sleep)(const uint32_t *event, uint32_t seen, int64_t slice_ns) noexcept nogil
        void (*wake)(const uint32_t *event) noexcept nogil
        void (*wait_a_little "yield")() noexcept nogil
        int64_t shared_least
    fps_failpoint_table fps_failpoints
