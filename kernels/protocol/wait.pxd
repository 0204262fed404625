# What a lane does next while it waits, for drivers that run many lanes without Python.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.protocol.lane cimport Lane

cdef enum:
    # Longest sleep, and time between two checks of the peers: a death is reported within 100 ms.
    SLICE_NS = 20_000_000
    # Longest sleep while a timer is overdue: its combiner may be stopped, so do not spin.
    OVERDUE_NS = 200_000
    # Sleep between two tries to end a fold whose chunk a helper still has.
    HELD_NS = 100_000
    # If workers outnumber the cores, a wait begins awake where the last one was shorter than this for each worker on a core. A
    # sleep and a wake-up take long beside the steps of small models, and nothing beside those of large ones
    # (docs/experiments/yielding.md).
    SHORT_WAIT_NS = 1_000_000
    ROUNDS_AWAKE = 10  # before a worker sleeps
    POLLS_AWAKE = 4    # in a round: between two readings of the clock

# What `want` returns.
cdef enum:
    WANT_NOTHING = 0      # the wait is over
    WANT_REST = 1         # `rest`
    WANT_PAUSE = 2        # `slice_ns` without a look at any event
    WANT_CHECK_PEERS = 3  # look for peers that have died or have stopped
    WANT_EXPEL = 4        # the lane's `bad_lane` holds words that no worker of ours can have written
    WANT_TAKE_OVER = 5    # the server has ended
    WANT_EXPELLED = 6     # this lane was expelled
    WANT_FAILURE = 7      # `outcome` is an error

cdef enum:
    GOAL_OUTCOME = 0  # the combine that gave an outcome is over
    GOAL_STEP = 1    # steps are granted, and descriptors are done with
    GOAL_JOIN = 2    # every shard counts this worker
    GOAL_LAST = 3    # no other worker will push, and every push is decided
    GOAL_CALL = 4    # none: a server combines when it is called
    GOAL_OWN = 5     # the driver's own: the lane is left alone
    GOAL_ANY = 6     # the driver's own: the lane combines meanwhile


@cython.final
cdef class Wait:
    cdef readonly Lane lane
    cdef public int64_t spins, short_wait_ns, last_wait_ns, checked_ns
    cdef readonly int64_t slice_ns
    cdef readonly int outcome
    cdef readonly bint held, is_awake
    cdef int goal
    cdef int64_t granted
    cdef uint64_t done
    cdef uint32_t shards, started
    cdef int64_t longest_ns, began_ns, until_ns
    cdef int32_t rounds          # that may still be spent awake
    cdef uint32_t seen           # the lane's event, read before it last combined
    cdef bint is_told            # whether `outcome` has not been looked at
    cdef bint combines           # whether the next `want` combines
    cdef bint must_combine       # the same, and the wait is not over before

    cdef void _begin(self, int goal, int64_t now_ns, int64_t longest_ns) noexcept nogil
    cpdef void begin_step(
        self, int64_t granted, uint64_t done, int64_t now_ns, uint32_t shards=*, int64_t until_ns=*
    ) noexcept nogil
    cpdef void begin_join(self, int64_t now_ns) noexcept nogil
    cpdef void begin_last(self, uint32_t started, int64_t now_ns) noexcept nogil
    cpdef void begin_calls(self, int64_t now_ns) noexcept nogil
    cpdef void begin_outcome(self, int outcome, int64_t now_ns) noexcept nogil
    cpdef void set_outcome(self, int outcome) noexcept nogil
    cdef int _want(self, int64_t now_ns) noexcept nogil
    cdef bint _is_reached(self, int64_t now_ns) noexcept nogil
    cdef int _combine(self, int64_t now_ns) noexcept nogil
    cdef int _choose_rest(self, int64_t now_ns) noexcept nogil
    cdef bint _rest(self) noexcept nogil
