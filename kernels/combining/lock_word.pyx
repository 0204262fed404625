"""The word of one shard's lock as one lane changes it: take, release, recover from a dead owner, take over from a stopped one.

A shard has two workspaces: in each are two records, two copies of the scheduler's state and a work item. Combiners use the one
that the commit word names. An owner that stops (SIGSTOP, a debugger, a frozen container) may wake at any time and write on, so
the lane that takes its lock over moves to the other workspace. The lock word then says which lane left which workspace behind.
Nobody uses that one, nor the buffers that its work item names, until the lane takes the lock again, or is dead. Where a helper
has stopped, its combiner leaves its own workspace, until the helper has ended its chunk.
"""

from libc.stdlib cimport calloc, free

from fastps.kernels.base.atomics cimport *
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.combining.shared_fold cimport close_ticket, count_helpers
from fastps.kernels.shm.arena_h cimport *


cdef class LockWord:
    """The lock word of shard `shard` of `arena` as lane `lane` changes it. Only one thread may use it."""

    def __cinit__(self, Arena arena not None, uint32_t lane, uint32_t shard):
        self.arena = arena
        self.shard_header = arena.shard_header(shard)
        self.lane = lane
        self.shard = shard
        self.generation = fps_member_generation(fps_state_acquire(&arena.lane(lane).state))
        self.ended = <uint32_t *> calloc(arena.header.n_lanes + arena.header.n_servers, sizeof(uint32_t))
        if not self.ended:
            raise MemoryError()

    def __dealloc__(self):
        free(self.ended)

    # -- taking and letting go ---------------------------------------------------------------------

    cdef bint take(self, uint64_t flags) noexcept nogil:
        """Take the lock if it is free; else set PENDING, so that its owner reads this lane again before it releases the lock.

        `flags`: FPS_BY_HAND for an owner whose lock nobody may take over, or 0.
        """
        cdef uint64_t *word = &self.shard_header.lock
        cdef uint64_t workspace, taken, seen = fps_lock_load(word)
        while True:
            if fps_lock_owner(seen) == 0:
                # A workspace changes only with the lock's epoch. So it is still this one if the lock is still as it was seen.
                workspace = fps_commit_workspace(fps_commit_load(&self.shard_header.commit))
                taken = fps_lock_free(seen) | fps_lock_pack(0, self.generation, self.lane + 1) | flags
                if fps_lock_take(word, seen, taken):
                    self._hold(taken, workspace)
                    return True
                seen = fps_lock_load(word)
                continue
            seen = fps_lock_set_pending(word, FPS_PENDING)
            if fps_lock_owner(seen) != 0:
                return False
            seen = fps_lock_load(word)

    cdef void _hold(self, uint64_t held, uint64_t workspace) noexcept nogil:
        self.held = held
        self.workspace = workspace
        self.sets_aside = fps_lock_left(held) != 0

    cdef bint release(self) noexcept nogil:
        """Write the lock as free. Returns False if anything of the word has changed: look at it, and drain again."""
        return fps_lock_release(&self.shard_header.lock, self.held, fps_lock_free(self.held))

    cdef bint let_go(self, uint64_t flag) noexcept nogil:
        """Write the lock as free, with `flag` or the PENDING that a lane set. False if the lock is another lane's."""
        cdef uint64_t *word = &self.shard_header.lock
        cdef uint64_t seen
        while True:
            seen = fps_lock_load(word)
            if fps_lock_own(seen) != fps_lock_own(self.held):
                return False
            if fps_lock_release(word, seen, fps_lock_free(seen) | (seen & FPS_PENDING) | flag):
                return True

    cdef bint clear(self, uint64_t flag) noexcept nogil:
        """Clear PENDING, LEFT or FPS_BY_HAND of the lock that this lane holds. False if it is another lane's."""
        cdef uint64_t *word = &self.shard_header.lock
        cdef uint64_t seen
        while True:
            seen = fps_lock_load(word)
            if fps_lock_own(seen) != fps_lock_own(self.held):
                return False
            if fps_lock_clear(word, seen, flag):
                self._hold(seen & ~(flag | FPS_PENDING), self.workspace)
                return True

    cdef bint is_mine(self) noexcept nogil:
        """Whether this lane still holds the lock. Only a hint, unless it does not."""
        return fps_lock_own(fps_lock_load(&self.shard_header.lock)) == fps_lock_own(self.held)

    cdef bint confirm(self) noexcept nogil:
        """Publish what this lane is about to write to a lane that takes the lock over; False if that has already happened."""
        return fps_lock_own(fps_lock_confirm(&self.shard_header.lock)) == fps_lock_own(self.held)

    # -- locks of the dead and of the stopped ------------------------------------------------------

    cdef bint recover(self, uint32_t dead_lane, uint32_t generation) noexcept nogil:
        """Take the lock of a dead owner, with the next epoch. False if that owner does not hold it."""
        cdef uint64_t *word = &self.shard_header.lock
        cdef uint64_t present, taken, seen = fps_lock_load(word)
        while True:
            # An owner before the present one is dead, too: the next one joins only after that.
            present = fps_member_generation(fps_state_acquire(&self.arena.lane(dead_lane).state)) & 0xffff
            if fps_lock_owner(seen) != dead_lane + 1 or (
                    fps_lock_generation(seen) != generation & 0xffff and fps_lock_generation(seen) == present):
                return False
            taken = fps_lock_pack(fps_lock_epoch(seen) + 1, self.generation, self.lane + 1) | (seen & FPS_LEFT)
            if fps_lock_take(word, seen, taken):
                self._hold(taken, fps_commit_workspace(fps_commit_load(&self.shard_header.commit)))
                return True
            seen = fps_lock_load(word)

    cdef bint take_over(self, uint32_t stopped) noexcept nogil:
        """Take the lock that lane `stopped` holds, or this lane's own while `stopped` helps with its fold, with the next epoch.

        The word says from then on that the owner left the workspace behind: `stopped`, which may still write in all of it, or
        this lane, where `stopped` may still write its chunk. False if the spare workspace is not free, if the owner writes by
        hand, or if someone else was faster.
        """
        cdef uint64_t *word = &self.shard_header.lock
        cdef uint64_t seen = fps_lock_load(word), owner = fps_lock_owner(seen)
        cdef uint64_t workspace = fps_commit_workspace(fps_commit_load(&self.shard_header.commit))
        cdef uint64_t taken = fps_lock_pack(fps_lock_epoch(seen) + 1, self.generation, self.lane + 1)
        if owner != stopped + 1 and not (owner == self.lane + 1 and fps_lock_own(seen) == fps_lock_own(self.held)):
            return False
        if seen & FPS_BY_HAND or not self._is_spare_free(seen, workspace):
            return False
        taken |= fps_left_pack(<uint32_t> owner - 1, workspace)
        if not fps_lock_take(word, seen, taken):
            return False
        self._hold(taken, workspace)
        return True

    cdef bint _is_spare_free(self, uint64_t seen, uint64_t workspace) noexcept nogil:
        """Whether nobody may still write in the workspace beside this one."""
        cdef uint64_t left = fps_lock_left(seen)
        if left and (fps_lock_left_workspace(seen) == workspace or not (left == self.lane + 1 or self._has_ended(left))):
            return False  # of the present one: the owner has not moved on yet, and may be about to
        return self._is_over_in(1 - workspace)

    cdef bint _is_over_in(self, uint64_t workspace) noexcept nogil:
        """Whether no lane has a chunk of a fold in that workspace, nor can claim one.

        An owner that was passed by may have issued its ticket when it woke, and died then. So the ticket is closed first.
        """
        close_ticket(self.arena.work(self.shard, workspace))
        return count_helpers(self.arena, self.shard, workspace, self.lane) == 0

    cdef bint may_reuse(self) noexcept nogil:
        """While holding: whether the workspace that was left behind may be used again. This lane left it, or its owner is dead.

        Not while another lane still helps with what was begun there.
        """
        cdef uint64_t left = fps_lock_left(self.held)
        if left != self.lane + 1 and not self._has_ended(left):
            return False
        return self._is_over_in(fps_lock_left_workspace(self.held)) or fps_mutant(FPS_MUTANT_BACK_EARLY)

    cdef bint _has_ended(self, uint64_t left) noexcept nogil:
        """Whether the owner of lane `left` - 1 writes nothing any more. The lane of an expelled one does not say so."""
        cdef uint32_t member, state
        if left > self.arena.header.n_lanes + self.arena.header.n_servers:
            return False
        member = fps_state_acquire(&self.arena.lane(left - 1).state)
        state = fps_member_state(member)
        return state == FPS_LANE_DEAD or state == FPS_LANE_LEFT or (
            state == FPS_LANE_EXPELLED and self.ended[left - 1] == fps_member_generation(member) + 1)
