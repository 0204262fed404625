# The scheduler state as plain C structs without pointers.

from libc.stdint cimport int8_t, int32_t, int64_t

from fastps.kernels.base.failpoints cimport FPS_FAILPOINT
from fastps.kernels.scheduling.tournament cimport tournament_begin, tournament_t

cdef enum:
    FOLD_EACH = 0       # every push is folded when it is received, or with `combine` when its drain ends
    FOLD_ALL = 1        # the pushes of all live workers are folded together
    FOLD_QUORUM = 2     # a quorum's pushes of this version, and those within `timeout_ns` of them; later ones are dropped
    FOLD_COUNT = 3      # live workers // `divisor` pushes of any version; none is dropped
    FOLD_IN_ORDER = 4   # one push at a time, in the fixed order of the workers

    GRANT_AT_ONCE = 0       # go on after every push
    GRANT_NEXT_VERSION = 1  # go on when this version's fold is committed
    GRANT_BOUNDED = 2       # go on while not more than a bound ahead of the slowest
    GRANT_ROUND_ROBIN = 3   # go on in the fixed order of the workers, with a gap between two grants

    RELEASE_PRINTED = 0     # a waiting worker goes on when it is within the lower bound again
    RELEASE_NEXT_PUSH = 1   # a waiting worker goes on at the slowest worker's next push

    BOUND_NONE = 0          # `high` limits the controller's range only
    BOUND_GRANT = 1         # no worker is granted a step while it leads by more than `high`
    BOUND_PUSH = 2          # no worker leads by more than `high` after a push

    CREDIT_LISTED = 0       # r* steps beside the one that is granted with the answer (DSSP, Algorithm 1 as it is listed)
    CREDIT_PROSE = 1        # r* steps in all (the paper's text, and Figure 2)

    SCALE_ONE = 0           # as pushed
    SCALE_MEAN = 1          # mean of the pushes folded together
    SCALE_LINEAR = 2        # mean, with the learning rate times the number of pushes
    SCALE_SQUARE_ROOT = 3   # mean, with the learning rate times sqrt(samples of all / `reference`)
    SCALE_DIVISOR = 4       # mean, with the learning rate divided by `divisor`
    SCALE_STALENESS = 5     # each push times 1 / its staleness (1 where that is 0)
    SCALE_BATCH = 6         # each push's learning rate times its batch / its worker's first batch; FOLD_ALL: a mean of samples

    OF_CLOCK = 0            # a worker's place among those of its clock, in order of arrival
    OF_WAITING = 1          # its place among those that wait, valid only while it waits

    WAITS_FOR_ALL = 1       # in the list of all waiting workers
    WAITS_IN_BUCKET = 2     # in the list of its bucket

    COMBINED_MOST = 1024    # pushes of one combined sum, as many as a fold takes (FPS_MAX_PUSHES of fold.h)

    MOSTLY = 8              # where more than one of so many is meant, reading all in order is cheaper than a list

    NEVER_NS = -1           # no timer
    NO_BATCH = 0            # the size of the batch was never told

# The policy's values, as numbers.
cdef struct policy_t:
    int32_t fold, grant, release
    int32_t bound           # GRANT_BOUNDED: BOUND_NONE, or what `high` limits
    int64_t low, high
    int64_t count           # FOLD_QUORUM: c; the live workers less `backups` are enough, too; 0: they alone are
    int64_t timeout_ns      # FOLD_QUORUM: tau1
    int64_t divisor         # FOLD_COUNT: n of n-softsync
    int64_t groups          # FOLD_COUNT: leaves of a tree of servers; 0: none
    double relay            # FOLD_COUNT: the share of its live workers whose pushes a leaf waits for; 0: all
    double relax            # GRANT_ROUND_ROBIN: r, the share of T / N that lies between two grants
    double reference        # SCALE_SQUARE_ROOT: the reference batch
    int32_t scale
    int32_t tune_batches    # GRANT_ROUND_ROBIN: give fast workers larger batches; FOLD_ALL: and slow ones smaller, in one sum
    int32_t repeats         # a worker may push although it is not granted here: other shards granted it
    int32_t combine         # FOLD_EACH: the pushes that one drain finds are folded together, as one sum
    int32_t credit          # GRANT_BOUNDED: how many steps the controller's answer allows
    int32_t backups         # FOLD_QUORUM: b

