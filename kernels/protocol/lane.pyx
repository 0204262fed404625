"""A lane as its worker uses it: slots, posts, waits and turns, over all shards; its pulls are reader.pyx's.

The life of a push after backward (docs/architecture.md has the picture). What it refuses to know: processes, clocks (times are
arguments), files; and what happens under the turn, which is holder.pyx's.
"""

from cpython.ref cimport PyObject
from libc.math cimport NAN
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from fastps.kernels.base.atomics cimport (
    fps_counter_get,
    fps_counter_set,
    fps_event_add,
    fps_event_load,
    fps_event_sleep,
    fps_event_wake,
    fps_grant_acquire,
    fps_head_acquire,
    fps_help_end,
    fps_help_load,
    fps_pause,
    fps_sleeping_load,
    fps_sleeping_set,
    fps_state_acquire,
    fps_turn_load,
    fps_yield,
)
from fastps.kernels.base.failpoints cimport fps_plain_store
from fastps.kernels.protocol.combiner cimport Holder
from fastps.kernels.protocol.commit cimport (
    TURN_AWAITING,
    TURN_BAD_DESCRIPTOR,
    TURN_BAD_FOLD,
    TURN_BAD_STATE,
    TURN_BUSY,
    TURN_DONE,
    TURN_LOST,
    TURN_NO_BUFFER,
    Commit,
)
from fastps.kernels.protocol.pins cimport Reader
from fastps.kernels.protocol.ring cimport lane_post
from fastps.kernels.protocol.shared_fold cimport SharedFold
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport (
    FPS_LANE_DEAD,
    FPS_LANE_LEFT,
    FPS_LEAVE,
    FPS_MAX_CHUNKS,
    FPS_NULL,
    FPS_PUSH,
    fps_descriptor,
    fps_member_generation,
    fps_member_state,
    fps_turn_generation,
    fps_turn_owner,
)
from fastps.kernels.update.fold cimport fps_hyper, fps_user_rule

cdef enum:
    # A wait ends after so many times that it helped, for a signal may have come.
    HELP_ROUNDS = 4
    # Who has helped soon has the commit: it looks as often before it sleeps again.
    SPINS_AFTER_HELP = 2000

DONE = TURN_DONE                      # the turn was run, and everything posted before it is decided
BUSY = TURN_BUSY                      # another has it, and will see what was posted
LOST = TURN_LOST                      # another broke this turn; nothing of it was committed after that
AWAITING = TURN_AWAITING              # a helper of a held turn has not given its chunk back: look at the peers, try again
BAD_DESCRIPTOR = TURN_BAD_DESCRIPTOR  # lane `bad_lane` holds a descriptor that no worker of ours can have posted
NO_BUFFER = TURN_NO_BUFFER            # every weights buffer is active or pinned: more readers than the arena was made for
BAD_FOLD = TURN_BAD_FOLD              # the fold refused its job
BAD_STATE = TURN_BAD_STATE            # what is committed cannot be read: something wrote over the scheduler's state

KIND_PUSH = FPS_PUSH
KIND_NULL = FPS_NULL
KIND_LEAVE = FPS_LEAVE


