"""One shard's lock as one lane takes it: drain all lanes, decide what is posted, commit, release; and recover a dead owner's.

This is flat combining. A worker that has posted tries the lock. If another lane holds it, the worker sets the PENDING flag, and
that combiner drains again before it releases. So no push is stranded, although no worker waits for the lock.

Callers prove an owner dead before they recover its lock. Times come in descriptors and as arguments. The path of a push uses no
Python object.
"""

from libc.stdint cimport int32_t

from fastps.kernels.base.atomics cimport *
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.combining.event_log cimport EVENT_TIMER
from fastps.kernels.combining.lane_reads cimport NOTHING
from fastps.kernels.combining.lock_word cimport *
from fastps.kernels.combining.ring cimport lane_descriptor
from fastps.kernels.combining.shared_fold cimport close_ticket
from fastps.kernels.scheduling.decisions cimport *
from fastps.kernels.scheduling.state cimport *
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport FPS_MAX_PUSHES

cdef enum:
    MAX_ROUNDS = 16  # drains before a combiner offers the lock to another lane, so that none works for the others endlessly
    _ENOUGH = 101    # this lane has folded for long, and another lane that waits can continue
    # What a combiner that is COMBINE_AWAITING waits for.
    _NOBODY = 0
    _FOLD = 1         # helpers of its own fold
    _BROKEN_FOLD = 2  # helpers of the fold whose combiner died
    _LIVE = -1  # of n_played