# Four cache lines, in the order of use: a push under most policies touches the first alone.
cdef struct worker_t:
    int64_t dirty_at      # commit in which this struct last changed
    int64_t clock           # pushes received (t_p of DSSP's Algorithm 1)
    int64_t granted         # steps it may have begun
    int64_t granted_at      # commit in which it was last granted
    int64_t push_ns[2]      # latest and second latest push (table A of Algorithm 2)
    int64_t consumed        # descriptors of its lane that the scheduler has seen
    int32_t kept            # pushes of it that wait to be folded, or in a tree to be passed on by its leaf
    int8_t history          # pushes that push_ns holds: 0, 1 or 2
    int8_t live
    int8_t waiting          # WAITS_FOR_ALL or WAITS_IN_BUCKET; 0: it does not wait
    int8_t measured         # iteration_ns holds an iteration

    int64_t cursor          # descriptors of its lane that are done with
    int64_t kept_version    # FOLD_ALL and FOLD_QUORUM: the version whose sum they are in
    int64_t credit          # extra steps left (r_p of Algorithm 1)
    int64_t granted_ns      # GRANT_ROUND_ROBIN, or with tune_batches: when it was last granted
    int32_t next_live, previous_live    # the ring of live workers in their fixed order
    int32_t leader          # in a tree: the first worker of its leaf, which holds the leaf's own values
    int32_t next_kept       # the leaf's workers of whom it holds pushes
    int32_t leaf_first      # of a leader: the first of them, or -1
    int32_t leaf_kept       # of a leader: pushes that the leaf holds
    int32_t leaf_live       # of a leader: live workers of the leaf
    int32_t leaf_end        # of a leader: behind the last worker of the leaf

    int64_t relayed         # pushes of it that its leaf has passed on to the root
    int64_t folded, dropped, staleness_sum, staleness_max
    int64_t iteration_ns    # mean time from grant to push, exponentially weighted
    int64_t base_batch      # batch of its first push
    int64_t batch           # batch that its last grant carried

    double fit_n, fit_batch, fit_ns, fit_batch_batch, fit_batch_ns  # sums for time = a + k * batch
    double line_constant, line_slope    # a and k
    int32_t generation      # of the latest owner
    int32_t said_leave      # its last descriptor is LEAVE; 0: it lives, or it died

cdef struct ends_t:         # of a list; -1: it is empty
    int32_t first, last

cdef struct list_t:         # of workers; ends of -1: it is empty
    int32_t first, last, length

cdef struct place_t:        # in a list; -1: there is no neighbour
    int32_t next, previous

# A worker's places in lists. Apart from worker_t, so that a change of a neighbour is a change of few bytes.
cdef struct link_t:
    int64_t dirty_at
    int32_t bucket          # the bucket of its clock
    place_t places[2]       # OF_CLOCK and OF_WAITING
    int32_t unused

# All workers of one clock. Buckets form a list in order of their clocks, so that the slowest and the fastest are at its ends.
cdef struct bucket_t:
    int64_t dirty_at
    int64_t clock
    list_t members
    place_t place
    list_t waiting          # GRANT_BOUNDED: those of them that wait until the slowest has come nearer

cdef struct scheduler_t:
    policy_t policy
    int64_t links_offset    # of what lies behind this struct and worker_t[n_workers], in bytes
    int64_t buckets_offset, iterations_offset, equal_times_offset, lists_offset
    int64_t version         # folds so far, counted as the policy counts them
    int64_t now_ns          # time of the last event
    int64_t sequence        # commits so far: marks what changed in this one
    int64_t folded_ns       # time of the last fold: when this version began
    int64_t quorum_due_ns   # when the sum is closed, or NEVER_NS
    int64_t last_grant_ns   # GRANT_ROUND_ROBIN: time of the last grant, or NEVER_NS
    int64_t gap_ns          # GRANT_ROUND_ROBIN: what lies between two grants at least,
    int64_t gap_slowest_ns  # with this T
    int64_t gap_n_live      # and this N
    int32_t n_workers, n_live
    int32_t n_arrived       # live workers that have a push in this version's sum
    int32_t n_kept          # pushes in it, those of workers that left since, too; in a tree, those that reached the root
    int32_t fold_next       # FOLD_IN_ORDER: whose push is next, a live worker
    int32_t grant_next      # GRANT_ROUND_ROBIN: whose grant is next, a live worker
    int32_t n_folds         # length of the list that goes with ACTION_FOLD_LIST
    ends_t buckets
    int32_t free_bucket
    int32_t frontier        # GRANT_BOUNDED: the last bucket whose waiting workers were released by its clock, or -1
    list_t waiting          # all that wait for more than a clock
    int32_t n_dirty_workers, n_dirty_links, n_dirty_buckets