cdef class Lane(Reader):
    """One attached lane: the compiled half of a worker. Only one thread may use it.

    `index` is the lane of `arena` that the caller has claimed.
    """

    def __cinit__(self, Arena arena not None, uint32_t index):
        self.bad_lane = -1
        self.words = arena.lane(index)
        self.helper = SharedFold(arena, index, 0)
        self.holders = tuple([Holder(arena, index, shard) for shard in range(self.n_shards)])
        for shard in range(self.n_shards):
            self._holders[shard] = <PyObject *> self.holders[shard]  # without the GIL, only while `holders` keeps them

    # -- slots and posts ---------------------------------------------------------------------------

    def set_hyper(self, uint32_t slot, uint32_t group, double learning_rate, double momentum, double dampening,
                  double weight_decay, double beta1, double beta2, double epsilon,
                  double learning_rate_decay, uint64_t flags):
        """Write one param_group's hyper-parameters into the slot; they travel with its next push."""
        cdef fps_hyper *hyper
        if group >= self.arena.header.n_groups:
            raise IndexError(f"expected a group of 0 to {self.arena.header.n_groups - 1}, found {group}")
        self._check_slot(slot)
        hyper = <fps_hyper *> self.arena.slot(self.index, slot) + group
        fps_plain_store()
        hyper.learning_rate = learning_rate
        hyper.momentum = momentum
        hyper.dampening = dampening
        hyper.weight_decay = weight_decay
        hyper.beta1 = beta1
        hyper.beta2 = beta2
        hyper.epsilon = epsilon
        hyper.learning_rate_decay = learning_rate_decay
        hyper.flags = flags

    cdef int _check_slot(self, uint32_t slot) except -1:
        if slot >= self.arena.header.n_slots:
            raise IndexError(f"expected a slot of 0 to {self.arena.header.n_slots - 1}, found {slot}")
        return 0

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

    def call_server(self):
        """Wake the server, for what this lane has posted. Whatever was posted before is seen by the server's next turn."""
        cdef fps_lane *server = self.arena.lane(self.arena.header.n_lanes)
        if not self.arena.header.n_servers:
            raise RuntimeError("expected an arena with a lane for a server, found one whose workers take the turns")
        with nogil:
            fps_event_add(&server.event)
            if fps_sleeping_load(&server.sleeping):
                fps_event_wake(&server.event)

    def event(self):
        """The word that `await_call` waits for to change. The server reads it before it takes the turns."""
        return fps_event_load(&self.words.event)

    def await_call(self, uint32_t seen, int64_t spins, int64_t slice_ns):
        """The server's rest: until the word is no longer `seen`, which `event` gave, or the slice has ended. Releases the GIL.

        What was posted since moves the word after the post, so that nobody is missed. Returns early on a signal.
        """
        cdef int64_t _look
        with nogil:
            for _look in range(spins):
                if fps_event_load(&self.words.event) != seen:
                    break
                fps_pause()
            fps_sleeping_set(&self.words.sleeping, 1)
            if fps_event_load(&self.words.event) == seen:
                fps_event_sleep(&self.words.event, seen, slice_ns)
            fps_sleeping_set(&self.words.sleeping, 0)

    def await_call_awake(self, uint32_t seen, int64_t looks):
        """The same without sleep: looks so many times, lets others have the core in between, and says whether it was called."""
        cdef int64_t _look
        cdef bint called = False
        with nogil:
            for _look in range(looks):
                called = fps_event_load(&self.words.event) != seen
                if called:
                    break
                fps_yield()
        return called

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

    def set_presence(self, uint32_t slot, bytes words not None):
        """Write the bitmap of the parameters that have a gradient in the slot: uint64 words, little endian."""
        cdef uint64_t size = self.arena.header.presence_words * sizeof(uint64_t)
        self._check_slot(slot)
        if <uint64_t> len(words) != size:
            raise ValueError(f"expected {size} bytes of presence, found {len(words)}")
        fps_plain_store()
        memcpy(self.arena.slot(self.index, slot) + self.arena.header.slot_presence_offset, <char *> words, size)

    def set_versions(self, uint32_t slot):
        """Write into the slot which version of each shard was pulled: what its gradient is computed with."""
        self._check_slot(slot)
        self._set_versions(slot)

    cdef void _set_versions(self, uint32_t slot) noexcept nogil:
        fps_plain_store()
        memcpy(self.arena.slot(self.index, slot) + self.arena.header.slot_versions_offset, self.versions,
               self.n_shards * sizeof(uint64_t))

    def post(self, int kind, uint64_t step, uint32_t slot, uint64_t read_version, int64_t post_ns, double scale=1.0,
             double loss=NAN, uint32_t samples=0):
        """Post one descriptor; False when the ring is full. The slot must stay as it is until `done` has passed it."""
        return self._post(kind, step, slot, read_version, post_ns, scale, loss, samples)

    cdef bint _post(self, int kind, uint64_t step, uint32_t slot, uint64_t read_version, int64_t post_ns, double scale,
                    double loss, uint32_t samples) noexcept nogil:
        cdef fps_descriptor descriptor
        memset(&descriptor, 0, sizeof(descriptor))
        descriptor.kind = kind
        descriptor.step = step
        descriptor.slot = slot
        descriptor.read_version = read_version
        descriptor.post_ns = post_ns
        descriptor.scale = scale
        descriptor.loss = loss
        descriptor.samples = samples
        return lane_post(self.words, self.arena.header.ring_size, self._done(), &descriptor) == 0

    def posted(self):
        """Descriptors posted so far."""
        return self.words.tail

    cdef uint64_t _done(self) noexcept nogil:
        cdef uint64_t done = fps_head_acquire(&self.arena.seat(self.index, 0).head)
        cdef uint32_t shard
        for shard in range(1, self.n_shards):
            done = min(done, fps_head_acquire(&self.arena.seat(self.index, shard).head))
        return done

    def done(self):
        """Descriptors that every shard is done with: their slots are free."""
        return self._done()

    # -- grants ------------------------------------------------------------------------------------

    def granted(self, uint32_t shard=0):
        """Steps that this worker may have begun, as far as a shard is concerned."""
        self._check_shard(shard)
        return fps_grant_acquire(&self.arena.seat(self.index, shard).granted)

    cdef uint32_t _fresh(self, int64_t granted) noexcept nogil:
        cdef uint32_t shard, fresh = 0
        for shard in range(self.n_shards):
            fresh += fps_grant_acquire(&self.arena.seat(self.index, shard).granted) >= granted
        return fresh

    def batch(self):
        """The batch that the last grant carried; 0: the worker's own choice."""
        return fps_counter_get(&self.arena.seat(self.index, 0).batch)

    def due_ns(self):
        """The nearest deadline of any shard's timer, or -1: whoever waits should try the turn then."""
        return self._due_ns()

    cdef int64_t _due_ns(self) noexcept nogil:
        cdef int64_t due_ns, nearest_ns = -1
        cdef uint32_t shard
        for shard in range(self.n_shards):
            due_ns = fps_counter_get(&self.arena.domain(shard).due_ns)
            if due_ns >= 0 and (nearest_ns < 0 or due_ns < nearest_ns):
                nearest_ns = due_ns
        return nearest_ns

    def wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns, uint32_t shards=0):
        """Wait until `granted` steps are granted and `done` descriptors are done with; False if the slice ended before.

        `shards`: by how many shards the steps must be granted; 0: by all. Spins `spins` times first, then sleeps on the word
        that commits and grants change. Releases the GIL. Returns early on a signal, so that Python can run its handler. On
        False the caller should try the turn: it may have been handed over.
        """
        cdef bint reached
        if shards == 0:
            shards = self.n_shards
        with nogil:
            reached = self._wait(granted, done, spins, slice_ns, shards)
        return reached

    def wait_awake(self, int64_t granted, uint64_t done, int64_t looks, uint32_t shards=0):
        """The same without sleep: looks so many times, and lets others have the core in between. Releases the GIL."""
        cdef bint reached
        if shards == 0:
            shards = self.n_shards
        with nogil:
            reached = self._wait_awake(granted, done, looks, shards)
        return reached

    cdef bint _wait_awake(self, int64_t granted, uint64_t done, int64_t looks, uint32_t shards) noexcept nogil:
        cdef int64_t _look
        for _look in range(looks):
            if self._reached(granted, done, shards):
                return True
            if self._is_offered():
                return False
            if not self.helpers or not self._help():
                fps_yield()
        return self._reached(granted, done, shards)

    cdef bint _reached(self, int64_t granted, uint64_t done, uint32_t shards) noexcept nogil:
        return self._fresh(granted) >= shards and self._done() >= done

    cdef bint _wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns, uint32_t shards) noexcept nogil:
        cdef uint32_t event
        cdef int64_t _look
        cdef int _round
        for _round in range(HELP_ROUNDS):
            for _look in range(spins + 1):
                if self._reached(granted, done, shards):
                    return True
                if self.helpers and self._help():
                    spins = max(spins, <int64_t> SPINS_AFTER_HELP)
                fps_pause()
            fps_sleeping_set(&self.words.sleeping, 1)
            event = fps_event_load(&self.words.event)
            if not self._reached(granted, done, shards) and not self._is_offered():
                fps_event_sleep(&self.words.event, event, slice_ns)
            fps_sleeping_set(&self.words.sleeping, 0)
            if not self.helpers or not self._help():
                break
            spins = max(spins, <int64_t> SPINS_AFTER_HELP)
        return self._reached(granted, done, shards)

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

    cdef void _count(self, int64_t steps, int64_t wait_ns, int64_t compute_ns, int64_t samples, double loss,
                     int64_t stale_blocks) noexcept nogil:
        """Publish a worker's counters to whoever looks."""
        cdef int64_t loss_bits
        memcpy(&loss_bits, &loss, sizeof(loss_bits))
        fps_counter_set(&self.words.steps, steps)
        fps_counter_set(&self.words.wait_ns, wait_ns)
        fps_counter_set(&self.words.compute_ns, compute_ns)
        fps_counter_set(&self.words.samples, samples)
        fps_counter_set(&self.words.loss_bits, loss_bits)
        fps_counter_set(&self.words.stale_blocks, stale_blocks)

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
