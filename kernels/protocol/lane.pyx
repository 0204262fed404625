"""A lane as its worker uses it: slots, posts, waits, and one compiled call for each part of a step, over all shards.

docs/architecture/protocol.md has a picture of the life of a push after backward. Times are arguments.
"""

cimport cython
from libc.math cimport NAN
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps.kernels.base.atomics cimport *
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.combining.combiner cimport Combiner
from fastps.kernels.combining.lock_word cimport *
from fastps.kernels.combining.ring cimport lane_descriptor, lane_post
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport fps_hyper

cdef enum:
    # Return after this many help rounds so Python can run signal handlers.
    HELP_ROUNDS = 4
    # Polls before a lane that has helped sleeps again: the commit comes soon.
    SPINS_AFTER_HELP = 2000

# Outcomes of try_combine and recover_lock.
DONE = COMBINE_DONE                      # everything posted before is decided
BUSY = COMBINE_BUSY                      # another lane combines, and will see what was posted
FENCED = COMBINE_FENCED                  # another lane recovered this lock; nothing was committed after that
AWAITING = COMBINE_AWAITING              # a helper still has a chunk: check the peers, then try again
BAD_DESCRIPTOR = COMBINE_BAD_DESCRIPTOR  # lane `bad_lane` holds a descriptor that no worker of ours can have posted
NO_BUFFER = COMBINE_NO_BUFFER            # every weights buffer is active or pinned: there are more readers than planned
BAD_FOLD = COMBINE_BAD_FOLD              # the fold refused its job
BAD_STATE = COMBINE_BAD_STATE            # something wrote over the committed scheduler state
UNSERVED = LANE_UNSERVED                 # the server has ended: `leave_to_server(False)`, then combine
# Further outcomes of a push, by which nothing was done.
FULL = PUSH_FULL                         # the ring is full
EARLY = PUSH_EARLY                       # the previous push still `awaits` its grant
EXPELLED = PUSH_EXPELLED                 # this lane was expelled

# Answers of announced.
UNDECIDED = -1
LEAVING = -2

KIND_PUSH = FPS_PUSH
KIND_NULL = FPS_NULL
KIND_LEAVE = FPS_LEAVE


