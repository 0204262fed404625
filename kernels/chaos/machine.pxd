# The machine of a simulated job, for the processes that run on it.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.chaos.invariants cimport MAX_WORKERS, InvariantChecker

cdef extern from "chaos/coroutine.h" nogil:
    ctypedef struct fps_coroutine:
        pass
    int fps_coroutine_make(fps_coroutine *coroutine)
    void fps_coroutine_free(fps_coroutine *coroutine)
    void fps_coroutine_begin(fps_coroutine *coroutine, void (*body)(int) noexcept nogil, int number)
    void fps_coroutine_yield(fps_coroutine *coroutine)
    void fps_coroutine_resume(fps_coroutine *coroutine)

cdef extern from "memory/mapping.h" nogil:
    ctypedef struct fps_view:
        pass
    ctypedef struct fps_mapping:
        char *address
        fps_view *view
    fps_mapping *fps_mapping_open(int descriptor, size_t bytes, int writable, int is_private)
    void fps_mapping_close(fps_mapping *mapping)
    void fps_view_renew(fps_view *view)

cdef enum:
    MOST_LIVES = 4                  # of one place: the first process's, and those of its replacements

# What a simulated process does just now.
cdef enum:
    RUNS = 0
    SLEEPS = 1      # until its event moves, or a time
    STALLED = 2     # stopped, until a time
    DEAD = 3
    ENDED = 4
    RESTARTS = 5    # dead, until its replacement begins

# Faults, counted.
cdef struct faults_t:
    int64_t crashes, stalls
    int64_t spurious_wakes  # a sleeper wakes for nothing, as by a signal
    int64_t skewed_clocks
    int64_t slow_processes  # given few steps
    int64_t restarts        # another process takes the lane of one that died
    int64_t passed_by       # processes that held up the others

cdef struct process_t:
    int32_t state
    int64_t until_ns
    const uint32_t *event
    int64_t skew_ns
    uint32_t weight         # how often it is chosen
    int64_t died_ns
    bint noticed            # by a survivor
    bint settled            # a survivor saw it, recovered its locks and marked it dead
    uint32_t generation     # how many had this place before

cdef class Machine:
    cdef fps_coroutine coroutines[MAX_WORKERS]
    cdef process_t processes[MAX_WORKERS]
    cdef int32_t n_processes
    cdef int32_t n_places       # of these so many, the first ones, are replaced when they die
    cdef Arena arena
    cdef InvariantChecker checker
    cdef fps_mapping **views    # of each place, the private view of the arena's memory
    cdef int32_t runs           # the process that runs, or -1
    cdef bint over              # a violation, or too many events: no process is resumed again
    cdef int64_t now_ns, events
    cdef int64_t calm_events    # events since the last fault
    cdef int64_t calm_ns        # when that was over
    cdef int64_t worst_detection_ns
    cdef faults_t faults
    # What the seed decides.
    cdef uint64_t random
    cdef uint32_t switch_share, crash_share, stall_share, wake_share    # of 2 ** 16, or 2 ** 24 for faults
    cdef uint32_t pass_share     # of 2 ** 16: how often a process that finds a lock taken passes its owner by
    cdef uint32_t busy_factor   # by how much likelier a fault is for a process that folds
    cdef int32_t crashes_left, stalls_left, restarts_left

    # The job's own.
    cdef void born(self, int32_t index) noexcept nogil
    cdef void live(self, int32_t index) noexcept nogil

    # For the processes.
    cdef uint64_t draw(self) noexcept nogil
    cdef int64_t clock(self, int32_t index) noexcept nogil
    cdef void at_access(self) noexcept nogil
    cdef void pause(self, int64_t duration_ns) noexcept nogil
    cdef uint32_t deaths(self, int32_t index) noexcept nogil
    cdef void notice(self, int32_t dead) noexcept nogil

    cdef void _begin(self, double skew_ns) noexcept
    cdef void _sleep(self, const uint32_t *event, uint32_t seen, int64_t slice_ns) noexcept nogil
    cdef void _wake_sleeper(self, const uint32_t *event) noexcept nogil
    cdef bint _may_die(self, const process_t *me) noexcept nogil
    cdef void _die(self, process_t *me) noexcept nogil
    cdef bint _is_busy(self, int32_t index) noexcept nogil
    cdef void _freeze(self) noexcept nogil
    cdef void _begin_life(self, int32_t index) noexcept nogil
    cdef void _replace(self, int32_t index) noexcept nogil
    cdef void _switch(self) noexcept nogil
    cdef int32_t _choose(self) noexcept nogil
    cdef void _run(self) noexcept nogil
