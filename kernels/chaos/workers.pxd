# The workers of a simulated job.

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.chaos.machine cimport MOST_LIVES, Machine
from fastps.kernels.chaos.invariants cimport MAX_WATCHED_SHARDS, MAX_WORKERS, InvariantChecker

# A worker's private memory.
cdef struct life_t:
    uint32_t generation         # how many had this lane before
    uint32_t marked_dead[MAX_WORKERS]          # of each lane, the owners whom this process knows to be dead
    int64_t pushes
    int64_t buffers[MAX_WATCHED_SHARDS]
    uint64_t fetched[MAX_WATCHED_SHARDS]       # commit words: of the last fetch in the background,
    uint64_t kept[MAX_WATCHED_SHARDS]          # and of what the next step reads
    int64_t read_buffers[MAX_WATCHED_SHARDS]   # of its reader

cdef class Workers:
    cdef Machine machine
    cdef Arena arena
    cdef InvariantChecker checker
    cdef list lanes
    cdef list waits
    cdef PyObject *_all_waits[MAX_WORKERS][MOST_LIVES]     # the same, by lane and generation
    cdef PyObject *_waits[MAX_WORKERS]            # of the present owners
    cdef PyObject *_lanes[MAX_WORKERS]            # of the present owners
    cdef list readers
    cdef PyObject *_readers[MAX_WORKERS]          # the same; NULL where nothing is read
    cdef life_t lives[MAX_WORKERS]
    cdef int32_t n_workers
    cdef int32_t n_processes                      # workers, and a server if there is one: the last
    cdef int32_t n_shards
    # What the seed decides.
    cdef int32_t n_steps
    cdef int32_t spins
    cdef bint at_once
    cdef bint is_partial
    cdef int32_t wounds_left            # lanes whose words may be damaged
    cdef bint reads_rows                # whether a step reads rows of one version: all wait for all
    cdef bint fetches                   # whether workers fetch in the background
    cdef uint32_t null_share            # of 2 ** 16

    cdef void play(self, double skew_ns, int64_t shared_least)

    cdef void _be_born(self, int32_t index) noexcept nogil
    cdef void _live(self, int32_t index) noexcept nogil
    cdef void _join(self, int32_t index) noexcept nogil
    cdef void _compute(self, int32_t index) noexcept nogil
    cdef void _pull(self, int32_t index, bint is_first) noexcept nogil
    cdef void _fetch(self, int32_t index) noexcept nogil
    cdef void _read(self, int32_t index) noexcept nogil
    cdef void _sleep_as_reader(self, int32_t index) noexcept nogil
    cdef bint _is_any_locked(self) noexcept nogil
    cdef void _check_reader(self, int32_t index) noexcept nogil
    cdef void _check_reads(self, int32_t index) noexcept nogil
    cdef void _push(self, int32_t index, uint32_t kind) noexcept nogil
    cdef void _wait_for_room(self, int32_t index) noexcept nogil
    cdef void _advance(self, int32_t index) noexcept nogil
    cdef void _drive(self, int32_t index) noexcept nogil
    cdef void _take_over(self, int32_t index) noexcept nogil
    cdef void _serve(self, int32_t index) noexcept nogil
    cdef bint _is_over(self) noexcept nogil
    cdef void _promise(self, int32_t index, int64_t posted) noexcept nogil
    cdef void _settle(self, int32_t index, int outcome) noexcept nogil
    cdef int _pass_by(self, int32_t index) noexcept nogil
    cdef void _check_peers(self, int32_t index) noexcept nogil
    cdef void _leave(self, int32_t index) noexcept nogil
    cdef void _wound(self) noexcept nogil
    cdef void _expel(self, int32_t index, int32_t bad, uint64_t damage) noexcept nogil
    cdef bint _is_out(self, int32_t index) noexcept nogil
    cdef void _end_expelled(self, int32_t index) noexcept nogil
