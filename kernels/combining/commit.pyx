"""One commit of a shard: fold into buffers that nobody reads, write the record, flip the commit word, publish what follows.

One flip of the commit word publishes everything of a commit: weights, rule state, cursors and the scheduler state. A combiner
that dies before the flip leaves nothing that another process reads. The next combiner derives the words that follow from a
commit (heads, grants, the deadline) again.
"""

cimport cython
from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from fastps.kernels.base.atomics cimport *
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.combining.lock_word cimport *
from fastps.kernels.combining.shared_fold cimport FOLD_AWAITING, FOLD_DONE, FOLD_NONFINITE, close_ticket
from fastps.kernels.scheduling.decisions cimport scheduler_due
from fastps.kernels.scheduling.policy cimport policy_check
from fastps.kernels.scheduling.state cimport *
from fastps.kernels.scheduling.state_check cimport state_can_be_followed, state_can_be_walked, state_remember
from fastps.kernels.shm.arena_h cimport *


cdef inline void _mark(uint64_t *pinned, uint64_t pin) noexcept nogil:
    """Set the bit of a pinned buffer; a pin out of range is no buffer of ours. One buffer more is the spare one."""
    if 0 < pin <= FPS_MAX_BUFFERS + 1:
        pinned[(pin - 1) // 64] |= (<uint64_t> 1) << ((pin - 1) % 64)


@cython.final
cdef class Commit:
    """The commits of shard `shard`, one after the other. Only the lane that holds the shard's lock may use it."""

    def __cinit__(
            self, Arena arena not None, uint32_t shard, LockWord lock not None, SharedFold fold not None, RowFold rows not None,
            Batch batch not None):
        self.arena = arena
        self.lock = lock
        self.shard_header = arena.shard_header(shard)
        self.shard = shard
        self.fold = fold
        self.rows = rows
        self.batch = batch
        state_remember(&self.expected, arena.scheduler(shard, fps_commit_record(fps_commit_load(&self.shard_header.commit))),
                       arena.header.n_lanes)
        policy_check(&self.expected.policy, arena.header.n_lanes)
        self.to_wake = <uint32_t *> calloc(arena.header.n_lanes, sizeof(uint32_t))
        if not self.to_wake:
            raise MemoryError()

    def __dealloc__(self):
        free(self.to_wake)

    # -- from the scheduler's inactive copy to the flip --------------------------------------------

    cdef scheduler_t *begin(self) noexcept nogil:
        """The inactive copy of the scheduler state, brought up to date. The flip publishes what is decided on it.

        NULL if the committed state is damaged, which is checked once each time the lock is taken, or if this lane `is_late`.
        """
        self.seen = fps_commit_load(&self.shard_header.commit)
        if self.is_late() and not fps_mutant(FPS_MUTANT_FOLLOW_COMMIT):
            return NULL
        return self._prepare()

    cdef bint is_late(self) noexcept nogil:
        """Whether another lane has taken the lock over, as of the commit word that was seen: it has a later epoch.

        Until then everything that this lane writes lies in its own workspace, or in buffers that are set aside for it.
        """
        return fps_commit_epoch(self.seen) != fps_lock_epoch(self.lock.held)

    cdef scheduler_t *_prepare(self) noexcept nogil:
        cdef scheduler_t *state = self._inactive()
        cdef const scheduler_t *active = self.arena.scheduler(self.shard, fps_commit_record(self.seen))
        if self.is_damaged:
            return NULL
        if not self.is_checked and not state_can_be_followed(active, &self.expected):
            return NULL
        state_catch_up(state, active)
        if not self.is_checked and not state_can_be_walked(state, self.arena.header.ring_size):
            return NULL
        self.is_checked = True
        state_begin(state)
        return state

    cdef bint _is_sound(self, const scheduler_t *state) noexcept nogil:
        return state_can_be_followed(state, &self.expected) and state_can_be_walked(state, self.arena.header.ring_size)

    cdef scheduler_t *_inactive(self) noexcept nogil:
        return self.arena.scheduler(self.shard, fps_commit_record(self.seen) ^ 1)

    cdef int fold_and_flip(self, scheduler_t *state) noexcept nogil:
        """Fold the batch into buffers that nobody reads, write the other record, and publish everything by one flip."""
        cdef uint32_t state_in = self.shard_header.records[fps_commit_record(self.seen)].state_buffer
        # Without a push the fold is called only for a version of null pushes, and only one that asks for those.
        if self.batch.n_pushes == 0 and not (
                self.fold.folds_nothing and state.version != fps_commit_version(self.seen)):
            self.spare_buffer = fps_commit_buffer(self.seen)
            return self._write_record(state, state_in)
        self.spare_buffer = self._free_buffer()
        if self.spare_buffer < 0:
            return COMBINE_NO_BUFFER
        self.spare_state = self._free_state()
        self.batch.write_item(&state.policy, fps_commit_buffer(self.seen), self.spare_buffer, state_in, self.spare_state)
        if not self.fold.on_device and not fps_mutant(FPS_MUTANT_FORGET_CONFIRM) and not self.lock.confirm():
            return COMBINE_FENCED
        if fps_mutant(FPS_MUTANT_ACKNOWLEDGE_FIRST):
            self._publish(state)
        return self._end_fold(self.fold.run())

    cdef int finish(self) noexcept nogil:
        """Resume a commit whose fold was COMBINE_AWAITING. Its state is checked again: any process may have written over it."""
        if not self._is_sound(self._inactive()):
            return COMBINE_BAD_STATE
        return self._end_fold(self.fold.finish())

    cdef int _end_fold(self, int outcome) noexcept nogil:
        """Commit what was folded, unless the fold was refused or helpers still have chunks."""
        if outcome == FOLD_AWAITING:
            return COMBINE_AWAITING
        if outcome == FOLD_DONE and not fps_mutant(FPS_MUTANT_ROWS_LATE):
            outcome = self.rows.run(fps_commit_version(self.seen))
        if outcome == FOLD_NONFINITE:
            # The slots of a combiner that was stopped may have been written again meanwhile.
            if not self.lock.is_mine():
                return COMBINE_FENCED
            if not self.batch.reject(self._inactive()):
                return COMBINE_BAD_FOLD
            # The remaining pushes are folded again.
            return self.fold_and_flip(self._inactive())
        if outcome != FOLD_DONE:
            return COMBINE_BAD_FOLD
        if not fps_mutant(FPS_MUTANT_CARRY_LATE):
            self._carry(self.fold.item.words.n_pushes)
        outcome = self._write_record(self._inactive(), self.spare_state)
        if outcome == COMBINE_DONE and fps_mutant(FPS_MUTANT_CARRY_LATE):
            self._carry(self.fold.item.words.n_pushes)
        if outcome == COMBINE_DONE and fps_mutant(FPS_MUTANT_ROWS_LATE):
            self.rows.run(fps_commit_version(self.seen))
        return outcome

    cdef void _carry(self, uint32_t n_pushes) noexcept nogil:
        """Bring into the spare buffer what its version carries: of a push that brings some, else the last version's.

        Without readers nothing is copied, and the mark says that it is not there. The last shard has it.
        """
        cdef uint64_t *target
        cdef const uint64_t *source = NULL
        if self.arena.header.carried_bytes == 0 or self.shard + 1 != self.arena.header.n_shards:
            return
        target = <uint64_t *> self.arena.carried(self.spare_buffer)
        if self._ready_readers():
            source = self._carried_by(n_pushes, &target[1])
        FPS_FAILPOINT()
        target[0] = source != NULL and source[0] != 0
        if target[0]:
            memcpy(<char *> target + FPS_LINE, <const char *> source + FPS_LINE, self.arena.header.carried_bytes - FPS_LINE)

    cdef const uint64_t *_carried_by(self, uint32_t n_pushes, uint64_t *lane) noexcept nogil:
        """Where a version of these pushes has its carried values from, and the lane that brought them; NULL if from nowhere.

        Of the lowest lane whose push brings some, its last. A push of the lane that brought the last version's, without any,
        makes those too old: nobody read as it was made.
        """
        cdef fps_folded_push push
        cdef const uint64_t *found
        cdef const uint64_t *last = <const uint64_t *> self.arena.carried(fps_commit_buffer(self.seen))
        cdef const uint64_t *best = NULL
        cdef bint is_too_old = False
        lane[0] = last[1]
        while n_pushes:
            n_pushes -= 1
            push = self.fold.item.push(n_pushes)
            if push.lane >= self.arena.header.n_lanes or push.slot >= self.arena.header.n_slots:
                continue
            found = <const uint64_t *> self.arena.brought(push.lane, push.slot)
            if found[0] != push.step + 1:
                is_too_old |= push.lane == last[1]
            elif best == NULL or push.lane < lane[0]:
                best, lane[0] = found, push.lane
        return best if best != NULL else NULL if is_too_old else last

    cdef int _write_record(self, scheduler_t *state, uint32_t state_buffer) noexcept nogil:
        """Write the record that is not in use, and flip."""
        cdef uint64_t record = fps_commit_record(self.seen) ^ 1
        cdef fps_record *after = &self.shard_header.records[record]
        if fps_mutant(FPS_MUTANT_FLIP_FIRST):
            self._flip(state, record)
            self.seen = fps_commit_load(&self.shard_header.commit)
        FPS_FAILPOINT()
        after.version = state.version
        FPS_FAILPOINT()
        after.weights_buffer = self.spare_buffer
        FPS_FAILPOINT()
        after.state_buffer = state_buffer
        return self._flip(state, record)

    cdef int _flip(self, scheduler_t *state, uint64_t record) noexcept nogil:
        cdef uint64_t commit = fps_commit_pack(state.version, fps_commit_epoch(self.seen), self.spare_buffer, record)
        cdef bint is_committed = fps_commit_flip(&self.shard_header.commit, self.seen, commit)
        self.rows.publish_counts(is_committed)
        if not is_committed:
            return COMBINE_FENCED
        self._publish(state)
        self._serve_wanted(state.version)
        return COMBINE_DONE

    # -- buffers that nobody reads -----------------------------------------------------------------

    cdef int64_t find_spare(self) noexcept nogil:
        """A weights buffer that nobody reads, or -1, and the state buffer `spare_state`, to be written by hand."""
        self.seen = fps_commit_load(&self.shard_header.commit)
        self.spare_buffer = self._free_buffer()
        if fps_mutant(FPS_MUTANT_SPARE_PINNED):
            self.spare_buffer = 1 if fps_commit_buffer(self.seen) == 0 else 0
        self.spare_state = self._free_state()
        return self.spare_buffer

    cdef int publish_spare(self, bint advances) noexcept nogil:
        """Publish the spare buffers as they are. The version stays, or `advances` by one: what it carries was written, too."""
        cdef scheduler_t *state
        self.is_checked = False
        state = self._prepare()
        if state == NULL:
            return COMBINE_BAD_STATE
        if advances:
            state.version += 1
        else:
            self._carry(0)
        return self._write_record(state, self.spare_state)

    cdef int64_t _free_buffer(self) noexcept nogil:
        """The lowest buffer that is neither active nor pinned, or -1.

        The pins are read after the flip that retired the buffers ([PIN]). The lowest first keeps the same few
        buffers in the cache.
        """
        cdef uint64_t pinned[2]
        cdef uint64_t spare = self.arena.spare_weights()
        cdef uint32_t index, readers = self._ready_readers()
        self._mark_used(pinned, readers)
        for index in range(self.arena.header.n_buffers + readers):
            if not (pinned[index // 64] >> (index % 64)) & 1:
                return index
        if self.lock.sets_aside and not (pinned[spare // 64] >> (spare % 64)) & 1:
            return <int64_t> spare
        return -1

    cdef int64_t last_used(self, uint32_t readers) noexcept nogil:
        """The highest buffer that is active, or pinned by a lane or one of the first `readers`. Only while holding the lock."""
        cdef uint64_t pinned[2]
        cdef int64_t index = self.arena.header.n_buffers + self.arena.header.n_readers
        self.seen = fps_commit_load(&self.shard_header.commit)
        self._mark_used(pinned, min(readers, self._ready_readers()))
        while index > 0:
            index -= 1
            if (pinned[index // 64] >> (index % 64)) & 1:
                break
        return index

    cdef void _mark_used(self, uint64_t *pinned, uint32_t readers) noexcept nogil:
        """Set the bits of the buffers that are active, pinned or set aside, of 128."""
        cdef uint32_t index
        pinned[0] = pinned[1] = 0
        _mark(pinned, fps_reader_weights(fps_reader_load(&self.shard_header.reader)))
        for index in range(self.arena.header.n_lanes):
            # A dead worker's pin does not count; the next owner of its lane pins what is published after the state changed.
            if fps_member_state(fps_state_acquire(&self.arena.lane(index).state)) == FPS_LANE_DEAD:
                continue
            # A buffer moves from `next` to `ready` and on to `pin`. The lane writes the later word before it reuses the earlier
            # one, so the words must be read in the order of the moves, or a buffer is in none.
            _mark(pinned, fps_pin_load(&self.arena.lane_shard(index, self.shard).next))
            if not fps_mutant(FPS_MUTANT_FORGET_READY):
                _mark(pinned, fps_pin_load(&self.arena.lane_shard(index, self.shard).ready))
            _mark(pinned, fps_pin_load(&self.arena.lane_shard(index, self.shard).pin))
        for index in range(readers):
            _mark(pinned, fps_pin_load(&self.arena.reader_shard(index, self.shard).pin))
        _mark(pinned, fps_commit_buffer(self.seen) + 1)
        if self._sets_aside():
            _mark(pinned, <uint64_t> self._left_item().weights_out + 1)

    cdef bint _sets_aside(self) noexcept nogil:
        """Whether a lane that stopped, or its helpers, may still write the buffers of the other workspace's item."""
        return self.lock.sets_aside and not fps_mutant(FPS_MUTANT_FORGET_LEFT)

    cdef const fps_work *_left_item(self) noexcept nogil:
        return self.arena.work(self.shard, 1 - self.lock.workspace)

    cdef uint32_t _ready_readers(self) noexcept nogil:
        """Readers whose pins count. Each brings a buffer more, so a reader that pins one for ever takes none from the workers.

        Read after the flip, as the pins are. The pin of a reader that died counts until another reader has its place.
        """
        cdef uint64_t most = self.arena.header.n_readers
        if most == 0 or fps_mutant(FPS_MUTANT_FORGET_READERS):
            return 0
        return <uint32_t> min(fps_readers_load(&self.arena.readers_words().ready), most)

    cdef uint32_t _free_state(self) noexcept nogil:
        """The lowest state buffer that is neither active, nor being copied, nor set aside; there is always one."""
        cdef uint32_t active = self.shard_header.records[fps_commit_record(self.seen)].state_buffer
        cdef uint64_t read = fps_reader_state(fps_reader_load(&self.shard_header.reader))
        cdef uint32_t index, left = self._left_item().state_out if self._sets_aside() else active
        for index in range(FPS_STATE_BUFFERS):
            if index != active and index != left and index + 1 != read:
                return index
        return FPS_STATE_BUFFERS

    # -- what follows from a commit ----------------------------------------------------------------

    cdef void _publish(self, scheduler_t *state) noexcept nogil:
        """Write the words that follow from the commit, for every worker that it changed."""
        cdef int32_t i
        cdef int64_t due_ns = scheduler_due(state)
        if state.policy.tune_batches:  # before the first grant: a worker reads where its part of a version's samples begins
            for i in range(state.n_dirty_workers):
                fps_counter_set(&self.arena.lane_shard(state_dirty(state)[i], self.shard).batch,
                                state_workers(state)[state_dirty(state)[i]].batch)
        for i in range(state.n_dirty_workers):
            self._publish_lane_shard(state, state_dirty(state)[i])
        if due_ns != self.shard_header.due_ns:
            fps_counter_set(&self.shard_header.due_ns, due_ns)
            if due_ns != NEVER_NS and state.waiting.first >= 0:
                # One sleeper must wake in time for the new deadline, to combine then.
                self._queue_wake(state.waiting.first)

    cdef void _publish_lane_shard(self, scheduler_t *state, uint32_t index) noexcept nogil:
        cdef worker_t *worker = &state_workers(state)[index]
        cdef fps_lane_shard *lane_shard = self.arena.lane_shard(index, self.shard)
        cdef int64_t granted = fps_granted_pack(worker.generation, worker.granted)
        fps_counter_set(&lane_shard.folded, worker.folded)
        fps_counter_set(&lane_shard.dropped, worker.dropped)
        fps_counter_set(&lane_shard.staleness_sum, worker.staleness_sum)
        fps_counter_set(&lane_shard.staleness_max, worker.staleness_max)
        if lane_shard.head == <uint64_t> worker.cursor and lane_shard.granted == granted:
            return
        fps_head_raise(&lane_shard.head, worker.cursor)
        fps_grant_raise(&lane_shard.granted, granted)
        self._queue_wake(index)

    cdef void _queue_wake(self, uint32_t index) noexcept nogil:
        """Move the lane's event, and wake its worker once the shard lock is released."""
        cdef uint32_t i
        fps_event_add(&self.arena.lane(index).event)
        if not fps_sleeping_load(&self.arena.lane(index).sleeping):
            return
        for i in range(self.n_to_wake):
            if self.to_wake[i] == index:
                return
        self.to_wake[self.n_to_wake] = index
        self.n_to_wake += 1

    cdef void _serve_wanted(self, uint64_t version) noexcept nogil:
        """Let readers go on that sleep for a version that this shard has reached. Read after the flip.

        Those that need more, of this shard or of another, say so again. Where no reader sleeps, this is one load.
        """
        cdef uint64_t wanted
        if self.arena.header.n_readers == 0 or fps_mutant(FPS_MUTANT_FORGET_WANTED):
            return
        wanted = fps_wanted_load(&self.arena.readers_words().wanted)
        if wanted and wanted <= version:
            self._call_readers()

    cdef void _call_readers(self) noexcept nogil:
        """Move the event of the readers, and wake them once the shard lock is released. The wish is taken first."""
        fps_wanted_set(&self.arena.readers_words().wanted, 0)
        fps_event_add(&self.arena.readers_words().event)
        self.wakes_readers = True

    cdef void wake(self) noexcept nogil:
        """Wake the queued workers and readers after the lock is released: every lane would wait for a system call under it."""
        cdef uint32_t i
        for i in range(self.n_to_wake):
            fps_event_wake(&self.arena.lane(self.to_wake[i]).event)
        self.n_to_wake = 0
        if self.wakes_readers:
            self.wakes_readers = False
            fps_event_wake_all(&self.arena.readers_words().event)

    # -- after one that was not finished -----------------------------------------------------------

    cdef bint change_epoch(self) noexcept nogil:
        """Write the lock's epoch into the commit word. From then on a flip by the previous owner fails: it is fenced.

        Returns False if this lane was stopped here, and the lock is another lane's: that one writes a later epoch.
        """
        cdef uint64_t commit, epoch = fps_lock_epoch(self.lock.held)
        while True:
            commit = fps_commit_load(&self.shard_header.commit)
            if not self.lock.is_mine():
                return False
            if fps_commit_flip(&self.shard_header.commit, commit, fps_commit_pack(
                    fps_commit_version(commit), epoch, fps_commit_buffer(commit), fps_commit_record(commit))):
                return True

    cdef void move(self) noexcept nogil:
        """Go on in the spare workspace, from what is committed: another lane may still write in this one.

        The epoch comes first. From then on that lane cannot flip, and the copy that is committed does not change any more.
        """
        cdef uint64_t source = self.lock.workspace, target = 1 - source, commit
        cdef scheduler_t *active
        self.fold.use(source)
        if not self.change_epoch():
            return
        close_ticket(self.fold.item.words)
        commit = fps_commit_load(&self.shard_header.commit)
        active = self.arena.scheduler(self.shard, fps_commit_record(commit))
        if not self._is_sound(active):
            self.is_damaged = True
            return
        if not fps_mutant(FPS_MUTANT_SAME_WORKSPACE):
            FPS_FAILPOINT()
            self.shard_header.records[2 * target] = self.shard_header.records[fps_commit_record(commit)]
            state_copy(self.arena.scheduler(self.shard, 2 * target), active)
            fps_commit_flip(&self.shard_header.commit, commit, fps_commit_pack(
                fps_commit_version(commit), fps_commit_epoch(commit), fps_commit_buffer(commit), 2 * target))
            self.lock.workspace = target
            self.fold.use(target)
        self.repair()

    cdef void repair(self) noexcept nogil:
        """Restore the inactive copy and the rows after an unfinished commit, and write every derived word again."""
        cdef uint64_t commit = fps_commit_load(&self.shard_header.commit)
        cdef scheduler_t *active = self.arena.scheduler(self.shard, fps_commit_record(commit))
        cdef scheduler_t *inactive = self.arena.scheduler(self.shard, fps_commit_record(commit) ^ 1)
        cdef uint32_t index
        if fps_commit_workspace(commit) != self.lock.workspace:
            return  # the lock is another lane's by now
        self.batch.forget_update()
        if not fps_mutant(FPS_MUTANT_FORGET_UNDO) and not self.rows.roll_back(fps_commit_version(commit)):
            self.is_damaged = True
        if not self._is_sound(active):
            return  # nothing follows from a damaged state; the next commit reports it
        FPS_FAILPOINT()
        inactive.n_workers = active.n_workers
        state_copy(inactive, active)
        fps_counter_set(&self.shard_header.due_ns, scheduler_due(active))
        if fps_mutant(FPS_MUTANT_FORGET_HEADS):
            return
        for index in range(self.arena.header.n_lanes):
            self._publish_lane_shard(active, index)
        if self.arena.header.n_readers:
            self._call_readers()  # the dead combiner may have taken their wish and not moved the event
