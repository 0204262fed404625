"""The lanes as the combiner of a shard reads them at the begin of a commit: what is posted, and which workers come and go.

A descriptor is checked before the scheduler hears of it. A lane whose words no worker can have written is named, and its owner
can then be expelled: nothing of it is read any more. Damage in what an earlier owner posted is not blamed on the present one:
what is left of the earlier one is dropped.
"""

cimport cython
from libc.stdint cimport UINT64_MAX, int32_t
from libc.stdlib cimport calloc, free

from fastps.kernels.base.atomics cimport *
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.combining.event_log cimport EVENT_DEATH, EVENT_EXPULSION, EVENT_JOIN
from fastps.kernels.combining.lock_word cimport COMBINE_BAD_DESCRIPTOR, COMBINE_DONE
from fastps.kernels.combining.ring cimport lane_descriptor
from fastps.kernels.scheduling.decisions cimport ACTION_NONE, scheduler_join, scheduler_leave
from fastps.kernels.scheduling.state cimport *
from fastps.kernels.shm.arena_h cimport *


@cython.final
cdef class LaneReads:
    """All lanes of `arena` as shard `shard` sees them. For the combiner only."""

    def __cinit__(self, Arena arena not None, uint32_t shard, EventLog log not None):
        self.arena = arena
        self.shard = shard
        self.log = log
        self.bad_lane = -1
        self.seen = <lane_read_t *> calloc(arena.header.n_lanes, sizeof(lane_read_t))
        if not self.seen:
            raise MemoryError()

    def __dealloc__(self):
        free(self.seen)

    cdef void read(self) noexcept nogil:
        """Read every lane, at the begin of a commit."""
        cdef uint32_t index
        cdef lane_read_t *seen = self.seen
        for index in range(self.arena.header.n_lanes):
            # The state first: the tail of a worker that is proved dead is then its last.
            seen[index].member = fps_state_acquire(&self.arena.lane(index).state)
        if self.shard > 0:
            # Before any tail: what the first shard had received when it admitted a lane's owner is then in these tails.
            for index in range(self.arena.header.n_lanes):
                if fps_member_state(seen[index].member) == FPS_LANE_JOINING:
                    seen[index].first_clock = self._first_clock(index)
        for index in range(self.arena.header.n_lanes):
            seen[index].tail = fps_tail_acquire(&self.arena.lane(index).tail)
            seen[index].head = fps_head_acquire(&self.arena.lane_shard(index, self.shard).head)
            seen[index].begins = <uint64_t> fps_counter_get(&self.arena.lane(index).begins)
            if fps_member_state(seen[index].member) == FPS_LANE_EXPELLED:
                seen[index].begins = UINT64_MAX
            seen[index].closed = False

    cdef fps_descriptor *earliest(self, scheduler_t *state, uint32_t *lane) noexcept nogil:
        """The earliest descriptor not seen yet, or NULL; of equal times that of the lowest lane."""
        cdef worker_t *workers = state_workers(state)
        cdef lane_read_t *seen = self.seen
        cdef fps_descriptor *descriptor
        cdef fps_descriptor *earliest = NULL
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            if seen[index].begins <= <uint64_t> workers[index].consumed < seen[index].tail and not seen[index].closed:
                descriptor = lane_descriptor(self.arena.lane(index), self.arena.header.ring_size, workers[index].consumed)
                if earliest == NULL or descriptor.post_ns < earliest.post_ns:
                    earliest = descriptor
                    lane[0] = index
        return earliest

    # -- what is damaged -----------------------------------------------------------------------------

    cdef int bad(self, uint32_t lane, uint64_t what, uint64_t found) noexcept nogil:
        """Note what is damaged in a lane's words."""
        self.bad_lane = lane
        self.damage = fps_damage_pack(fps_member_generation(self.seen[lane].member), what, found)
        return COMBINE_BAD_DESCRIPTOR

    cdef int check(self, const scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil:
        """COMBINE_BAD_DESCRIPTOR for a descriptor that no worker can have posted, COMBINE_DONE for another."""
        cdef const worker_t *worker = &state_workers(state)[lane]
        if self.seen[lane].tail - worker.cursor > self.arena.header.ring_size:
            return self.bad(lane, FPS_DAMAGED_RING, self.seen[lane].tail)
        if descriptor.kind > FPS_LEAVE:
            return self.bad(lane, FPS_DAMAGED_KIND, descriptor.kind)
        if descriptor.slot >= max(self.arena.header.n_slots, <uint32_t> 1):  # a publisher has none, and says 0 as it leaves
            return self.bad(lane, FPS_DAMAGED_SLOT, descriptor.slot)
        if not worker.live or (worker.waiting and descriptor.kind != FPS_LEAVE and not state.policy.repeats):
            return self.bad(lane, FPS_DAMAGED_TURN, descriptor.step)
        return COMBINE_DONE

    cdef bint close(self, const scheduler_t *state, uint32_t lane) noexcept nogil:
        """Read no more of a lane in this commit, if what `check` found damaged was posted by an owner before the present one.

        Not for a count of posts that the ring cannot hold: each owner begins with a count that is right.
        """
        cdef uint64_t cursor = state_workers(state)[lane].cursor
        if not self._has_heir(state, lane) or self.seen[lane].tail - cursor > self.arena.header.ring_size:
            return False
        self.seen[lane].closed = True
        return True

    cdef bint _has_heir(self, const scheduler_t *state, uint32_t lane) noexcept nogil:
        """Whether this shard has not admitted the lane's owner. It has posted nothing then: it waits for all shards."""
        return state_workers(state)[lane].generation != <int32_t> fps_member_generation(self.seen[lane].member)

    # -- lanes that leave and join -----------------------------------------------------------------

    cdef int next_change(self, scheduler_t *state, int64_t now_ns, uint32_t first, uint32_t end) noexcept nogil:
        """Retire workers that died or were expelled, then admit those that join, once everything posted is decided.

        Of the lanes from `first` to `end`. Returns the scheduler's action, NOTHING or a negative outcome.
        Both follow from the lane's state word and from what is committed, so each happens once, whichever lane combines.
        """
        cdef uint32_t lane, member
        cdef worker_t *worker
        for lane in range(first, end):
            member = fps_member_state(self.seen[lane].member)
            worker = &state_workers(state)[lane]
            if self.seen[lane].begins <= <uint64_t> worker.consumed and self.seen[lane].tail < <uint64_t> worker.consumed:
                return self.bad(lane, FPS_DAMAGED_RING, self.seen[lane].tail)
            if worker.live and (member == FPS_LANE_DEAD or member == FPS_LANE_EXPELLED or self._has_heir(state, lane)):
                return self._note(state, lane, EVENT_EXPULSION if member == FPS_LANE_EXPELLED else EVENT_DEATH,
                                  scheduler_leave(state, lane, now_ns))
        for lane in range(first, end):
            worker = &state_workers(state)[lane]
            # The slots still hold what the lane's last owner pushed and what is kept for a fold.
            if worker.live or worker.cursor != worker.consumed:
                continue
            if self._move_on(state, lane):
                return self._note(state, lane, EVENT_EXPULSION, ACTION_NONE)
            if (fps_member_state(self.seen[lane].member) == FPS_LANE_JOINING and self._has_heir(state, lane)
                    and (self.shard == 0 or self.seen[lane].first_clock >= 0)):
                scheduler_join(state, lane, now_ns, self._clock_for(state, lane))
                worker.generation = fps_member_generation(self.seen[lane].member)
                return self._note(state, lane, EVENT_JOIN, ACTION_NONE)
        return NOTHING

    cdef int _note(self, scheduler_t *state, uint32_t lane, int kind, int action) noexcept nogil:
        """Log this change. Returns the action."""
        self.log.add(kind, lane, state_workers(state)[lane].consumed, state.now_ns)
        return action

    cdef bint _move_on(self, scheduler_t *state, uint32_t lane) noexcept nogil:
        """Drop what is left of a lane's earlier owner, or of one that was expelled, and count it. False if there is nothing.

        Where the count of posts is damaged, nobody knows where they end, and nothing is counted.
        """
        cdef worker_t *worker = &state_workers(state)[lane]
        cdef bint is_expelled = self.seen[lane].begins == UINT64_MAX
        cdef uint64_t end = self.seen[lane].tail if is_expelled or self.seen[lane].closed else self.seen[lane].begins
        if end <= <uint64_t> worker.consumed or (is_expelled and not self.arena._is_count_right(lane, end)):
            return False
        if end != <uint64_t> fps_counter_get(&self.arena.lane(lane).miscounted):
            worker.dropped += self._pushes_in(lane, worker.consumed, end)
        worker.consumed = worker.cursor = end
        state_mark_dirty(state, lane)
        return True

    cdef int64_t _pushes_in(self, uint32_t lane, uint64_t first, uint64_t end) noexcept nogil:
        """Descriptors of a lane from `first` to `end` that are no LEAVE."""
        cdef uint64_t position
        cdef int64_t count = 0
        for position in range(first, min(end, first + self.arena.header.ring_size)):
            count += lane_descriptor(self.arena.lane(lane), self.arena.header.ring_size, position).kind != FPS_LEAVE
        return count

    cdef int64_t _clock_for(self, const scheduler_t *state, uint32_t lane) noexcept nogil:
        """The clock at which this shard admits a lane's owner; -1: that of the slowest worker, in this shard.

        Under extra steps (DSSP) it is at most the first shard's. A worker waits there until the slowest is near again. Two
        workers, each far ahead of the other in one shard, would wait for each other for ever.
        """
        if self.shard == 0:
            return -1
        if fps_mutant(FPS_MUTANT_FIRST_CLOCK):
            return self.seen[lane].first_clock
        if state.policy.grant == GRANT_BOUNDED and state.policy.high > state.policy.low and state.n_live > 0:
            return min(state_slowest_clock(state), self.seen[lane].first_clock)
        return -1

    cdef int64_t _first_clock(self, uint32_t lane) noexcept nogil:
        """The clock at which the first shard admitted a lane's owner, which has pushed nothing yet; -1: not yet."""
        cdef int64_t granted = fps_grant_acquire(&self.arena.lane_shard(lane, 0).granted)
        if fps_granted_generation(granted) != <int64_t> fps_member_generation(self.seen[lane].member):
            return -1
        return fps_granted_steps(granted) - 1
