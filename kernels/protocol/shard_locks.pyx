"""All shards as one lane has them: pins of what it reads, and locks to combine, to recover, or to hold and write by hand."""

from libc.stdint cimport UINT64_MAX, uintptr_t
from libc.stdlib cimport calloc, free

from fastps.kernels.base.atomics cimport fps_help_change, fps_help_load, fps_lock_load, fps_pin_exchange, fps_state_acquire
from fastps.kernels.combining.combiner cimport Combiner, played_t
from fastps.kernels.combining.commit cimport Commit
from fastps.kernels.combining.lock_word cimport *
from fastps.kernels.protocol.pins cimport pin_published
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport fps_user_rule


cdef class ShardLocks(Pins):
    """The pins and the shard locks of lane `index` of `arena`. The caller has claimed the lane."""

    def __cinit__(self, Arena arena not None, uint32_t index):
        cdef uint32_t shard
        arena._check_lane(index)
        self.bad_lane = -1
        self.helper = SharedFold(arena, index, 0)
        self.combiners = tuple([Combiner(arena, index, shard) for shard in range(self.n_shards)])
        for shard in range(self.n_shards):
            self.pins[shard] = &arena.lane_shard(index, shard).pin
            self._combiners[shard] = <PyObject *> self.combiners[shard]  # without the GIL, only while `combiners` keeps them

    # -- pins of what the worker reads, and of what it fetches for the next steps --------------------

    cdef void _reads(self, uint32_t shard, uint64_t version) noexcept nogil:
        """This step reads the shard's version."""
        self.versions[shard] = version
        if self.has_pushed:
            self.has_pushed = False
            self.fresh = 0
        self.fresh |= <uint64_t> 1 << shard

    def prefetch(self, uint32_t shard=0):
        """Pin a shard's published weights as the next ones; returns (buffer, version), the buffer as `pull` does.

        The pulled weights and those that are kept stay pinned. Another thread than the one that pulls may call this.
        """
        cdef uint64_t commit
        self.arena._check_shard(shard)
        commit = self._prefetch(shard)
        return self._buffer_of(commit), fps_commit_version(commit)

    def prefetch_kept(self, uint64_t buffer, uint32_t shard=0):
        """Pin a buffer as the next one. Another lane keeps it pinned meanwhile."""
        self.arena._check_shard(shard)
        fps_pin_exchange(&self.arena.lane_shard(self.index, shard).next, buffer + 1)

    cdef uint64_t _prefetch(self, uint32_t shard) noexcept nogil:
        return pin_published(&self.arena.shard_header(shard).commit, &self.arena.lane_shard(self.index, shard).next)

    def keep_prefetched(self, uint64_t buffer, uint32_t shard=0):
        """Keep what `prefetch` returned, in place of what was kept before. It stays pinned during the next prefetch."""
        self.arena._check_shard(shard)
        self._keep(shard, buffer)

    cdef void _keep(self, uint32_t shard, uint64_t buffer) noexcept nogil:
        fps_pin_exchange(&self.arena.lane_shard(self.index, shard).ready, buffer + 1)

    def take_prefetched(self, uint64_t buffer, uint64_t version, uint32_t shard=0):
        """Read the weights that are kept from now on: a swap of pins. Not during `keep_prefetched`."""
        self.arena._check_shard(shard)
        self._take(shard, buffer, version)

    cdef void _take(self, uint32_t shard, uint64_t buffer, uint64_t version) noexcept nogil:
        fps_pin_exchange(self.pins[shard], buffer + 1)
        self._reads(shard, version)

    @property
    def version(self):
        """The newest version among the shards' last pulls."""
        cdef uint64_t newest = 0
        cdef uint32_t shard
        for shard in range(self.n_shards):
            newest = max(newest, self.versions[shard])
        return newest

    cdef uint64_t _oldest(self) noexcept nogil:
        """The oldest version among the shards that were pulled for this step: the timestamp of its push."""
        cdef uint64_t oldest = UINT64_MAX
        cdef uint32_t shard
        if self.n_shards == 1:
            return self.versions[0]
        for shard in range(self.n_shards):
            if (self.fresh >> shard) & 1:
                oldest = min(oldest, self.versions[shard])
        return oldest

    def unpin(self):
        """End the reads of all pulled and fetched buffers."""
        self.arena._drop_pins(self.index)

    # -- the shard lock ----------------------------------------------------------------------------------

    def try_combine(self, int64_t now_ns=0):
        """Combine every shard whose lock is free. Returns DONE, BUSY, FENCED or a negative outcome. Releases the GIL.

        Timers that are due at `now_ns` are fired. Each worker starts at another shard, so that they do not queue.
        """
        cdef int outcome
        with nogil:
            outcome = self._try_combine(now_ns)
        return outcome

    cdef int _try_combine(self, int64_t now_ns) noexcept nogil:
        cdef uint32_t turned, shard
        cdef int outcome, worst = COMBINE_DONE
        for turned in range(self.n_shards):
            shard = (self.index + turned) % self.n_shards
            outcome = self._noted(shard, (<Combiner> self._combiners[shard]).try_combine(now_ns))
            if outcome == COMBINE_FENCED or outcome < 0:
                return outcome
            worst = max(worst, outcome)
        return worst

    cdef int _noted(self, uint32_t shard, int outcome) noexcept nogil:
        """The outcome, with the damaged lane of a BAD_DESCRIPTOR written down."""
        if outcome == COMBINE_BAD_DESCRIPTOR:
            self.bad_lane = (<Combiner> self._combiners[shard]).lanes.bad_lane
            self.damage = (<Combiner> self._combiners[shard]).lanes.damage
        return outcome

    def play(self, uint32_t shard, list events not None):
        """Make one commit of a shard: of each (lane, virtual time) the lane's next descriptor, or of lane -1 the due timer.

        Lane -2 - w: worker w, which is marked dead or waits to join, is no longer counted, or is admitted.
        What else is posted stays, so the driver of a simulated or replayed job decides each order. Returns as `try_combine`.
        Raises IndexError.
        """
        cdef int64_t index, count = len(events)
        cdef played_t *played
        cdef int outcome
        self.arena._check_shard(shard)
        for lane, _ in events:
            if lane != -1:
                self.arena._check_lane(lane if lane >= 0 else -2 - lane)
        played = <played_t *> calloc(count + 1, sizeof(played_t))
        if played == NULL:
            raise MemoryError()
        try:
            for index in range(count):
                played[index].lane, played[index].at_ns = events[index]
            with nogil:
                outcome = self._noted(shard, (<Combiner> self._combiners[shard]).play(played, count))
        finally:
            free(played)
        return outcome

    def log_events(self, list descriptors not None):
        """Log from now on what this lane gives each shard's scheduler into an empty file, as records of EVENT_DTYPE.

        The log has the descriptors from then on; without any, it ends. A record that is not published has 0 as its last byte.
        """
        cdef Combiner combiner
        if not descriptors:
            for combiner in self.combiners:
                combiner.log.is_on = False  # and stays mapped: another thread may combine
            return
        for combiner, descriptor in zip(self.combiners, descriptors, strict=True):
            combiner.log.begin_in(descriptor)

    def owner(self, uint32_t shard=0):
        """The lane that holds a shard's lock, or -1."""
        self.arena._check_shard(shard)
        return <int64_t> fps_lock_owner(fps_lock_load(&self.arena.shard_header(shard).lock)) - 1

    def recover_lock(self, uint32_t dead_lane, int64_t now_ns=0, generation=None):
        """Take every lock that an owner of `dead_lane`, whose process is proved dead, holds, and combine. BUSY if it held none.

        By default the owner is the present one. An earlier owner's lock is taken, too. Raises IndexError for a lane that the
        arena has not.

        A combiner that waits for the dead helper folds its chunks again; where this lane is that combiner, it resumes.
        """
        cdef int found
        cdef uint32_t owner
        owner = self.arena._generation_of(dead_lane, generation)
        with nogil:
            found = self._recover_locks(dead_lane, owner, now_ns)
        return found

    def lose(self, uint32_t lane, uint32_t generation, int64_t now_ns):
        """The order of a death: recover the locks of an owner that is proved to have ended, then mark it dead, as `mark_dead`.

        So no lock of it stays taken once the others stop waiting for it. It may be done again, by any lane.
        """
        cdef bint is_marked
        with nogil:
            is_marked = self._lose(lane, generation, now_ns)
        return is_marked

    cdef bint _lose(self, uint32_t lane, uint32_t generation, int64_t now_ns) except -1 nogil:
        self._recover_locks(lane, generation, now_ns)
        return self.arena.mark_dead(lane, generation)

    cdef int _recover_locks(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil:
        cdef uint32_t shard
        cdef int outcome, found = COMBINE_BUSY
        cdef uint32_t helping = fps_help_load(&self.arena.lane(dead_lane).helping)
        if helping and fps_member_generation(helping) == generation:
            fps_help_change(&self.arena.lane(dead_lane).helping, helping, 0)
        for shard in range(self.n_shards):
            (<Combiner> self._combiners[shard]).lock.ended[dead_lane] = generation + 1
            (<Combiner> self._combiners[shard]).resume(now_ns)
            outcome = self._noted(shard, (<Combiner> self._combiners[shard]).recover_lock(dead_lane, generation, now_ns))
            if outcome != COMBINE_BUSY:
                found = outcome
        return found

    def holders(self):
        """What each shard's work waits for: (lane, word), or None where nothing is under way.

        The lane holds the shard's lock, or helps with the fold for which this lane holds it. The word changes with each commit
        and each owner of the lock: while it stays the same, nothing has been done.
        """
        return [(<Combiner> combiner).holder() for combiner in self.combiners]

    def pass_by(self, uint32_t stopped, int64_t now_ns=0):
        """Go on without a lane whose process is stopped: take over the locks that it holds, and leave what it helps with.

        Returns BUSY if it holds up nothing, or cannot be passed by: rows are folded in place, a device has its own order of
        work, and only one stopped lane at a time is passed by in a shard. Its late writes hit nothing. If it runs after all,
        that costs it a fold and nothing else. Reserve `Arena.spare_ranges` first. Raises IndexError for a lane that the arena
        has not.
        """
        cdef int found
        self.arena._check_lane(stopped)
        with nogil:
            found = self._pass_by(stopped, now_ns)
        return found

    cdef int _pass_by(self, uint32_t stopped, int64_t now_ns) noexcept nogil:
        cdef uint32_t shard
        cdef int outcome, found = COMBINE_BUSY
        for shard in range(self.n_shards):
            outcome = self._noted(shard, (<Combiner> self._combiners[shard]).pass_by(stopped, now_ns))
            if outcome != COMBINE_BUSY:
                found = outcome
        return found

    def was_passed_by(self):
        """Whether this lane has left a workspace behind, and has not taken that lock again since. It may not leave before that.

        It was passed by, or passed a helper by. What it wrote late, a few counters, is written again when it takes the lock.
        """
        return self._was_passed_by()

    cdef bint _was_passed_by(self) noexcept nogil:
        cdef uint32_t shard
        for shard in range(self.n_shards):
            if fps_lock_left(fps_lock_load(&self.arena.shard_header(shard).lock)) == self.index + 1:
                return True
        return False

    def recover_stale_locks(self, int64_t now_ns=0):
        """Do what `recover_lock` does for every owner that its lane's state word says has ended.

        A peer recovers a lane's lock before it marks the lane dead. The next owner of the lane marks it dead, claims it, and
        recovers the lock last; it may die or be stopped in between.
        """
        with nogil:
            self._recover_stale_locks(now_ns)

    cdef void _recover_stale_locks(self, int64_t now_ns) noexcept nogil:
        cdef uint32_t shard, index, helping, lanes = self.arena.header.n_lanes + self.arena.header.n_servers
        cdef uint64_t lock
        for index in range(lanes):
            helping = fps_help_load(&self.arena.lane(index).helping)
            if helping and self._is_stale(index, fps_member_generation(helping), 0xffffff):
                fps_help_change(&self.arena.lane(index).helping, helping, 0)
        for shard in range(self.n_shards):
            lock = fps_lock_load(&self.arena.shard_header(shard).lock)
            index = <uint32_t> fps_lock_owner(lock)
            if 0 < index <= lanes and self._is_stale(index - 1, fps_lock_generation(lock), 0xffff):
                (<Combiner> self._combiners[shard]).recover_lock(index - 1, fps_lock_generation(lock), now_ns)

    cdef bint _is_stale(self, uint32_t lane, uint64_t generation, uint64_t known) noexcept nogil:
        """Whether an owner of a lane has ended. `known`: which bits of its generation are given."""
        cdef uint32_t member = fps_state_acquire(&self.arena.lane(lane).state)
        cdef uint32_t state = fps_member_state(member)
        return (fps_member_generation(member) & known) != generation or state == FPS_LANE_DEAD or state == FPS_LANE_LEFT

    # -- writing by hand: the start, and loading a checkpoint --------------------------------------

    def hold(self, uint32_t shard=0):
        """Take a shard's lock and keep it, to write buffers and then `release` it. False if another lane holds it."""
        self.arena._check_shard(shard)
        return (<Combiner> self.combiners[shard]).take(FPS_BY_HAND)

    def spare(self, uint32_t shard=0):
        """While holding: (weights buffer, state buffer) that nobody reads, to be written whole and then published."""
        cdef Commit commit
        cdef int64_t buffer
        self.arena._check_shard(shard)
        commit = (<Combiner> self.combiners[shard]).commit
        buffer = commit.find_spare()
        if buffer < 0:
            raise RuntimeError("every weights buffer is pinned: more readers than the arena was made for")
        return buffer, commit.spare_state

    def release(self, bint publish, uint32_t shard=0, int64_t now_ns=0, bint advances=False):
        """While holding: publish the spare buffers, or not; then drain and release as usual.

        The version stays. With `advances` it rises by one and wakes readers: the caller wrote all that it carries, too.
        """
        cdef Combiner combiner
        cdef int outcome
        self.arena._check_shard(shard)
        combiner = self.combiners[shard]
        with nogil:
            outcome = self._noted(shard, combiner.release(publish, now_ns, advances))
        return outcome

    def last_used(self, uint32_t shard, uint32_t readers):
        """While holding: the highest weights buffer that is active, or pinned by a lane or by one of the first `readers`."""
        self.arena._check_shard(shard)
        return (<Combiner> self.combiners[shard]).commit.last_used(readers)

    # -- folds -------------------------------------------------------------------------------------

    def set_user_rule(self, uintptr_t address):
        """Set the job's own compiled update rule, which every combiner and helper calls. It must outlive this lane."""
        cdef Combiner combiner
        for combiner in self.combiners:
            combiner.fold.item.user_rule = <fps_user_rule> address
        self.helper.item.user_rule = <fps_user_rule> address

    def fold_with(self, fold_elsewhere not None, shards not None, bint nothing=False):
        """Fold the given shards by calling `fold_elsewhere` with a FoldCall, and take no other shard's lock.

        `fold_elsewhere` folds on a device or on another node, or queues the fold there. If some of the pushes are non-finite it
        may instead return for each push a parameter that is, or -1; those are rejected, and it is called for the others. An
        error that it raises gives the outcome BAD_FOLD and is `fold_failure`. With `nothing` it is also called,
        without pushes, for a version of null pushes alone.
        """
        cdef Combiner combiner
        for combiner in self.combiners:
            combiner.fold.device = fold_elsewhere
            combiner.fold.on_device = True
            combiner.fold.folds_nothing = nothing
            combiner.hands_over = combiner.shard not in shards

    @property
    def fold_failure(self):
        """The error of the last fold on a device that failed, or None."""
        cdef Combiner combiner
        for combiner in self.combiners:
            if combiner.fold.failure is not None:
                return combiner.fold.failure
        return None

    def wake_all(self):
        """Wake every lane that sleeps, for a push that this lane cannot fold itself."""
        (<Combiner> self.combiners[0]).wake_all()

    def share_folds(self, uint32_t helpers, bytes cores not None=b""):
        """Let waiting lanes help with this lane's folds, and help with theirs. Up to `helpers` sleepers are woken; 0: never.

        Every lane begins with one of `helpers` + 1 parts: what its core read and wrote in the last fold. `cores` has the part
        of each core, by the core's number; without it every lane has its own part. Folds that are too short to gain are not
        shared. Only one thread at a time may use the lane.
        """
        cdef Combiner combiner
        self.helper.share(helpers, cores)
        for combiner in self.combiners:
            combiner.fold.share(helpers, cores)

    def stream_folds(self, bint streaming):
        """Set whether this lane's folds use non-temporal stores. The results have the same bits."""
        cdef Combiner combiner
        for combiner in self.combiners:
            combiner.fold.item.streaming = streaming

    def begins_with(self, uint64_t chunks):
        """The chunks with which this lane begins a shared fold of `chunks` chunks, at most 56: one bit each."""
        if not 1 <= chunks <= FPS_MAX_CHUNKS:
            raise ValueError(f"expected 1 to {FPS_MAX_CHUNKS} chunks, found {chunks}")
        return self.helper.own_part(chunks)

    @property
    def helped(self):
        """Chunks of others' folds that this lane has folded."""
        return self.helper.helped

    cdef bint _is_offered(self) noexcept nogil:
        """Whether a shard lock is offered. Read after the event, which moves when a lock is offered."""
        cdef uint32_t shard
        for shard in range(self.n_shards):
            if (<Combiner> self._combiners[shard]).is_offered():
                return True
        return False

    cdef bint _help(self) noexcept nogil:
        """Help with every shard's fold that is being made."""
        cdef uint32_t shard
        cdef bint helped = False
        for shard in range(self.n_shards):
            self.helper.switch_to(shard)
            helped = self.helper.help() or helped
        return helped
