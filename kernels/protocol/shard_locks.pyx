"""The turns of all shards as one lane takes them: run, broken where their owner died, or held to write by hand.

Refuses to know what the lane posts and what it waits for.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from fastps.kernels.base.atomics cimport fps_help_end, fps_help_load, fps_state_acquire, fps_turn_load
from fastps.kernels.protocol.combiner cimport Holder
from fastps.kernels.protocol.commit cimport TURN_BAD_DESCRIPTOR, TURN_BUSY, TURN_DONE, TURN_LOST, Commit
from fastps.kernels.protocol.pins cimport Reader
from fastps.kernels.protocol.shared_fold cimport SharedFold
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport (
    FPS_LANE_DEAD,
    FPS_LANE_LEFT,
    FPS_MAX_CHUNKS,
    fps_member_generation,
    fps_member_state,
    fps_turn_generation,
    fps_turn_owner,
)
from fastps.kernels.update.fold cimport fps_user_rule


cdef class ShardLocks(Reader):
    """The turns that lane `index` of `arena`, which the caller has claimed, may take. See Lane."""

    def __cinit__(self, Arena arena not None, uint32_t index):
        self.bad_lane = -1
        self.helper = SharedFold(arena, index, 0)
        self.holders = tuple([Holder(arena, index, shard) for shard in range(self.n_shards)])
        for shard in range(self.n_shards):
            self._holders[shard] = <PyObject *> self.holders[shard]  # without the GIL, only while `holders` keeps them

    # -- the turn ----------------------------------------------------------------------------------

    def try_turn(self, int64_t now_ns=0):
        """Take each shard's turn if it is free, and run it. Returns DONE, BUSY, LOST or a negative outcome. Releases the GIL.

        Timers that are due at `now_ns` are fired. Each worker starts at another shard, so that they do not queue.
        """
        cdef int outcome
        with nogil:
            outcome = self._try_turns(now_ns)
        return outcome

    cdef int _try_turns(self, int64_t now_ns) noexcept nogil:
        cdef uint32_t turned, shard
        cdef int outcome, worst = TURN_DONE
        for turned in range(self.n_shards):
            shard = (self.index + turned) % self.n_shards
            if (<Holder> self._holders[shard]).is_idle():
                continue
            outcome = (<Holder> self._holders[shard]).try_turn(now_ns)
            if outcome == TURN_BAD_DESCRIPTOR:
                self.bad_lane = (<Holder> self._holders[shard]).bad_lane
            if outcome == TURN_LOST or outcome < 0:
                return outcome
            worst = max(worst, outcome)
        return worst

    def owner(self, uint32_t shard=0):
        """The lane that holds a shard's turn, or -1."""
        self._check_shard(shard)
        return <int64_t> fps_turn_owner(fps_turn_load(&self.arena.domain(shard).turn)) - 1

    def break_turn(self, uint32_t dead_lane, int64_t now_ns=0, generation=None):
        """Take every turn that that owner of `dead_lane` holds, whose process is proved dead, and run it. BUSY if it held none.

        By default the owner is the present one. An earlier owner's turn is taken, too. Raises IndexError for a lane that the
        arena has not.

        What it was helping with is folded again by whoever waits for it: turns of this lane that do are gone on with.
        """
        cdef int found
        cdef uint32_t dead_generation
        self.arena._check_lane(dead_lane)
        if generation is None:
            generation = fps_member_generation(fps_state_acquire(&self.arena.lane(dead_lane).state))
        dead_generation = generation
        with nogil:
            found = self._break_turns(dead_lane, dead_generation, now_ns)
        return found

    cdef int _break_turns(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil:
        cdef uint32_t shard
        cdef int outcome, found = TURN_BUSY
        cdef uint32_t helping = fps_help_load(&self.arena.lane(dead_lane).helping)
        if helping and fps_member_generation(helping) == generation:
            fps_help_end(&self.arena.lane(dead_lane).helping, helping)
        for shard in range(self.n_shards):
            (<Holder> self._holders[shard]).resume(now_ns)
            outcome = (<Holder> self._holders[shard]).break_turn(dead_lane, generation, now_ns)
            if outcome != TURN_BUSY:
                found = outcome
        return found

    def break_stale_turns(self, int64_t now_ns=0):
        """As `break_turn`, of every owner that is known to have ended, by its lane's own word.

        Whoever buries a lane breaks its turn first, but for who comes to own it: that one buries, claims, then breaks, and may
        die or be stopped in between.
        """
        with nogil:
            self._break_stale_turns(now_ns)

    cdef void _break_stale_turns(self, int64_t now_ns) noexcept nogil:
        cdef uint32_t shard, index, helping, lanes = self.arena.header.n_lanes + self.arena.header.n_servers
        cdef uint64_t turn
        for index in range(lanes):
            helping = fps_help_load(&self.arena.lane(index).helping)
            if helping and self._is_stale(index, fps_member_generation(helping), 0xffffff):
                fps_help_end(&self.arena.lane(index).helping, helping)
        for shard in range(self.n_shards):
            turn = fps_turn_load(&self.arena.domain(shard).turn)
            index = <uint32_t> fps_turn_owner(turn)
            if 0 < index <= lanes and self._is_stale(index - 1, fps_turn_generation(turn), 0xffff):
                (<Holder> self._holders[shard]).break_turn(index - 1, fps_turn_generation(turn), now_ns)

    cdef bint _is_stale(self, uint32_t lane, uint64_t generation, uint64_t known) noexcept nogil:
        """Whether an owner of a lane has ended; of its generation the bits `known` are given."""
        cdef uint32_t member = fps_state_acquire(&self.arena.lane(lane).state)
        cdef uint32_t state = fps_member_state(member)
        return (fps_member_generation(member) & known) != generation or state == FPS_LANE_DEAD or state == FPS_LANE_LEFT

    # -- writing by hand: the start, and loading a checkpoint --------------------------------------

    def hold(self, uint32_t shard=0):
        """Take a shard's turn and keep it; False when another has it. The caller writes buffers, then calls `release`."""
        self._check_shard(shard)
        return (<Holder> self.holders[shard]).take()

    def spare(self, uint32_t shard=0):
        """While holding: (weights buffer, state buffer) that nobody reads, to be written whole and then published."""
        cdef Commit commit
        cdef int64_t buffer
        self._check_shard(shard)
        commit = (<Holder> self.holders[shard]).commit
        buffer = commit.find_spare()
        if buffer < 0:
            raise RuntimeError("every weights buffer is pinned: more readers than the arena was made for")
        return buffer, commit.spare_state

    def release(self, bint publish, uint32_t shard=0, int64_t now_ns=0):
        """While holding: publish the spare buffers as they are (the version stays), or not; then run the turn as usual."""
        cdef Holder holder
        cdef int outcome
        self._check_shard(shard)
        holder = self.holders[shard]
        with nogil:
            outcome = holder.release(publish, now_ns)
        return outcome

    # -- folds -------------------------------------------------------------------------------------

    def set_user_rule(self, uintptr_t address):
        """The job's own update rule, compiled by kernels/update/jit.py: whoever takes the turn calls it. It must outlive this
        lane.
        """
        cdef Holder holder
        for holder in self.holders:
            holder.fold.item.user_rule = <fps_user_rule> address
        self.helper.item.user_rule = <fps_user_rule> address

    def fold_with(self, device not None, shards not None):
        """Fold the given shards by calling `device`, and take no other shard's turn: their memory is on another device.

        `device(shard, mode, scale, rate_scale, weights_in, weights_out, state_in, state_out, pushes)`, pushes being (lane,
        slot, scale, rate_scale), queues the fold on its device; an error that it raises ends the turn as BAD_FOLD and is
        `fold_failure`.
        """
        cdef Holder holder
        for holder in self.holders:
            holder.fold.device = device
            holder.fold.on_device = True
            holder.hands_over = holder.shard not in shards

    @property
    def fold_failure(self):
        """The error of the last fold on a device that failed, or None."""
        cdef Holder holder
        for holder in self.holders:
            if holder.fold.failure is not None:
                return holder.fold.failure
        return None

    def hand_over(self, bint hands_over):
        """Whether this lane leaves every shard's turn to the server. It may still hold one, and lets go without draining."""
        cdef Holder holder
        for holder in self.holders:
            holder.hands_over = hands_over

    def nudge(self):
        """Wake whoever sleeps, for a push that this lane cannot fold itself."""
        (<Holder> self.holders[0]).nudge_all()

    def share_folds(self, uint32_t helpers, bytes cores not None=b""):
        """Let waiting lanes help with this lane's folds, of whom `helpers` are woken for it, and help with theirs; 0: never.

        Everyone begins with one of `helpers` + 1 parts: what its core read and wrote in the last fold. `cores` says for each
        core by its number which part that is; without it every lane has its own. Folds that are too short to be worth it are
        not shared. Only where one thread at a time uses the lane.
        """
        cdef Holder holder
        self.helpers = helpers
        self.helper.share(helpers, cores)
        for holder in self.holders:
            holder.fold.share(helpers, cores)

    def stream_folds(self, bint streaming):
        """Whether this lane's folds store past the caches, as the holder of a turn; the results have the same bits."""
        cdef Holder holder
        for holder in self.holders:
            holder.fold.item.streaming = streaming

    def begins_with(self, uint64_t chunks):
        """With which chunks this lane begins a shared fold of so many, at most 56: one bit each."""
        if not 1 <= chunks <= FPS_MAX_CHUNKS:
            raise ValueError(f"expected 1 to {FPS_MAX_CHUNKS} chunks, found {chunks}")
        return self.helper.own_part(chunks)

    @property
    def helped(self):
        """Chunks of others' folds that this lane has folded."""
        return self.helper.helped

    cdef bint _is_offered(self) noexcept nogil:
        """Whether a turn waits for this lane to take it. Looked at after the event, which moves when a turn is offered."""
        cdef uint32_t shard
        for shard in range(self.n_shards):
            if (<Holder> self._holders[shard]).is_offered():
                return True
        return False

    cdef bint _help(self) noexcept nogil:
        """Take part in every shard's fold that is being made."""
        cdef uint32_t shard
        cdef bint helped = False
        for shard in range(self.n_shards):
            self.helper.turn_to(shard)
            helped = self.helper.help() or helped
        return helped
