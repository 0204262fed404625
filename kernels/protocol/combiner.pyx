"""The shard lock of one shard: take it, drain all lanes, give the scheduler what is posted, commit, let go; break a dead one's.

Flat combining: whoever posted tries the shard lock; if another has it, that one is told by the PENDING flag and drains again
before it lets go, so no push is stranded although nobody waits.

What it refuses to know: what is written down of a push (batch.pyx), how a commit becomes true (commit.pyx), processes
(fastps/membership/membership.py proves an owner dead and has its turn broken), clocks (times come in descriptors and as
arguments), files, and Python objects on the way of a push.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.base.atomics cimport (
    fps_event_add,
    fps_event_wake,
    fps_grant_acquire,
    fps_head_acquire,
    fps_sleeping_load,
    fps_state_acquire,
    fps_tail_acquire,
    fps_lock_clear_pending,
    fps_lock_release,
    fps_lock_load,
    fps_lock_set_pending,
    fps_lock_take,
)
from fastps.kernels.base.failpoints cimport FPS_MUTANT_BREAK_AT_ONCE, FPS_MUTANT_FORGET_CURSOR, fps_mutant
from fastps.kernels.protocol.batch cimport Batch
from fastps.kernels.protocol.commit cimport (
    COMBINE_AWAITING,
    COMBINE_BAD_DESCRIPTOR,
    COMBINE_BAD_STATE,
    COMBINE_BUSY,
    COMBINE_DONE,
    COMBINE_FENCED,
    Commit,
)
from fastps.kernels.protocol.ring cimport lane_descriptor
from fastps.kernels.protocol.shared_fold cimport SharedFold
from fastps.kernels.scheduling.decisions cimport (
    ACTION_DROP,
    ACTION_FOLD,
    ACTION_FOLD_ALL,
    ACTION_FOLD_LIST,
    ACTION_NONE,
    scheduler_close,
    scheduler_due,
    scheduler_fire,
    scheduler_join,
    scheduler_leave,
    scheduler_push,
)
from fastps.kernels.scheduling.state cimport (
    FOLD_ALL,
    FOLD_QUORUM,
    NEVER_NS,
    state_mark_dirty,
    state_workers,
    scheduler_t,
    worker_t,
)
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport (
    FPS_LANE_DEAD,
    FPS_LANE_JOINING,
    FPS_LANE_LIVE,
    FPS_LEAVE,
    FPS_MAX_BATCH,
    FPS_PENDING,
    FPS_PUSH,
    fps_descriptor,
    fps_lane,
    fps_member_generation,
    fps_member_state,
    fps_lock_epoch,
    fps_lock_generation,
    fps_lock_owner,
    fps_lock_pack,
)
from fastps.kernels.update.fold cimport FPS_MAX_PUSHES

cdef enum:
    MAX_ROUNDS = 16  # drains before a combiner hands the shard lock over: nobody does the others' work for ever
    _NOTHING = 100   # no event; beyond the scheduler's actions
    _ENOUGH = 101    # this lane has folded for long, and another waits that can go on
    # What a combiner that is COMBINE_AWAITING waits for.
    _NOBODY = 0
    _FOLD = 1         # helpers of its own fold
    _BROKEN_FOLD = 2  # helpers of the fold whose combiner died
    _RUN = 200       # no outcome yet


cdef class Combiner:
    """Lane `lane` as it takes the shard lock of shard `shard`. Only one thread may use it."""

    def __cinit__(self, Arena arena not None, uint32_t lane, uint32_t shard):
        cdef uint32_t lanes = arena.header.n_lanes
        self.arena = arena
        self.lane = lane
        self.shard = shard
        self.shard_header = arena.shard_header(shard)
        self.bad_lane = -1
        self.fold = SharedFold(arena, lane, shard)
        self.batch = Batch(arena, shard, self.fold)
        self.commit = Commit(arena, shard, self.fold, self.batch)
        self.generation = fps_member_generation(fps_state_acquire(&arena.lane(lane).state))
        self.tails = <uint64_t *> calloc(lanes, sizeof(uint64_t))
        self.heads = <uint64_t *> calloc(lanes, sizeof(uint64_t))
        self.members = <uint32_t *> calloc(lanes, sizeof(uint32_t))
        if not self.tails or not self.heads or not self.members:
            raise MemoryError()

    def __dealloc__(self):
        free(self.tails)
        free(self.heads)
        free(self.members)

    # -- taking and letting go ---------------------------------------------------------------------

    cdef int try_combine(self, int64_t now_ns) noexcept nogil:
        """Take the shard lock if it is free, and run it."""
        if self.awaiting != _NOBODY:
            return self.resume(now_ns)
        self.now_ns = now_ns
        return self.run() if self.take() else COMBINE_BUSY

    cdef int resume(self, int64_t now_ns) noexcept nogil:
        """Go on with a shard lock that was COMBINE_AWAITING; DONE if there is none."""
        cdef int awaited = self.awaiting
        if awaited == _NOBODY:
            return COMBINE_DONE
        if self.fold.is_helped():
            return COMBINE_AWAITING
        self.now_ns = now_ns
        self.awaiting = _NOBODY
        if awaited == _FOLD:
            return self.run(self.commit.finish())
        self.commit.repair()
        return self.run()

    cdef bint take(self) noexcept nogil:
        cdef uint64_t *word = &self.shard_header.lock
        cdef uint64_t seen = fps_lock_load(word)
        while True:
            if fps_lock_owner(seen) == 0:
                self.lock = fps_lock_pack(fps_lock_epoch(seen), self.generation, self.lane + 1)
                if fps_lock_take(word, seen, self.lock):
                    return True
                seen = fps_lock_load(word)
                continue
            # The combiner may have looked at this lane already: the flag keeps it from letting go before it looks again.
            seen = fps_lock_set_pending(word, FPS_PENDING)
            if fps_lock_owner(seen) != 0:
                return False
            seen = fps_lock_load(word)

    cdef bint is_idle(self) noexcept nogil:
        """Whether this lane leaves the shard lock to others, and has none to end."""
        return self.hands_over and self.awaiting == _NOBODY

    cdef bint is_offered(self) noexcept nogil:
        """Whether the shard lock is free although more is pending, and this lane may run it."""
        cdef uint64_t seen = fps_lock_load(&self.shard_header.lock)
        return seen & FPS_PENDING and fps_lock_owner(seen) == 0 and not self.hands_over

    cdef int run(self, int outcome=_RUN) noexcept nogil:
        """Drain until nothing is pending, then let go; after MAX_ROUNDS, or a long fold, hand over to whoever comes next.

        `outcome`: of the commit that the shard lock begins with, if it was under way.
        """
        cdef uint64_t *word = &self.shard_header.lock
        cdef uint64_t given = fps_lock_pack(fps_lock_epoch(self.lock), 0, 0)
        cdef int rounds = 0
        if self.hands_over:
            return self._hand_over()
        self.commit.is_checked = False
        while True:
            if outcome in (_RUN, COMBINE_DONE):
                outcome = self._drain()
            if outcome == COMBINE_AWAITING:
                self.awaiting = _FOLD
            if outcome in (COMBINE_FENCED, COMBINE_AWAITING):
                return outcome
            if outcome == _ENOUGH:
                return self._offer(COMBINE_DONE)
            if outcome < 0:
                self.commit.repair()
            if fps_lock_release(word, self.lock, given):
                self.commit.wake()
                return outcome
            rounds += 1
            if outcome < 0 or rounds == MAX_ROUNDS:
                return self._offer(outcome)
            self.commit.wake()
            fps_lock_clear_pending(word, FPS_PENDING)
            if fps_lock_load(word) & ~FPS_PENDING != self.lock:
                return COMBINE_FENCED
            outcome = _RUN

    cdef int _offer(self, int outcome) noexcept nogil:
        """Let go of the shard lock although more is pending, and tell one who waits; if nobody does, the next push takes it."""
        if not self._let_go(FPS_PENDING):
            return COMBINE_FENCED
        self._wake_next()
        self.commit.wake()
        return outcome

    cdef bint _let_go(self, uint64_t flag) noexcept nogil:
        """Write the shard lock as free, with `flag` or the PENDING that another has set; False if it is this lane's no more."""
        cdef uint64_t *word = &self.shard_header.lock
        cdef uint64_t given = fps_lock_pack(fps_lock_epoch(self.lock), 0, 0)
        while not (fps_lock_release(word, self.lock, given | flag)
                   or fps_lock_release(word, self.lock | FPS_PENDING, given | FPS_PENDING)):
            if fps_lock_load(word) & ~FPS_PENDING != self.lock:
                return False
        return True

    cdef void _wake_next(self) noexcept nogil:
        """Move the event of the next lane that waits, for it looks at the shard lock before it sleeps; wake it if it does
        already.
        """
        cdef uint32_t step, index
        cdef fps_lane *lane
        for step in range(1, self.arena.header.n_lanes):
            index = (self.lane + step) % self.arena.header.n_lanes
            lane = self.arena.lane(index)
            if fps_sleeping_load(&lane.sleeping) or self._waits(index, self._head(index)):
                fps_event_add(&lane.event)
                if fps_sleeping_load(&lane.sleeping):
                    fps_event_wake(&lane.event)
                return

    cdef bint _waits(self, uint32_t index, uint64_t head) noexcept nogil:
        """Whether a live lane can do nothing until a fold: all its slots hold pushes from the descriptor `head` on."""
        cdef fps_lane *lane = self.arena.lane(index)
        cdef uint64_t back, slots = self.arena.header.n_slots
        if fps_member_state(fps_state_acquire(&lane.state)) != FPS_LANE_LIVE or fps_tail_acquire(&lane.tail) - head < slots:
            return False
        for back in range(1, slots + 1):
            if lane_descriptor(lane, self.arena.header.ring_size, fps_tail_acquire(&lane.tail) - back).kind != FPS_PUSH:
                return False
        return True

    cdef uint64_t _undecided(self, uint32_t index) noexcept nogil:
        """Descriptors of a lane that this shard is not done with."""
        return fps_tail_acquire(&self.arena.lane(index).tail) - self._head(index)

    cdef uint64_t _head(self, uint32_t index) noexcept nogil:
        return fps_head_acquire(&self.arena.lane_shard(index, self.shard).head)

    cdef bint _is_wanted(self) noexcept nogil:
        """Whether the shard lock should change hands after this commit: its fold was long, and a lane that waited for it has
        more.

        A combiner that went on would stay for as long as the others push, and not push itself.
        """
        cdef uint32_t index
        if self.fold.chunks < 2 or self.fold.on_device or self.arena.header.n_servers:
            return False
        if self._undecided(self.lane):
            return False
        for index in range(self.arena.header.n_lanes):
            if index != self.lane and self._undecided(index) and self._waits(index, self.heads[index]):
                return True
        return False

    cdef int _hand_over(self) noexcept nogil:
        """Let go of a shard lock that this lane cannot run, for those who can."""
        if not self._let_go(0):
            return COMBINE_FENCED
        self.wake_all()
        return COMBINE_BUSY

    cdef void wake_all(self) noexcept nogil:
        """Move every other lane's event and wake who sleeps: one of them can fold what is pending."""
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            if index != self.lane:
                fps_event_add(&self.arena.lane(index).event)
                if fps_sleeping_load(&self.arena.lane(index).sleeping):
                    fps_event_wake(&self.arena.lane(index).event)

    cdef int _drain(self) noexcept nogil:
        """Decide and commit everything that is posted now, up to a fold that is _ENOUGH."""
        cdef int outcome
        while True:
            outcome = self._commit_once()
            if outcome != COMBINE_BUSY:
                return outcome
            if self._is_wanted():
                return _ENOUGH

    # -- one commit --------------------------------------------------------------------------------

    cdef int _commit_once(self) noexcept nogil:
        """One commit: up to a batch of events, in order of their times. Returns COMBINE_BUSY if there may be more, else _DONE."""
        cdef scheduler_t *state = self.commit.begin()
        cdef int action
        cdef bint any_event = False
        if state == NULL:
            return COMBINE_BAD_STATE
        self._read_lanes()
        self.batch.begin()
        while self.batch.n_pushes < FPS_MAX_BATCH:
            action = self._next_event(state)
            if action < 0:
                return action
            if action == _NOTHING:
                break
            any_event = True
            if action == ACTION_FOLD_ALL:
                if not self.batch.gather(state):
                    return self._bad_push()
                break
            if action == ACTION_FOLD_LIST:
                if not self.batch.take_listed(state):
                    return self._bad_push()
                if self.batch.n_pushes + self.arena.header.n_lanes > FPS_MAX_PUSHES:
                    break
        if not any_event:
            return COMBINE_DONE
        if scheduler_close(state) == ACTION_FOLD_ALL and not self.batch.gather(state):
            return self._bad_push()
        action = self.commit.fold_and_flip(state)
        return COMBINE_BUSY if action == COMBINE_DONE else action

    cdef int _bad_push(self) noexcept nogil:
        self.bad_lane = self.batch.bad_lane
        return COMBINE_BAD_DESCRIPTOR

    cdef void _read_lanes(self) noexcept nogil:
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            # The state first: the tail of one who is proved dead is then its last.
            self.members[index] = fps_state_acquire(&self.arena.lane(index).state)
            self.tails[index] = fps_tail_acquire(&self.arena.lane(index).tail)
            self.heads[index] = self._head(index)

    cdef fps_descriptor *_earliest(self, scheduler_t *state, uint32_t *lane) noexcept nogil:
        """The earliest descriptor not seen yet, or NULL; of equal times that of the lowest lane."""
        cdef worker_t *workers = state_workers(state)
        cdef fps_descriptor *descriptor
        cdef fps_descriptor *earliest = NULL
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            if <uint64_t> workers[index].consumed < self.tails[index]:
                descriptor = lane_descriptor(self.arena.lane(index), self.arena.header.ring_size, workers[index].consumed)
                if earliest == NULL or descriptor.post_ns < earliest.post_ns:
                    earliest = descriptor
                    lane[0] = index
        return earliest

    cdef int _next_event(self, scheduler_t *state) noexcept nogil:
        """Give the scheduler its earliest event. Returns its action, _NOTHING or a negative outcome."""
        cdef uint32_t lane = 0
        cdef fps_descriptor *earliest = self._earliest(state, &lane)
        cdef worker_t *worker = &state_workers(state)[lane]
        cdef int64_t due_ns = scheduler_due(state)
        cdef int action
        if due_ns != NEVER_NS and due_ns <= (self.now_ns if earliest == NULL else earliest.post_ns):
            return scheduler_fire(state)
        if earliest == NULL:
            return self._next_change(state)
        if (earliest.kind > FPS_LEAVE or earliest.slot >= self.arena.header.n_slots or not worker.live
                or (worker.waiting and earliest.kind != FPS_LEAVE and not state.policy.repeats)
                or self.tails[lane] - worker.cursor > self.arena.header.ring_size):
            self.bad_lane = lane
            return COMBINE_BAD_DESCRIPTOR
        worker.consumed += 1
        state_mark_dirty(state, lane)
        if earliest.kind == FPS_LEAVE:
            action = scheduler_leave(state, lane, earliest.post_ns)
            worker.said_leave = 1
            if worker.cursor + 1 == worker.consumed:
                worker.cursor = worker.consumed  # nothing of this worker is kept for a fold
            return action
        action = self._receive(state, lane, earliest)
        if action == ACTION_FOLD:
            if not self.batch.take_single(state, lane, worker.consumed - 1, state.version - 1):
                return self._bad_push()
        elif action == ACTION_DROP:
            self.batch.drop(state, lane, worker.consumed - 1)
        if fps_mutant(FPS_MUTANT_FORGET_CURSOR):
            worker.consumed = worker.cursor
        if action == ACTION_FOLD or (action == ACTION_DROP and worker.cursor + 1 == worker.consumed):
            worker.cursor = worker.consumed
        return action

    cdef int _next_change(self, scheduler_t *state) noexcept nogil:
        """Who died is counted no more, and who joins is counted, once all that was posted is decided. As _next_event.

        Both follow from the lane's state word and from what is committed, so they are said once, whoever holds the shard lock.
        """
        cdef uint32_t lane, member
        cdef worker_t *worker
        for lane in range(self.arena.header.n_lanes):
            member = fps_member_state(self.members[lane])
            if member != FPS_LANE_DEAD and member != FPS_LANE_JOINING:
                continue
            worker = &state_workers(state)[lane]
            if worker.live and (member == FPS_LANE_DEAD
                                or worker.generation != <int32_t> fps_member_generation(self.members[lane])):
                return scheduler_leave(state, lane, self.now_ns)
            # What its last owner pushed and is kept for a fold lies in its slots.
            if (member == FPS_LANE_JOINING and not worker.live and worker.cursor == worker.consumed
                    and (self.shard == 0 or self._clock_of(lane) >= 0)):
                scheduler_join(state, lane, self.now_ns, -1 if self.shard == 0 else self._clock_of(lane))
                worker.generation = fps_member_generation(self.members[lane])
                return ACTION_NONE
        return _NOTHING

    cdef int64_t _clock_of(self, uint32_t lane) noexcept nogil:
        """The clock at which the first shard has let a lane's owner join, which is its clock in all of them; -1: it has not."""
        if fps_grant_acquire(&self.arena.lane_shard(lane, 0).generation) != fps_member_generation(self.members[lane]):
            return -1
        return fps_grant_acquire(&self.arena.lane_shard(lane, 0).granted) - 1

    cdef int _receive(self, scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil:
        """Give the scheduler a push, and count when it came within its version."""
        cdef int64_t began_ns = state.folded_ns
        cdef int32_t arrived = state.n_arrived
        cdef int action = scheduler_push(
            state, lane, descriptor.post_ns, descriptor.read_version, descriptor.samples)
        if began_ns > 0 and action != ACTION_DROP and state.policy.fold in (FOLD_ALL, FOLD_QUORUM):
            self.batch.count_arrival(arrived, state.now_ns - began_ns)
        return action

    # -- turns of the dead, and writing by hand ----------------------------------------------------

    cdef int recover_lock(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil:
        """First the shard lock, then the commit word's epoch: from then on a flip of the late owner fails.

        Those who help with its fold are waited for: they write the buffers that the next fold will write.
        """
        cdef uint64_t seen = fps_lock_load(&self.shard_header.lock)
        cdef uint64_t present
        self.now_ns = now_ns
        while True:
            # An owner before the present one has died, too: the next joins after that only.
            present = fps_member_generation(fps_state_acquire(&self.arena.lane(dead_lane).state)) & 0xffff
            if fps_lock_owner(seen) != dead_lane + 1 or (
                    fps_lock_generation(seen) != generation & 0xffff and fps_lock_generation(seen) == present):
                return COMBINE_BUSY
            self.lock = fps_lock_pack(fps_lock_epoch(seen) + 1, self.generation, self.lane + 1)
            if fps_lock_take(&self.shard_header.lock, seen, self.lock):
                break
            seen = fps_lock_load(&self.shard_header.lock)
        self.commit.change_epoch(fps_lock_epoch(self.lock))
        self.fold.close()
        if fps_mutant(FPS_MUTANT_BREAK_AT_ONCE):
            self.commit.repair()
            return self.run()
        self.awaiting = _BROKEN_FOLD
        return self.resume(now_ns)

    cdef int release(self, bint publish, int64_t now_ns) noexcept nogil:
        """While holding: publish the spare buffers as they are (the version stays), or not; then run the shard lock as usual."""
        cdef int outcome = COMBINE_DONE
        self.now_ns = now_ns
        if publish:
            outcome = self.commit.publish_spare()
        return outcome if outcome == COMBINE_FENCED else self.run(outcome)