cdef class Combiner:
    """The lock of shard `shard` as lane `lane` takes it. Only one thread may use it."""

    def __cinit__(self, Arena arena not None, uint32_t lane, uint32_t shard):
        self.arena = arena
        self.lane = lane
        self.shard = shard
        self.n_played = _LIVE
        self.lock = LockWord(arena, lane, shard)
        self.shard_header = arena.shard_header(shard)
        self.log = EventLog(shard)
        self.lanes = LaneReads(arena, shard, self.log)
        self.fold = SharedFold(arena, lane, shard)
        self.rows = RowFold(arena, shard, self.fold.item)
        self.batch = Batch(arena, shard, self.lock, self.fold, self.rows, self.lanes)
        self.commit = Commit(arena, shard, self.lock, self.fold, self.rows, self.batch)

    # -- taking and letting go ---------------------------------------------------------------------

    cdef int try_combine(self, int64_t now_ns) noexcept nogil:
        """Take the shard lock if it is free, drain and release it.

        A lane that `hands_over` takes it only where it was passed by, while it held the lock to write by hand.
        """
        if self.awaiting != _NOBODY:
            return self.resume(now_ns)
        if self.hands_over and fps_lock_left(fps_lock_load(&self.shard_header.lock)) != self.lane + 1:
            return COMBINE_DONE
        self.now_ns = now_ns
        return self.run() if self.take() else COMBINE_BUSY

    cdef int resume(self, int64_t now_ns) noexcept nogil:
        """Resume where this lane holds the lock and was COMBINE_AWAITING. Returns COMBINE_DONE where it was not."""
        cdef int awaited = self.awaiting
        if awaited == _NOBODY:
            return COMBINE_DONE
        if not self.lock.is_mine():
            return self._end_late()
        if self.fold.is_helped():
            return COMBINE_AWAITING
        self.now_ns = now_ns
        self.awaiting = _NOBODY
        if awaited == _FOLD:
            return self.run(self._logged(self.commit.finish()))
        self.commit.repair()
        return self.run()

    cdef bint take(self, uint64_t flags=0) noexcept nogil:
        """Take the lock, if it is free."""
        if not self.lock.take(flags):
            return False
        self.fold.use(self.lock.workspace)
        if self.lock.sets_aside and self.lock.may_reuse():
            # What the lane wrote late besides heads and grants: counters, and the deadline of the next timer.
            self.commit.repair()
            return self.lock.clear(FPS_LEFT)
        return True

    cdef int play(self, const played_t *events, int64_t count) noexcept nogil:
        """Make one commit of these events at virtual times: of lanes' next descriptors, as if posted then, due timers, changes.

        What else is posted stays. Returns COMBINE_DONE or COMBINE_BUSY, or a negative outcome.
        """
        cdef int outcome
        if not self.take():
            return COMBINE_BUSY
        self.played, self.n_played = events, count
        outcome = self._commit_once()
        self.n_played = _LIVE
        if not self.lock.release() and not self.lock.let_go(0):
            return COMBINE_FENCED
        self.commit.wake()
        return COMBINE_DONE if outcome == COMBINE_BUSY else outcome

    cdef int _end_late(self) noexcept nogil:
        """What follows where another lane has taken this one's lock: this lane tries it again, as any other does.

        COMBINE_FENCED if this lane was taken for dead.
        """
        cdef uint32_t member = fps_state_acquire(&self.arena.lane(self.lane).state)
        self.awaiting = _NOBODY
        self.commit.wake()
        if fps_member_generation(member) != self.lock.generation or fps_member_state(member) == FPS_LANE_DEAD:
            return COMBINE_FENCED
        return self.run() if self.take() else COMBINE_BUSY

    cdef bint is_offered(self) noexcept nogil:
        """Whether the shard lock is free although more is pending, and this lane may take it."""
        cdef uint64_t seen = fps_lock_load(&self.shard_header.lock)
        return seen & FPS_PENDING and fps_lock_owner(seen) == 0 and not self.hands_over

    cdef int run(self, int outcome=COMBINE_DONE) noexcept nogil:
        """While holding the lock: drain until nothing is pending, then release it.

        After MAX_ROUNDS drains, or a long fold, the lock is offered to another lane. `outcome`: that of a commit that was under
        way when the lock was recovered or resumed.
        """
        cdef int rounds = 0
        if self.hands_over and outcome == COMBINE_DONE:
            return self._hand_over()
        self.commit.is_checked = False
        while True:
            if outcome == COMBINE_DONE:
                outcome = self._drain()
            if outcome == COMBINE_AWAITING:
                self.awaiting = _FOLD
                return outcome
            if outcome == COMBINE_FENCED:
                return self._end_late()
            if outcome == _ENOUGH:
                return self._offer(COMBINE_DONE)
            if outcome < 0:
                self.commit.repair()
                return self._offer(outcome)  # what the others have posted is not decided
            if self.lock.release():
                self.commit.wake()
                return outcome
            rounds += 1
            if rounds == MAX_ROUNDS:
                return self._offer(outcome)
            self.commit.wake()
            if not self.lock.clear(FPS_PENDING):
                return self._end_late()

    cdef int _offer(self, int outcome) noexcept nogil:
        """Release the lock although more is pending, and wake a lane that waits; if none does, the next push takes it."""
        if not self.lock.let_go(FPS_PENDING):
            return self._end_late()
        self._wake_next()
        self.commit.wake()
        return outcome

    cdef void _wake_next(self) noexcept nogil:
        """Move the event of the next lane that waits, and wake it if it sleeps. A lane reads its event before it sleeps."""
        cdef uint32_t step, index
        for step in range(1, self.arena.header.n_lanes):
            index = (self.lane + step) % self.arena.header.n_lanes
            if fps_sleeping_load(&self.arena.lane(index).sleeping) or self._waits(index, self._head(index)):
                self.call(index)
                return

    cdef bint _waits(self, uint32_t index, uint64_t head) noexcept nogil:
        """Whether a live lane can do nothing before a fold: all its slots hold pushes from the descriptor `head` on."""
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
        """Whether another lane should take the lock after this commit: its fold was long, and a lane that waited for it has
        more.

        A combiner that continued would stay for as long as the others push, and not push itself.
        """
        cdef uint32_t index
        if (self.fold.chunks < 2 and not self.rows.is_long) or self.fold.on_device or self.arena.header.n_servers:
            return False
        if self._undecided(self.lane):
            return False
        for index in range(self.arena.header.n_lanes):
            if index != self.lane and self._undecided(index) and self._waits(index, self.lanes.seen[index].head):
                return True
        return False

    cdef int _hand_over(self) noexcept nogil:
        """Offer a lock under which this lane cannot fold, and wake the lanes that can."""
        if not self.lock.let_go(FPS_PENDING):
            return self._end_late()
        self.wake_all()
        return COMBINE_BUSY

    cdef void wake_all(self) noexcept nogil:
        """Move every other lane's event and wake those that sleep: one of them, or the server, can fold what is pending."""
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes + self.arena.header.n_servers):
            if index != self.lane:
                self.call(index)

    cdef void call(self, uint32_t index) noexcept nogil:
        """Move a lane's event, and wake the lane if it sleeps."""
        cdef fps_lane *lane = self.arena.lane(index)
        fps_event_add(&lane.event)
        if fps_sleeping_load(&lane.sleeping):
            fps_event_wake(&lane.event)

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
        """One commit: up to a batch of events, in order of their times. Returns COMBINE_BUSY if more may follow."""
        cdef scheduler_t *state = self.commit.begin()
        cdef int action
        cdef bint any_event = False
        if state == NULL:
            return COMBINE_FENCED if self.commit.is_late() else COMBINE_BAD_STATE
        self.lanes.read()
        self.batch.begin()
        self.log.begin(state.sequence)
        while self.batch.n_pushes < FPS_MAX_BATCH:
            action = self._next_event(state)
            if action < 0:
                return action
            if action == NOTHING:
                break
            any_event = True
            if action == ACTION_FOLD_ALL:
                if not self.batch.gather(state):
                    return COMBINE_BAD_DESCRIPTOR
                break
            if action == ACTION_FOLD_LIST:
                if not self.batch.take_listed(state):
                    return COMBINE_BAD_DESCRIPTOR
                if self.batch.n_pushes + self.arena.header.n_lanes > FPS_MAX_PUSHES:
                    break
        if not any_event:
            return COMBINE_DONE
        if scheduler_close(state) == ACTION_FOLD_ALL and not self.batch.gather(state):
            return COMBINE_BAD_DESCRIPTOR
        action = self._logged(self.commit.fold_and_flip(state))
        return COMBINE_BUSY if action == COMBINE_DONE else action

    cdef inline int _logged(self, int outcome) noexcept nogil:
        """The outcome of a commit, whose events are logged if it is published."""
        if outcome == COMBINE_DONE and self.log.is_on:
            self.log.publish(fps_commit_version(fps_commit_load(&self.shard_header.commit)))
        return outcome

    cdef int _next_event(self, scheduler_t *state) noexcept nogil:
        """Give the scheduler its earliest event. Returns its action, NOTHING or a negative outcome."""
        if self.n_played != _LIVE:
            return self._next_played(state)
        cdef uint32_t lane = 0
        cdef fps_descriptor *earliest
        cdef fps_descriptor posted
        cdef int64_t due_ns = scheduler_due(state)
        while True:
            earliest = self.lanes.earliest(state, &lane)
            if due_ns != NEVER_NS and due_ns <= (self.now_ns if earliest == NULL else earliest.post_ns):
                return self._fire(state)
            if earliest == NULL:
                return self.lanes.next_change(state, self.now_ns, 0, self.arena.header.n_lanes)
            posted = earliest[0]  # a copy: a word that is damaged after it was checked must not be followed
            if self.lanes.check(state, lane, &posted) == COMBINE_DONE:
                return self._take(state, lane, &posted)
            if not self.lanes.close(state, lane):
                return COMBINE_BAD_DESCRIPTOR

    cdef int _fire(self, scheduler_t *state) noexcept nogil:
        cdef int action = scheduler_fire(state)
        self.log.add(EVENT_TIMER, -1, -1, state.now_ns)
        return action

    cdef int _next_played(self, scheduler_t *state) noexcept nogil:
        """Give the scheduler the next event of `play`. Returns as `_next_event`."""
        cdef played_t event
        cdef int64_t due_ns = scheduler_due(state)
        if self.n_played == 0:
            return NOTHING
        event = self.played[0]
        self.played += 1
        self.n_played -= 1
        if event.lane < -1:
            return self.lanes.next_change(
                state, event.at_ns, <uint32_t> (-2 - event.lane), <uint32_t> (-1 - event.lane))
        if event.lane < 0:
            return self._fire(state) if due_ns != NEVER_NS and due_ns <= event.at_ns else NOTHING
        cdef uint64_t position = state_workers(state)[event.lane].consumed
        if position >= self.lanes.seen[event.lane].tail:
            return self.lanes.bad(event.lane, FPS_DAMAGED_RING, self.lanes.seen[event.lane].tail)
        cdef fps_descriptor posted = lane_descriptor(self.arena.lane(event.lane), self.arena.header.ring_size, position)[0]
        posted.post_ns = event.at_ns
        if self.lanes.check(state, event.lane, &posted) != COMBINE_DONE:
            return COMBINE_BAD_DESCRIPTOR
        return self._take(state, event.lane, &posted)

    cdef int _take(self, scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil:
        """Give the scheduler what a descriptor says. Returns as `_next_event`."""
        cdef worker_t *worker = &state_workers(state)[lane]
        cdef int action
        worker.consumed += 1
        state_mark_dirty(state, lane)
        if descriptor.kind == FPS_LEAVE:
            action = scheduler_leave(state, lane, descriptor.post_ns)
            self.log.add(descriptor.kind, lane, worker.consumed - 1, state.now_ns)
            worker.said_leave = 1
            if worker.cursor + 1 == worker.consumed:
                worker.cursor = worker.consumed  # nothing of this worker is kept for a fold
            return action
        action = self._receive(state, lane, descriptor)
        self.log.add(descriptor.kind, lane, worker.consumed - 1, state.now_ns)
        if action == ACTION_FOLD:
            if not self.batch.take_single(state, lane, worker.consumed - 1, state.version - 1):
                return COMBINE_BAD_DESCRIPTOR
        elif action == ACTION_DROP:
            self.batch.drop(state, lane, worker.consumed - 1)
        if fps_mutant(FPS_MUTANT_FORGET_CURSOR):
            worker.consumed = worker.cursor
        if action == ACTION_FOLD or (action == ACTION_DROP and worker.cursor + 1 == worker.consumed):
            worker.cursor = worker.consumed
        return action

    cdef int _receive(self, scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil:
        """Give the scheduler a push, and count when it came within its version."""
        cdef int64_t began_ns = state.folded_ns
        cdef int32_t arrived = state.n_arrived
        cdef int action = scheduler_push(
            state, lane, descriptor.post_ns, descriptor.read_version, descriptor.samples if descriptor.kind == FPS_PUSH else 0)
        if began_ns > 0 and action != ACTION_DROP and state.policy.fold in (FOLD_ALL, FOLD_QUORUM):
            self.batch.count_arrival(arrived, state.now_ns - began_ns)
        return action

    # -- locks of the dead, and writing by hand ----------------------------------------------------

    cdef int recover_lock(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil:
        """Take the lock of a dead owner, then write the next epoch into the commit word: the late owner is fenced.

        Waits for the lanes that help with its fold, because they write the buffers that the next fold will write.
        """
        if not self.lock.recover(dead_lane, generation):
            return COMBINE_BUSY
        self.now_ns = now_ns
        self.fold.use(self.lock.workspace)
        if fps_lock_left(self.lock.held) and fps_lock_left_workspace(self.lock.held) == self.lock.workspace:
            # The dead owner had taken the lock over, and not moved on yet.
            self.commit.move()
            return self.run()
        if not self.commit.change_epoch():
            return self._end_late()
        close_ticket(self.fold.item.words)
        if fps_mutant(FPS_MUTANT_BREAK_AT_ONCE):
            self.commit.repair()
            return self.run()
        self.awaiting = _BROKEN_FOLD
        return self.resume(now_ns)

    cdef int pass_by(self, uint32_t stopped, int64_t now_ns) noexcept nogil:
        """Go on without a lane that has stopped, if it holds the lock, or helps with the fold that this lane awaits.

        It may wake at any time. Until it has come back, nobody writes where it may write. COMBINE_BUSY if it holds up nothing
        here, or if this lane cannot pass it by: a fold of rows is made in place, and a device has its own order of work.
        """
        cdef uint32_t helped = fps_member_state(fps_help_load(&self.arena.lane(stopped).helping))
        if self.hands_over or self.fold.on_device or self.arena.header.n_tables:
            return COMBINE_BUSY
        if self.awaiting != _NOBODY and helped != fps_help_of(self.shard, self.lock.workspace):
            return COMBINE_BUSY
        if not self.lock.take_over(stopped):
            return COMBINE_BUSY
        self.awaiting = _NOBODY
        self.now_ns = now_ns
        self.commit.move()
        return self.run()

    cdef object holder(self):
        """(lane, word) as in `ShardLocks.holders`."""
        cdef uint64_t seen = fps_lock_own(fps_lock_load(&self.shard_header.lock)), commit
        cdef uint32_t index
        commit = fps_commit_load(&self.shard_header.commit)
        if fps_lock_owner(seen) > self.arena.header.n_lanes + self.arena.header.n_servers:
            return None  # damaged
        if fps_lock_owner(seen) not in (0, self.lane + 1):
            return <int64_t> fps_lock_owner(seen) - 1, (seen, commit)
        if self.awaiting != _NOBODY:
            for index in range(self.arena.header.n_lanes):
                if index != self.lane and (fps_member_state(fps_help_load(&self.arena.lane(index).helping))
                                           == fps_help_of(self.shard, self.lock.workspace)):
                    return index, (seen, commit)
        return None

    cdef int release(self, bint publish, int64_t now_ns, bint advances) noexcept nogil:
        """While holding: publish the spare buffers, or not (the version stays or `advances`); then drain and release."""
        cdef int outcome = COMBINE_DONE
        self.now_ns = now_ns
        if publish:
            outcome = self.commit.publish_spare(advances)
        if outcome == COMBINE_FENCED or not self.lock.clear(FPS_BY_HAND):
            return COMBINE_FENCED
        return self.run(outcome)