@cython.final
cdef class Lane(ShardLocks):
    """One attached lane: the compiled half of a worker. Only one thread may use it.

    `index` is the lane of `arena` that the caller has claimed. `weight` is the number of gradients that each push is a sum of:
    a mean divides by the weights of its pushes. 0, the default, is 1. A server's lane makes no steps.

    Attributes:
        steps: steps pushed so far, as the scheduler counts them; the owner sets the first value.
        earlier_steps: added to `steps` in the tally.
        posts: pushes and null pushes so far; some may still be on their way.
        slot: the slot of the next push, once `advance` or `choose_slot` has chosen it.
        awaits: whether a push was begun since the last completed `advance`.
        granted_ns: when the present step could begin, by its worker's clock.
        wait_ns, compute_ns: time waited, and between grants and pushes.
        push_ns: time from each push's begin to its `advance`: it posts, and folds what it finds.
        pushed_ns: when the push began whose time is not in push_ns yet; 0: there is none.
        samples, stale_blocks, loss: as the owner sets them.
    """

    def __cinit__(self, Arena arena not None, uint32_t index):
        self.words = arena.lane(index)
        self.ahead = <int64_t *> calloc(arena.header.n_shards, sizeof(int64_t))
        self.free_at = <uint64_t *> calloc(arena.header.n_slots, sizeof(uint64_t))
        if self.ahead == NULL or self.free_at == NULL:
            raise MemoryError()
        self.loss = NAN
        self._begin()

    def __dealloc__(self):
        free(self.ahead)
        free(self.free_at)

    # -- slots and posts ---------------------------------------------------------------------------

    def set_hyper(self, uint32_t slot, uint32_t group, *values):
        """Write a param_group's hyper-parameters into the slot; they travel with its next push. `values`: of fps_hyper."""
        cdef fps_hyper *hyper
        if group >= self.arena.header.n_groups:
            raise IndexError(f"expected a group of 0 to {self.arena.header.n_groups - 1}, found {group}")
        self.arena._check_slot(slot)
        hyper = <fps_hyper *> self.arena.slot(self.index, slot) + group
        FPS_FAILPOINT()
        (hyper.learning_rate, hyper.momentum, hyper.dampening, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.epsilon,
         hyper.learning_rate_decay, hyper.flags) = values

    def set_presence(self, uint32_t slot, bytes words not None):
        """Write the bitmap of the parameters that have a gradient in the slot: uint64 words, little endian."""
        cdef uint64_t size = self.arena.header.presence_words * sizeof(uint64_t)
        self.arena._check_slot(slot)
        if <uint64_t> len(words) != size:
            raise ValueError(f"expected {size} bytes of presence, found {len(words)}")
        FPS_FAILPOINT()
        memcpy(self.arena.slot(self.index, slot) + self.arena.header.slot_presence_offset, <char *> words, size)

    def set_versions(self, uint32_t slot):
        """Write into the slot the version of each shard that its gradient is computed with: the one that was pulled."""
        self.arena._check_slot(slot)
        self._set_versions(slot)

    cdef void _set_versions(self, uint32_t slot) noexcept nogil:
        FPS_FAILPOINT()
        memcpy(self.arena.slot(self.index, slot) + self.arena.header.slot_versions_offset, self.versions,
               self.n_shards * sizeof(uint64_t))

    def post(self, int kind, uint64_t step, uint32_t slot, uint64_t read_version, int64_t post_ns, double scale=1.0,
             double loss=NAN, uint32_t samples=0):
        """Post one descriptor; False when the ring is full, or this lane was expelled. The slot must stay as it is until `done`
        has passed it.
        """
        return self._post(kind, step, slot, read_version, post_ns, scale, loss, samples)

    cdef bint _post(self, int kind, uint64_t step, uint32_t slot, uint64_t read_version, int64_t post_ns, double scale,
                    double loss, uint32_t samples) noexcept nogil:
        cdef fps_descriptor descriptor
        if self.is_expelled():
            return False
        memset(&descriptor, 0, sizeof(descriptor))
        descriptor.kind = kind
        descriptor.step = step
        descriptor.slot = slot
        descriptor.read_version = read_version
        descriptor.post_ns = post_ns
        descriptor.scale = scale
        descriptor.loss = loss
        descriptor.samples = samples
        descriptor.weight = self.weight
        return lane_post(self.words, self.arena.header.ring_size, self._done(self.index), &descriptor) == 0

    def posted(self):
        """Descriptors posted so far."""
        return self.words.tail

    def posted_null(self):
        """Whether the newest descriptor posted is a null push, whose step has neither a gradient nor options."""
        cdef uint64_t tail = fps_tail_acquire(&self.words.tail)
        return tail > 0 and lane_descriptor(self.words, self.arena.header.ring_size, tail - 1).kind == FPS_NULL

    cdef uint64_t _done(self, uint32_t lane) noexcept nogil:
        cdef uint64_t done = fps_head_acquire(&self.arena.lane_shard(lane, 0).head)
        cdef uint32_t shard
        for shard in range(1, self.n_shards):
            done = min(done, fps_head_acquire(&self.arena.lane_shard(lane, shard).head))
        return done

    def announce(self, uint64_t digest):
        """Announce that the next push is computed with weights that the script has written, of this digest of 1 to 48 bits.

        0 takes it back. The lane's next owner takes back what an owner that died has announced.
        """
        fps_counter_set(&self.words.written, fps_written_pack(self.words.tail, digest) if digest else 0)

    def announced(self):
        """What the lane's owner has announced of its push of the present version: a digest, or 0 if it has pushed without one.

        UNDECIDED if it has neither announced nor pushed, LEAVING if it pushes no more. Exact while all shard locks are held.
        """
        cdef uint64_t tail = fps_tail_acquire(&self.words.tail), word = fps_counter_get(&self.words.written)
        cdef bint has_pushed = tail > self._done(self.index)
        if has_pushed and lane_descriptor(self.words, self.arena.header.ring_size, tail - 1).kind == FPS_LEAVE:
            return LEAVING
        tail -= has_pushed
        if word and word >> FPS_DIGEST_BITS == tail & 0xffff:
            return word & ((<uint64_t> 1 << FPS_DIGEST_BITS) - 1)
        return 0 if has_pushed else UNDECIDED

    def mark(self, uint64_t parts):
        """Say that so many parts of the next push are in the slot, and call the server, which may read them before the push."""
        fps_early_release(&self.words.early, fps_early_pack(self.words.tail, parts))
        if self.served:
            (<Combiner> self._combiners[0]).call(self.arena.header.n_lanes)

    def marked(self):
        """How many parts of the next push the lane's owner has marked; -1 while its last push is not decided."""
        cdef uint64_t early = fps_early_acquire(&self.words.early), tail = fps_tail_acquire(&self.words.tail)
        if tail > self._done(self.index):
            return -1
        return early & ((<uint64_t> 1 << FPS_EARLY_BITS) - 1) if early >> FPS_EARLY_BITS == tail else 0

    def done(self):
        """Descriptors that every shard is done with: their slots are free."""
        return self._done(self.index)

    cpdef bint is_expelled(self) noexcept nogil:
        """Whether a combiner has found this lane's words damaged: its owner may push no more."""
        return fps_member_state(fps_state_acquire(&self.words.state)) == FPS_LANE_EXPELLED

    # -- a server ------------------------------------------------------------------------------------

    def leave_to_server(self, bint served):
        """Set whether this lane leaves combining to the server: it then calls the server instead.

        Raises RuntimeError for an arena without a lane for a server.
        """
        if served and not self.arena.header.n_servers:
            raise RuntimeError("expected an arena with a lane for a server, found one whose workers take the turns")
        self._leave_to_server(served)

    cdef void _leave_to_server(self, bint served) noexcept nogil:
        cdef uint32_t shard
        self.served = served
        for shard in range(self.n_shards):
            (<Combiner> self._combiners[shard]).hands_over = served

    cdef int _try_combine(self, int64_t now_ns) noexcept nogil:
        """Combine; where the server does that, call it. LANE_UNSERVED if it has ended.

        A lane that is served ends what it holds: a lock that it recovered from a dead worker and could not release yet.
        """
        if not self.served:
            return ShardLocks._try_combine(self, now_ns)
        if not self.arena.is_served():
            return LANE_UNSERVED
        if not fps_mutant(FPS_MUTANT_FORGET_CALL):
            (<Combiner> self._combiners[0]).call(self.arena.header.n_lanes)
        return ShardLocks._try_combine(self, now_ns)

    def event(self):
        """The word that moves when this lane is called, or has been granted something. Read it before what a wait is for."""
        return fps_event_load(&self.words.event)

    cdef void _sleep(self, uint32_t seen, int64_t spins, int64_t slice_ns) noexcept nogil:
        """Poll the event `spins` times, then sleep until it is no longer `seen`, the slice ends or a signal comes."""
        cdef int64_t _poll
        for _poll in range(spins):
            if fps_event_load(&self.words.event) != seen:
                break
            fps_pause()
        fps_sleeping_set(&self.words.sleeping, 1)
        if fps_event_load(&self.words.event) == seen:
            fps_event_sleep(&self.words.event, seen, slice_ns)
        fps_sleeping_set(&self.words.sleeping, 0)

    cdef void _poll_awake(self, uint32_t seen, int64_t polls) noexcept nogil:
        """Poll the event `polls` times without sleep, and yield the core in between."""
        cdef int64_t _poll
        for _poll in range(polls):
            if fps_event_load(&self.words.event) != seen:
                break
            fps_yield()

    # -- grants ------------------------------------------------------------------------------------

    cpdef int64_t begin_steps(self) noexcept nogil:
        """Begin to count steps, before the first push and once every shard counts this worker: returns those counted so far.

        Each shard is a scheduler with a clock of its own for this lane, and a shard that admits a joiner later may be further
        on. The worker counts as the first shard does. A grant of another shard is compared with that count from here on.
        """
        cdef uint32_t shard
        memset(self.ahead, 0, self.n_shards * sizeof(int64_t))
        for shard in range(1, self.n_shards):
            self.ahead[shard] = 0 if fps_mutant(FPS_MUTANT_ONE_COUNT) else self._granted(shard) - self._granted(0)
        return self._granted(0) - 1

    def granted(self, uint32_t shard=0):
        """Steps that this worker may have begun, as far as a shard is concerned, in the worker's own count."""
        self.arena._check_shard(shard)
        return self._granted(shard)

    cdef int64_t _granted(self, uint32_t shard) noexcept nogil:
        return fps_granted_steps(fps_grant_acquire(&self.arena.lane_shard(self.index, shard).granted)) - self.ahead[shard]

    cdef bint _is_last(self, uint32_t started) noexcept nogil:
        """Whether no other worker will push, and every push is folded, dropped or rejected.

        One of the `started` initial workers that has not attached may still push: without waits it may come late. A lane that
        has left a workspace behind is not done: it has to write its late counters again under the lock.
        """
        cdef uint32_t index, state
        if self._was_passed_by():
            return False
        for index in range(self.arena.header.n_lanes):
            state = fps_member_state(fps_state_acquire(&self.arena.lane(index).state))
            if state in (FPS_LANE_LIVE, FPS_LANE_JOINING) or (state == FPS_LANE_FREE and index < started):
                return False
            if state != FPS_LANE_EXPELLED and self._done(index) < fps_tail_acquire(&self.arena.lane(index).tail):
                return False
        return True

    def batch(self):
        """The batch that the last grant carried; 0: the worker's own choice."""
        return fps_counter_get(&self.arena.lane_shard(self.index, 0).batch)

    def samples_before(self, int64_t first_batch):
        """The samples of all lanes before this one in a version, `first_batch` for a lane whose batch no grant carries."""
        cdef int64_t batch, total = 0
        cdef uint32_t lane
        for lane in range(self.index):
            batch = fps_counter_get(&self.arena.lane_shard(lane, 0).batch)
            total += batch if batch > 0 else first_batch
        return total

    cpdef int64_t due_ns(self) noexcept nogil:
        """The nearest deadline of any shard's timer, or -1. A worker that waits should try to combine then."""
        cdef int64_t due_ns, nearest_ns = -1
        cdef uint32_t shard
        for shard in range(self.n_shards):
            due_ns = fps_counter_get(&self.arena.shard_header(shard).due_ns)
            if due_ns >= 0 and (nearest_ns < 0 or due_ns < nearest_ns):
                nearest_ns = due_ns
        return nearest_ns

    def wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns, uint32_t shards=0):
        """Wait until `granted` steps are granted and `done` descriptors are done with; False if the slice ended before.

        `shards`: by how many shards the steps must be granted; 0: by all. Spins `spins` times first, then sleeps on the word
        that commits and grants change. Releases the GIL. Returns early on a signal, so that Python can run its handler. On
        False the caller should try to combine: the lock may have been offered.
        """
        cdef bint reached
        if shards == 0:
            shards = self.n_shards
        with nogil:
            reached = self._wait(granted, done, spins, slice_ns, shards)
        return reached

    def wait_awake(self, int64_t granted, uint64_t done, int64_t polls, uint32_t shards=0):
        """Poll `polls` times without sleep, and yield the core in between. Returns as `wait`. Releases the GIL."""
        cdef bint reached
        if shards == 0:
            shards = self.n_shards
        with nogil:
            reached = self._wait_awake(granted, done, polls, shards)
        return reached

    cdef bint _wait_awake(self, int64_t granted, uint64_t done, int64_t polls, uint32_t shards) noexcept nogil:
        cdef int64_t _poll
        for _poll in range(polls):
            if self._reached(granted, done, shards):
                return True
            if self._is_offered():
                return False
            if not self.helper.helpers or not self._help():
                fps_yield()
        return self._reached(granted, done, shards)

    cdef bint _reached(self, int64_t granted, uint64_t done, uint32_t shards) noexcept nogil:
        cdef uint32_t shard, fresh = 0
        for shard in range(self.n_shards):
            fresh += self._granted(shard) >= granted
        return fresh >= shards and self._done(self.index) >= done

    cdef bint _wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns, uint32_t shards) noexcept nogil:
        cdef uint32_t event
        cdef int64_t _poll
        cdef int _round
        for _round in range(HELP_ROUNDS):
            for _poll in range(spins + 1):
                if self._reached(granted, done, shards):
                    return True
                if self.helper.helpers and self._help():
                    spins = max(spins, <int64_t> SPINS_AFTER_HELP)
                fps_pause()
            fps_sleeping_set(&self.words.sleeping, 1)
            event = fps_event_load(&self.words.event)
            if not self._reached(granted, done, shards) and not self._is_offered():
                fps_event_sleep(&self.words.event, event, slice_ns)
            fps_sleeping_set(&self.words.sleeping, 0)
            if not self.helper.helpers or not self._help():
                break
            spins = max(spins, <int64_t> SPINS_AFTER_HELP)
        return self._reached(granted, done, shards)

    # -- steps: each part in one call -------------------------------------------------------------

    cdef void _begin(self) noexcept nogil:
        """Begin with nothing pushed, behind what the lane's earlier owners posted."""
        memset(self.free_at, 0, self.arena.header.n_slots * sizeof(uint64_t))
        self.posts = self.words.tail
        self.slot = 0
        self.awaits = False

    @property
    def slot_free_at(self):
        """Descriptors that must be done with before the next push's slot may be written."""
        return self.free_at[self.slot]

    def push(self, int64_t now_ns, double scale, uint32_t samples, bint null):
        """Post the slot (or, with `null`, only that the step has no gradient) and try every shard's lock.

        Returns what `try_combine` does, FULL, EARLY or EXPELLED. Releases the GIL.
        """
        cdef int outcome
        with nogil:
            outcome = self._push(now_ns, scale, samples, null)
        return outcome

    cdef int _push(self, int64_t now_ns, double scale, uint32_t samples, bint null) noexcept nogil:
        cdef int kind = FPS_NULL if null else FPS_PUSH
        if self.awaits:
            return PUSH_EARLY
        if not null:
            self._set_versions(self.slot)
        if not self._post(kind, self.steps, self.slot, self._oldest(), now_ns, scale, self.loss, samples):
            return PUSH_EXPELLED if self.is_expelled() else PUSH_FULL
        self._count_push(now_ns, samples, null)
        return self._try_combine(now_ns)

    def begin_push(self, int64_t now_ns, uint32_t samples, bint null):
        """Do all of `push` but to post and to combine. Returns (step, slot, version read) for the caller's `post`."""
        begun = self.steps, self.slot, self._oldest()
        if not null:
            self._set_versions(self.slot)
        self._count_push(now_ns, samples, null)
        return begun

    cdef void _count_push(self, int64_t now_ns, uint32_t samples, bint null) noexcept nogil:
        self.compute_ns += now_ns - self.granted_ns
        self.pushed_ns = now_ns
        self.samples += samples
        self.steps += 1
        self.posts += 1
        self.awaits = self.has_pushed = True
        if not null:
            self.free_at[self.slot] = self.posts

    cpdef bint advance(self, int64_t now_ns, bint at_once) noexcept nogil:
        """Begin the next step if it may begin now: it is granted (or, `at_once`, needs no grant), and its slot is free."""
        self.granted_ns = now_ns
        if self.pushed_ns:
            self.push_ns += now_ns - self.pushed_ns
            self.pushed_ns = 0
        self._choose_slot()
        if not self._reached(0 if at_once else self.steps + 1, self.free_at[self.slot], self.n_shards):
            return False
        self.awaits = False
        self.publish()
        return True

    def choose_slot(self):
        """Choose the slot of the next push. Returns whether it is free, so that it may be written before `advance`."""
        self._choose_slot()
        return self.free_at[self.slot] <= self._done(self.index)

    cdef void _choose_slot(self) noexcept nogil:
        """Stay at the slot if it is free, which keeps one in the cache and in memory; else take the one that is free first."""
        cdef uint64_t done = self._done(self.index)
        cdef uint32_t other
        for other in range(self.arena.header.n_slots):
            if self.free_at[self.slot] <= done:
                return
            if self.free_at[other] < self.free_at[self.slot]:
                self.slot = other

    cpdef void advance_late(self, int64_t now_ns) noexcept nogil:
        """Begin the next step after a wait for it."""
        self._choose_slot()
        self.wait_ns += now_ns - self.granted_ns
        self.granted_ns = now_ns
        self.awaits = False
        self.publish()

    cpdef void publish(self) noexcept nogil:
        """Publish the tally to observers."""
        cdef int64_t loss_bits
        memcpy(&loss_bits, &self.loss, sizeof(loss_bits))
        fps_counter_set(&self.words.steps, self.earlier_steps + self.steps)
        fps_counter_set(&self.words.wait_ns, self.wait_ns)
        fps_counter_set(&self.words.compute_ns, self.compute_ns)
        fps_counter_set(&self.words.samples, self.samples)
        fps_counter_set(&self.words.loss_bits, loss_bits)
        fps_counter_set(&self.words.stale_blocks, self.stale_blocks)
        fps_counter_set(&self.words.push_ns, self.push_ns)
