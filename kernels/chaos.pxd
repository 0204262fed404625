# A simulated world of workers that run the real protocol; chaos.pyx.

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.arena cimport Arena
from fastps.kernels.lane cimport fps_descriptor
from fastps.kernels.turn cimport Lane
from fastps.kernels.witness cimport Witness

cdef extern from "coroutine.h" nogil:
    ctypedef struct fps_coroutine:
        bint has_ended
    int fps_coroutine_make(fps_coroutine *coroutine)
    void fps_coroutine_free(fps_coroutine *coroutine)
    void fps_coroutine_begin(fps_coroutine *coroutine, void (*body)(int) noexcept nogil, int number)
    void fps_coroutine_yield(fps_coroutine *coroutine)
    void fps_coroutine_resume(fps_coroutine *coroutine)

# What a simulated process does just now.
cdef enum:
    RUNS = 0
    SLEEPS = 1      # until its event moves, or a time
    STALLED = 2     # stopped, until a time
    DEAD = 3
    ENDED = 4
    RESTARTS = 5    # dead, until its replacement begins

# Kinds of faults, counted.
cdef enum:
    FAULT_CRASH = 0
    FAULT_STALL = 1
    FAULT_WAKE = 2      # a sleeper wakes for nothing, as by a signal
    FAULT_SKEW = 3      # a process whose clock is wrong
    FAULT_SLOW = 4      # a process that is given few steps
    FAULT_RESTART = 5   # another process takes the lane of one that died
    N_FAULTS = 6

cdef struct process_t:
    int32_t state
    int64_t until_ns
    const uint32_t *event
    int64_t skew_ns
    uint32_t weight             # how often it is chosen
    int64_t died_ns
    bint noticed                # by a survivor
    int64_t looked_ns
    uint32_t generation         # how many had this lane before
    uint32_t buried[8]          # of each lane, the owners whom this process knows to be dead
    int64_t steps               # as the scheduler counts them
    int64_t pushes
    uint64_t posts
    uint32_t slot
    uint64_t slot_free_at[8]
    uint32_t fetched            # shards that it reads, as bits
    uint64_t versions[2]
    int64_t buffers[2]

cdef class World:
    cdef Arena arena
    cdef Witness witness
    cdef object memory
    cdef int64_t memory_bytes
    cdef list lanes
    cdef PyObject *_lanes[8]
    cdef fps_coroutine coroutines[8]
    cdef process_t processes[8]
    cdef int32_t n_workers
    cdef int32_t n_shards
    cdef int32_t n_steps
    cdef int32_t runs           # the process that runs, or -1
    cdef bint over              # a violation, or too many events: nobody is resumed again
    cdef int64_t now_ns
    cdef int64_t events
    cdef int64_t calm_events    # events since the last fault
    cdef int64_t calm_ns        # when that was over
    cdef uint64_t random
    # What the seed decides.
    cdef uint32_t switch_share, crash_share, stall_share, wake_share, null_share    # of 2 ** 16, or 2 ** 24 for faults
    cdef uint32_t busy_factor   # by how much likelier a fault is for who folds
    cdef int32_t crashes_left
    cdef int32_t stalls_left
    cdef int32_t spins
    cdef bint at_once
    cdef bint is_partial
    cdef bint has_adagrad
    cdef int32_t restarts_left
    cdef list spares
    cdef PyObject *_spares[8][4]    # by generation, from 1 on
    cdef int64_t worst_detection_ns
    cdef int64_t faults[6]

    cdef void _make_processes(self, double skew_ns) noexcept
    cdef uint64_t _draw(self) noexcept nogil
    cdef void _at_access(self) noexcept nogil
    cdef bint _may_die(self, process_t *me) noexcept nogil
    cdef void _die(self, process_t *me) noexcept nogil
    cdef bint _is_busy(self) noexcept nogil
    cdef void _sleep(self, const uint32_t *event, uint32_t seen, int64_t slice_ns) noexcept nogil
    cdef void _pause(self, int64_t duration_ns) noexcept nogil
    cdef void _wake_sleeper(self, const uint32_t *event) noexcept nogil
    cdef void _switch(self) noexcept nogil
    cdef int32_t _choose(self) noexcept nogil
    cdef void _run(self) noexcept nogil
    cdef int64_t _clock(self, process_t *me) noexcept nogil
    cdef void _live(self, int32_t index) noexcept nogil
    cdef void _pull(self, int32_t index, bint is_first) noexcept nogil
    cdef void _check_reads(self, int32_t index) noexcept nogil
    cdef void _compute(self, int32_t index) noexcept nogil
    cdef void _write_slot(self, int32_t index, int64_t step) noexcept nogil
    cdef void _push(self, int32_t index, uint32_t kind) noexcept nogil
    cdef void _post(self, int32_t index, uint32_t kind) noexcept nogil
    cdef void _wait(self, int32_t index, int64_t granted, uint64_t done, uint32_t shards) noexcept nogil
    cdef void _try_turn(self, int32_t index) noexcept nogil
    cdef void _look_around(self, int32_t index) noexcept nogil
    cdef void _join(self, int32_t index) noexcept nogil
    cdef uint32_t _dead_owners(self, int32_t lane) noexcept nogil
    cdef void _begin_life(self, int32_t index) noexcept nogil
    cdef bint _others_are_done(self, int32_t index) noexcept nogil
    cdef void _leave(self, int32_t index) noexcept nogil
