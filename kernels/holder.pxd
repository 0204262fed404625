# The turn of one shard as one lane takes it, for the lane's worker (turn.pyx).

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.arena cimport Arena, fps_domain, fps_folded_push
from fastps.kernels.lane cimport fps_descriptor
from fastps.kernels.roster cimport policy_t, scheduler_t
from fastps.kernels.shared_fold cimport SharedFold

# Outcomes of a turn.
cdef enum:
    TURN_DONE = 0
    TURN_BUSY = 1
    TURN_LOST = 2
    TURN_AWAITING = 3   # held, until a helper has given its chunk back: look whether it lives, then resume
    TURN_BAD_DESCRIPTOR = -1
    TURN_NO_BUFFER = -2
    TURN_BAD_FOLD = -3
    TURN_BAD_STATE = -4  # the scheduler's state cannot be walked

cdef class Holder:
    cdef Arena arena
    cdef fps_domain *domain
    cdef uint32_t lane
    cdef uint32_t shard
    cdef int bad_lane           # of the last TURN_BAD_DESCRIPTOR
    cdef uint64_t turn          # the turn word while this lane holds it
    cdef uint64_t seen          # the commit word that this turn's flip expects
    cdef int64_t now_ns         # when the turn was tried: which timers are due
    cdef SharedFold fold
    cdef scheduler_t expected   # what must hold of the shard's state
    cdef bint is_checked        # whether the state was looked at in this turn: from then on it is this lane's own
    cdef bint hands_over        # this lane cannot fold, for the shard is on another's device: it lets go without draining
    cdef int64_t spare_buffer   # the weights buffer that `spare` gave out, or that is folded into
    cdef uint32_t spare_state   # the state buffer that goes with it
    cdef uint32_t generation    # of this lane's owner: a turn is its owner's, not its lane's
    cdef int awaiting           # what is waited for while TURN_AWAITING
    # Scratch of a turn, allocated once.
    cdef uint64_t *tails
    cdef uint32_t *members
    cdef uint32_t *to_wake
    cdef uint32_t n_to_wake
    cdef uint32_t n_batch
    cdef int64_t batch_samples
    cdef int64_t staleness_of_update
    cdef int64_t pushes_of_update

    cdef int try_turn(self, int64_t now_ns) noexcept nogil
    cdef bint take(self) noexcept nogil
    cdef int resume(self, int64_t now_ns) noexcept nogil
    cdef int run(self, int outcome=*) noexcept nogil
    cdef int break_turn(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil
    cdef int64_t spare(self) noexcept nogil
    cdef int release(self, bint publish, int64_t now_ns) noexcept nogil

    cdef void _nudge(self) noexcept nogil
    cdef int _hand_over(self) noexcept nogil
    cdef void nudge_all(self) noexcept nogil
    cdef void _wake(self) noexcept nogil
    cdef int _drain(self) noexcept nogil
    cdef int _commit_once(self) noexcept nogil
    cdef scheduler_t *_begin(self, uint64_t record) noexcept nogil
    cdef void _look(self) noexcept nogil
    cdef fps_descriptor *_earliest(self, scheduler_t *state, uint32_t *lane) noexcept nogil
    cdef int _next_event(self, scheduler_t *state) noexcept nogil
    cdef int _next_change(self, scheduler_t *state) noexcept nogil
    cdef int64_t _clock_of(self, uint32_t lane) noexcept nogil
    cdef uint32_t _free_state(self) noexcept nogil
    cdef int _reject(self) noexcept nogil
    cdef void _count_rejection(self, const fps_folded_push *push, int32_t parameter) noexcept nogil
    cdef int _receive(self, scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil
    cdef int _take_push(self, scheduler_t *state, uint32_t lane, uint64_t position, int64_t version) noexcept nogil
    cdef void _write_fate(self, const scheduler_t *state, uint32_t lane, uint64_t position, uint32_t kind, uint64_t version,
                          int64_t staleness) noexcept nogil
    cdef int _take_listed(self, scheduler_t *state) noexcept nogil
    cdef int _gather(self, scheduler_t *state) noexcept nogil
    cdef void _end_update(self, scheduler_t *state) noexcept nogil
    cdef int64_t _free_buffer(self) noexcept nogil
    cdef int _fold_and_flip(self, scheduler_t *state, uint64_t record) noexcept nogil
    cdef int _end_fold(self, int outcome) noexcept nogil
    cdef int _commit(self, scheduler_t *state, uint64_t record, uint32_t state_buffer) noexcept nogil
    cdef int _flip(self, scheduler_t *state, uint64_t weights_buffer, uint64_t record) noexcept nogil
    cdef void _order(self, scheduler_t *state, uint32_t state_in) noexcept nogil
    cdef double _rate_scale(self, const policy_t *policy) noexcept nogil
    cdef void _publish(self, scheduler_t *state) noexcept nogil
    cdef void _publish_seat(self, scheduler_t *state, uint32_t index) noexcept nogil
    cdef void _rouse(self, uint32_t index) noexcept nogil
    cdef void _repair(self) noexcept nogil