cdef int64_t state_lay_out(scheduler_t *state, int64_t n_workers) noexcept nogil
cdef int64_t state_size(int64_t n_workers) noexcept nogil
cdef void state_initialise(scheduler_t *state, int32_t n_workers, const policy_t *policy) noexcept nogil
cdef void state_copy(scheduler_t *target, const scheduler_t *source) noexcept nogil
cdef void state_catch_up(scheduler_t *target, const scheduler_t *source) noexcept nogil

cdef void state_advance(scheduler_t *state, int32_t worker) noexcept nogil
cdef void state_remove(scheduler_t *state, int32_t worker) noexcept nogil
cdef void state_add(scheduler_t *state, int32_t worker, int64_t clock, int32_t before) noexcept nogil
cdef void state_wait(scheduler_t *state, int32_t worker, int8_t waits) noexcept nogil
cdef void state_stop_waiting(scheduler_t *state, int32_t worker) noexcept nogil
cdef void state_grant(scheduler_t *state, int32_t worker) noexcept nogil
cdef void state_grant_waiting(scheduler_t *state) noexcept nogil
cdef void state_grant_within(scheduler_t *state, int64_t clock) noexcept nogil

# -- where what lies, in line, for every decision asks for it many times ------------------------------

cdef extern from * nogil:
    void prefetch "__builtin_prefetch"(const void *address)


cdef inline worker_t *state_workers(const scheduler_t *state) noexcept nogil:
    return <worker_t *> (<char *> state + ((sizeof(scheduler_t) + 63) & ~63))


cdef inline link_t *state_links(const scheduler_t *state) noexcept nogil:
    return <link_t *> (<char *> state + state.links_offset)


cdef inline bucket_t *state_buckets(const scheduler_t *state) noexcept nogil:
    return <bucket_t *> (<char *> state + state.buckets_offset)


cdef inline tournament_t *state_iterations(const scheduler_t *state) noexcept nogil:
    """GRANT_ROUND_ROBIN: iteration_ns of every live worker."""
    return <tournament_t *> (<char *> state + state.iterations_offset)


cdef inline tournament_t *state_equal_times(const scheduler_t *state) noexcept nogil:
    """GRANT_ROUND_ROBIN with tune_batches: the time that every live worker takes for its first batch."""
    return <tournament_t *> (<char *> state + state.equal_times_offset)


cdef inline int32_t *state_dirty(const scheduler_t *state) noexcept nogil:
    """Workers that changed in this commit."""
    return <int32_t *> (<char *> state + state.lists_offset)


cdef inline int32_t *state_folds(const scheduler_t *state) noexcept nogil:
    """The list that goes with ACTION_FOLD_LIST. An answer, not state: it is not copied."""
    return state_dirty(state) + state.n_workers


cdef inline void state_begin(scheduler_t *state) noexcept nogil:
    """Begin the changes of a new commit: nothing is dirty yet."""
    FPS_FAILPOINT()
    state.sequence += 1
    state.n_dirty_workers = 0
    state.n_dirty_links = 0
    state.n_dirty_buckets = 0
    if state.policy.grant == GRANT_ROUND_ROBIN:
        tournament_begin(state_iterations(state))
        tournament_begin(state_equal_times(state))


cdef inline void state_mark(
        scheduler_t *state, int64_t *dirty_at, int32_t *dirty, int32_t *n_dirty, int32_t index) noexcept nogil:
    """Add a part of the state to the list of those that changed in this commit, unless it is there."""
    if dirty_at[0] != state.sequence:
        FPS_FAILPOINT()
        dirty_at[0] = state.sequence
        dirty[n_dirty[0]] = index
        n_dirty[0] += 1


cdef inline void state_mark_dirty(scheduler_t *state, int32_t worker) noexcept nogil:
    state_mark(state, &state_workers(state)[worker].dirty_at, state_dirty(state), &state.n_dirty_workers, worker)


cdef inline int32_t state_slowest(const scheduler_t *state) noexcept nogil:
    """Fewest pushes, and of those the one that arrived there first; -1 when no worker is live."""
    return state_buckets(state)[state.buckets.first].members.first if state.buckets.first >= 0 else -1


cdef inline int64_t state_slowest_clock(const scheduler_t *state) noexcept nogil:
    """The fewest pushes of any live worker."""
    return state_buckets(state)[state.buckets.first].clock


cdef inline int64_t state_fastest_clock(const scheduler_t *state) noexcept nogil:
    """The most pushes of any live worker."""
    return state_buckets(state)[state.buckets.last].clock
