"""The arena's memory: how it is cut into header, control words, scheduler state, weights, rule state and slots.

`plan` computes the header, `format_memory` writes a fresh arena, `Arena` is a checked view of one. What it refuses to be: an
owner of memory or files (fastps/arena.py is), or a place for the protocol (turn.pyx is).
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strncpy

from fastps.kernels.fold cimport FPS_BFLOAT16, FPS_FLOAT32, FPS_MAX_PUSHES, fps_hyper, fps_segment
from fastps.kernels.lane cimport (
    FPS_ABI,
    FPS_LANE_DEAD,
    FPS_LANE_FAILED,
    FPS_LANE_FREE,
    FPS_LANE_JOINING,
    FPS_LANE_LEAVING,
    FPS_LANE_LEFT,
    FPS_LANE_LIVE,
    FPS_LINE,
    FPS_MAGIC,
    FPS_MAX_BUFFERS,
    FPS_MAX_LANES,
    FPS_MAX_SHARDS,
    FPS_MESSAGE_BYTES,
    fps_descriptor,
    fps_head_acquire,
    fps_lane,
    fps_seat,
    fps_tail_acquire,
)
from fastps.kernels.policy_words cimport policy_from_values
from fastps.kernels.roster cimport (
    policy_t,
    roster_add,
    roster_bytes,
    roster_copy,
    roster_initialise,
    roster_remove,
    roster_workers,
    scheduler_t,
    worker_t,
)

cdef extern from "atomics.h" nogil:
    uint32_t fps_state_acquire(const uint32_t *state)
    int fps_state_change(uint32_t *state, uint32_t seen, uint32_t next)
    void fps_sleeping_set(uint32_t *sleeping, uint32_t value)
    void fps_help_set(uint32_t *helping, uint32_t value)
    void fps_pin_exchange(uint64_t *pin, uint64_t value)
    int fps_reader_change(uint64_t *reader, uint64_t seen, uint64_t next)
    uint64_t fps_reader_load(const uint64_t *reader)
    uint64_t fps_drawn_add(uint64_t *drawn, uint64_t samples)
    uint64_t fps_drawn_load(const uint64_t *drawn)
    int64_t fps_grant_acquire(const int64_t *granted)
    uint64_t fps_commit_load(const uint64_t *commit)
    uint64_t fps_pin_load(const uint64_t *pin)
    int64_t fps_counter_get(const int64_t *counter)
    void fps_counter_set(int64_t *counter, int64_t value)
    void fps_plain_store()
    bint fps_mutant(int number)
    enum:
        FPS_MUTANT_FORGET_GENERATION

cdef enum:
    PAGE = 4096
    FLOATS_OF_LINE = FPS_LINE // 4  # parameters and shards begin on a line, as streamed stores need it

ABI = FPS_ABI
MAX_LANES = FPS_MAX_LANES
MAX_BUFFERS = FPS_MAX_BUFFERS
MAX_SHARDS = FPS_MAX_SHARDS
LINE_FLOATS = FLOATS_OF_LINE
LANE_FREE = FPS_LANE_FREE
LANE_LIVE = FPS_LANE_LIVE
LANE_LEFT = FPS_LANE_LEFT
LANE_FAILED = FPS_LANE_FAILED
LANE_LEAVING = FPS_LANE_LEAVING
FATE_FOLDED = FPS_FATE_FOLDED
FATE_DROPPED = FPS_FATE_DROPPED
LANE_DEAD = FPS_LANE_DEAD
LANE_JOINING = FPS_LANE_JOINING
STATE_BUFFERS = FPS_STATE_BUFFERS


cdef uint64_t _aligned(uint64_t size, uint64_t to) noexcept:
    return (size + to - 1) // to * to


cdef int _plan(fps_header *header, uint32_t lanes, uint32_t slots, uint32_t ring_size, uint32_t groups, uint32_t parameters,
               uint64_t buffer_floats, uint32_t rule, uint32_t state_planes, uint64_t extra_bytes, uint32_t buffers,
               uint32_t shards, double ema_decay, bint checks_finite, uint32_t gradient_type) except -1:
    """Give every part its place; parts that different processes write begin on a page of their own."""
    cdef uint64_t offset
    cdef uint64_t gradient_bytes = sizeof(float) if gradient_type == FPS_FLOAT32 else sizeof(uint16_t)
    if not 1 <= lanes <= FPS_MAX_LANES:
        raise ValueError(f"expected 1 to {FPS_MAX_LANES} workers, found {lanes}")
    if not 2 <= buffers <= FPS_MAX_BUFFERS:
        raise ValueError(f"expected 2 to {FPS_MAX_BUFFERS} weight buffers, found {buffers}")
    if ring_size < 2 or ring_size & (ring_size - 1):
        raise ValueError(f"expected the ring's size to be a power of two, at least 2, found {ring_size}")
    if slots < 1 or slots >= ring_size:
        raise ValueError(f"expected 1 to {ring_size - 1} gradient slots in a ring of {ring_size}, found {slots}")
    if not 1 <= shards <= FPS_MAX_SHARDS:
        raise ValueError(f"expected 1 to {FPS_MAX_SHARDS} shards, found {shards}")
    if not 0 <= ema_decay < 1:
        raise ValueError(f"expected a decay of the weights' moving average of 0 (none) to less than 1, found {ema_decay}")
    if gradient_type > FPS_BFLOAT16:
        raise ValueError(f"expected a type of gradient of 0 to {FPS_BFLOAT16}, found {gradient_type}")
    memset(header, 0, sizeof(fps_header))
    header.magic = FPS_MAGIC
    header.abi = FPS_ABI
    header.n_lanes = lanes
    header.n_buffers = buffers
    header.n_slots = slots
    header.ring_size = ring_size
    header.n_groups = groups
    header.n_parameters = parameters
    header.presence_words = (parameters + 63) // 64
    header.rule = rule
    header.state_planes = state_planes
    header.n_shards = shards
    header.checks_finite = checks_finite
    header.ema_decay = ema_decay
    header.gradient_type = gradient_type
    header.buffer_floats = _aligned(buffer_floats, FPS_LINE // sizeof(float))
    offset = header.domains_offset = PAGE
    offset = header.work_offset = offset + _aligned(shards * sizeof(fps_domain), PAGE)
    header.work_bytes = _aligned(sizeof(fps_work) + FPS_MAX_PUSHES * sizeof(fps_folded_push), PAGE)
    offset = header.segments_offset = offset + shards * header.work_bytes
    offset = header.lanes_offset = offset + _aligned(parameters * sizeof(fps_segment), PAGE)
    header.seats_offset = sizeof(fps_lane) + ring_size * sizeof(fps_descriptor)
    header.fates_offset = header.seats_offset + shards * sizeof(fps_seat)
    header.lane_bytes = header.fates_offset + shards * ring_size * sizeof(fps_fate)
    offset = header.statistics_offset = offset + _aligned(lanes * header.lane_bytes, PAGE)
    header.statistics_bytes = sizeof(fps_statistics) + lanes * FPS_GAP_BUCKETS * sizeof(int64_t)
    offset = header.scheduler_offset = offset + _aligned(shards * header.statistics_bytes, PAGE)
    header.scheduler_bytes = _aligned(roster_bytes(lanes), PAGE)
    offset = header.weights_offset = offset + 2 * shards * header.scheduler_bytes
    header.weights_bytes = _aligned(header.buffer_floats * sizeof(float), PAGE)
    offset = header.state_offset = offset + buffers * header.weights_bytes
    header.state_steps_bytes = _aligned(parameters * sizeof(int64_t), FPS_LINE)
    header.state_bytes = _aligned(header.state_steps_bytes + state_planes * header.buffer_floats * sizeof(float), PAGE)
    offset = header.slots_offset = offset + FPS_STATE_BUFFERS * header.state_bytes
    header.slot_presence_offset = groups * sizeof(fps_hyper)
    header.slot_versions_offset = header.slot_presence_offset + header.presence_words * sizeof(uint64_t)
    header.slot_gradient_offset = _aligned(header.slot_versions_offset + shards * sizeof(uint64_t), FPS_LINE)
    header.slot_bytes = _aligned(header.slot_gradient_offset + header.buffer_floats * gradient_bytes, PAGE)
    offset = header.extra_offset = offset + lanes * slots * header.slot_bytes
    header.extra_bytes = _aligned(extra_bytes, PAGE)
    header.total_bytes = offset + lanes * header.extra_bytes
    return _check_size(header)


cdef int _check_size(const fps_header *header) except -1:
    """The same size without a wrap around 2^64: places of measures that wrapped would lie anywhere."""
    cdef double floats = 4.0 * header.buffer_floats, tables = 1024.0 * header.n_parameters + 1024.0 * header.n_groups
    cdef double lanes = header.n_lanes * (<double> header.n_slots * (floats + tables + PAGE) + header.extra_bytes)
    cdef double rings = <double> header.n_lanes * header.ring_size * 64 * (1 + header.n_shards)
    cdef double buffers = header.n_buffers * floats + FPS_STATE_BUFFERS * (tables + header.state_planes * floats)
    if lanes + rings + buffers + tables > 2.0 ** 56:
        raise ValueError(f"expected an arena of at most 2^56 bytes, found {lanes + rings + buffers + tables:g}")
    return 0


def plan(*, int lanes, int slots, int ring_size, int groups, int parameters, int64_t buffer_floats, int rule, int state_planes,
         int64_t extra_bytes, int buffers, int shards=1, double ema_decay=0, bint checks_finite=False,
         int gradient_type=FPS_FLOAT32):
    """The header of an arena of these measures, as bytes; its last word is the arena's size.

    Sizes are in floats (4 bytes) where the name says so, else in bytes. Raises ValueError for a measure out of range.
    """
    cdef fps_header header
    if lanes < 1:
        raise ValueError(f"expected 1 to {FPS_MAX_LANES} workers, found {lanes}")
    _plan(&header, lanes, slots, ring_size, groups, parameters, buffer_floats, rule, state_planes, extra_bytes, buffers,
          shards, ema_decay, checks_finite, gradient_type)
    return bytes((<char *> &header)[:sizeof(fps_header)]), header.total_bytes


def format_memory(unsigned char[::1] memory not None, bytes header_bytes not None, list segments not None, *, list shards=None,
                  int started=0, list versions=None, list clocks=None, uint64_t drawn=0, **policy_values):
    """Write a fresh arena into zeroed `memory`: header, segments, shards, schedulers, first records.

    `segments`: (offset, length, group) in floats, one a parameter. `shards`: (first, last) in floats, one a shard; by default
    one that holds everything. `started`: lanes whose workers are counted from the beginning, 0: all; the others may join.
    `versions` (one a shard), `clocks` (one a started lane) and `drawn` go on where a job ended. The policy's values are those
    of fastps.kernels.scheduler.Scheduler.
    """
    cdef fps_header *header = <fps_header *> &memory[0]
    cdef fps_segment *segment
    cdef fps_domain *domain
    cdef policy_t policy
    cdef uint32_t index
    cdef Arena arena
    memcpy(header, <char *> header_bytes, sizeof(fps_header))
    started = started or header.n_lanes
    clocks = clocks or [0] * started
    if not 1 <= started <= <int> header.n_lanes or len(clocks) != started or min(clocks) < 0:
        raise ValueError(f"expected clocks of at least 0 for 1 to {header.n_lanes} workers, found {clocks} for {started}")
    policy_from_values(&policy, policy_values, header.n_lanes)
    for index, (offset, length, group) in enumerate(segments):
        segment = <fps_segment *> (&memory[0] + header.segments_offset) + index
        segment.offset = offset
        segment.length = length
        segment.group = group
        segment.parameter = index
    shards = shards or [(0, header.buffer_floats)]
    if len(shards) != header.n_shards:
        raise ValueError(f"expected {header.n_shards} shards, found {len(shards)}")
    for index, (first, last) in enumerate(shards):
        domain = <fps_domain *> (&memory[0] + header.domains_offset) + index
        domain.first, domain.last = first, last
    arena = Arena(memory)
    versions = versions or [0] * len(shards)
    if len(versions) != len(shards) or not all(0 <= version < 1 << 40 for version in versions):
        raise ValueError(f"expected {header.n_shards} versions of 0 to 2^40, found {versions}")
    for index in range(header.n_shards):
        _format_shard(arena, index, &policy, clocks, versions[index])
    arena.domain(0).drawn = drawn


cdef int _format_shard(Arena arena, uint32_t shard, const policy_t *policy, list clocks, int64_t version) except -1:
    cdef scheduler_t *state = arena.scheduler(shard, 0)
    cdef uint32_t lane
    cdef int record
    arena.domain(shard).due_ns = -1
    roster_initialise(state, arena.header.n_lanes, policy)
    state.version = version
    for lane in range(arena.header.n_lanes):
        roster_remove(state, lane)
    for lane, clock in enumerate(clocks):
        roster_add(state, lane, clock, -1)
        roster_workers(state)[lane].granted = clock + 1
    arena.domain(shard).commit = fps_commit_pack(version, 0, 0, 0)
    for record in range(2):
        arena.domain(shard).records[record].version = version
    arena.scheduler(shard, 1).n_workers = arena.header.n_lanes
    roster_copy(arena.scheduler(shard, 1), arena.scheduler(shard, 0))
    for lane in range(arena.header.n_lanes):
        arena.seat(lane, shard).granted = roster_workers(state)[lane].granted
    return 0


cdef int _check(const fps_header *found, int64_t size) except -1:
    """Compute the header again from its measures: a place that differs would be dereferenced otherwise."""
    cdef fps_header own
    _plan(&own, found.n_lanes, found.n_slots, found.ring_size, found.n_groups, found.n_parameters, found.buffer_floats,
          found.rule, found.state_planes, found.extra_bytes, found.n_buffers, found.n_shards, found.ema_decay,
          found.checks_finite, found.gradient_type)
    if memcmp(&own, found, sizeof(own)) != 0 or own.total_bytes > <uint64_t> size:
        raise ValueError("the arena's header is damaged: its places do not follow from its measures")
    return 0


cdef class Arena:
    """A checked view of an arena in `memory` (a writable buffer; it stays exported as long as the view lives).

    Raises ValueError when the memory holds no arena of this version, or is shorter than its header says.
    """

    def __cinit__(self, memory not None):
        cdef const unsigned char[::1] view = memory
        self.memory = view
        self.base = <char *> &view[0]
        self.header = &self.own_header
        if <uintptr_t> self.base % FPS_LINE:
            raise ValueError(f"expected memory that begins on a cache line of {FPS_LINE} bytes")
        if view.shape[0] >= PAGE:
            memcpy(self.header, self.base, sizeof(fps_header))
        if self.header.magic != FPS_MAGIC:
            raise ValueError("expected an arena of fastps, found other memory")
        if self.header.abi != FPS_ABI:
            raise ValueError(f"expected an arena of layout {FPS_ABI}, found layout {self.header.abi}: "
                             "all processes of a job must run the same fastps")
        _check(self.header, view.shape[0])
        self._copy_places()

    def __dealloc__(self):
        free(self.segments)

    cdef int _copy_places(self) except -1:
        """Where parameters and shards lie, checked once: every fold goes by it."""
        cdef fps_segment *segment
        cdef uint32_t index
        cdef int64_t floats = self.header.buffer_floats
        self.segments = <fps_segment *> calloc(max(1, self.header.n_parameters), sizeof(fps_segment))
        if self.segments == NULL:
            raise MemoryError()
        memcpy(self.segments, self.base + self.header.segments_offset, self.header.n_parameters * sizeof(fps_segment))
        for index in range(self.header.n_parameters):
            segment = &self.segments[index]
            # Without floats here the parameters lie on devices, and nobody folds here.
            if (segment.offset < 0 or segment.offset % FLOATS_OF_LINE or segment.length < 0
                    or (floats > 0 and (segment.offset > floats or segment.length > floats - segment.offset))
                    or not 0 <= segment.group < <int64_t> self.header.n_groups or segment.parameter != <int64_t> index):
                raise ValueError(f"expected parameter {index} within {floats} floats and {self.header.n_groups} groups, found "
                                 f"{segment.length} floats from {segment.offset} on, group {segment.group}")
        for index in range(self.header.n_shards):
            self.first[index], self.last[index] = self.domain(index).first, self.domain(index).last
            if not 0 <= self.first[index] <= self.last[index] <= floats or self.first[index] % FLOATS_OF_LINE:
                raise ValueError(
                    f"expected a shard within {floats} floats, found {self.first[index]} to {self.last[index]}")
        return 0

    cdef fps_lane *lane(self, uint32_t index) noexcept nogil:
        return <fps_lane *> (self.base + self.header.lanes_offset + index * self.header.lane_bytes)

    cdef fps_seat *seat(self, uint32_t lane, uint32_t shard) noexcept nogil:
        return <fps_seat *> (<char *> self.lane(lane) + self.header.seats_offset) + shard

    cdef fps_fate *fate(self, uint32_t lane, uint32_t shard, uint64_t position) noexcept nogil:
        return (<fps_fate *> (<char *> self.lane(lane) + self.header.fates_offset)
                + shard * self.header.ring_size + (position & (self.header.ring_size - 1)))

    cdef fps_domain *domain(self, uint32_t shard) noexcept nogil:
        return <fps_domain *> (self.base + self.header.domains_offset) + shard

    cdef fps_statistics *statistics(self, uint32_t shard) noexcept nogil:
        return <fps_statistics *> (self.base + self.header.statistics_offset + shard * self.header.statistics_bytes)

    cdef fps_work *work(self, uint32_t shard) noexcept nogil:
        return <fps_work *> (self.base + self.header.work_offset + shard * self.header.work_bytes)

    cdef scheduler_t *scheduler(self, uint32_t shard, uint64_t record) noexcept nogil:
        return <scheduler_t *> (self.base + self.header.scheduler_offset
                                + (2 * shard + record) * self.header.scheduler_bytes)

    cdef char *slot(self, uint32_t lane, uint32_t slot) noexcept nogil:
        return (self.base + self.header.slots_offset
                + (<uint64_t> lane * self.header.n_slots + slot) * self.header.slot_bytes)

    cdef float *weights(self, uint64_t buffer) noexcept nogil:
        return <float *> (self.base + self.header.weights_offset + buffer * self.header.weights_bytes)

    cdef char *state(self, uint64_t buffer) noexcept nogil:
        return self.base + self.header.state_offset + buffer * self.header.state_bytes

    # -- places, for those who make views of them --------------------------------------------------

    def weights_offset(self, int buffer):
        """Byte offset of a weights buffer."""
        return <char *> self.weights(buffer) - self.base

    def slots_range(self, int lane):
        """(offset, length) in bytes of a lane's slots: whole pages."""
        return self.slot(lane, 0) - self.base, self.header.n_slots * self.header.slot_bytes

    def slot_offset(self, int lane, int slot):
        """Byte offset of a lane's slot: an fps_hyper a param_group, then the words of presence."""
        return self.slot(lane, slot) - self.base

    def gradient_offset(self, int lane, int slot):
        """Byte offset of the gradient in a lane's slot."""
        return self.slot(lane, slot) + self.header.slot_gradient_offset - self.base

    def steps_offset(self, int buffer):
        """Byte offset of int64[parameters]: how often the rule was applied to each parameter."""
        return self.state(buffer) - self.base

    def plane_offset(self, int buffer, int plane):
        """Byte offset of one plane of the rule's state."""
        return self.state(buffer) + self.header.state_steps_bytes + plane * self.header.buffer_floats * 4 - self.base

    def extra_offset(self, int lane):
        """Byte offset of the lane's slot for model buffers."""
        return self.header.extra_offset + lane * self.header.extra_bytes

    @property
    def lanes(self):
        """Workers that the arena was made for."""
        return self.header.n_lanes

    @property
    def buffers(self):
        """Weight buffers."""
        return self.header.n_buffers

    @property
    def slots(self):
        """Gradient slots of a lane."""
        return self.header.n_slots

    @property
    def buffer_floats(self):
        """Floats of a weights buffer, padding included."""
        return self.header.buffer_floats

    @property
    def state_planes(self):
        """Planes of the rule's state."""
        return self.header.state_planes

    @property
    def total_bytes(self):
        """Size of the whole arena."""
        return self.header.total_bytes

    @property
    def shards(self):
        """Shards, each versioned by itself."""
        return self.header.n_shards

    @property
    def ema_decay(self):
        """Decay of the moving average of the weights, the last plane of the state; 0 when none is kept."""
        return self.header.ema_decay

    # -- what is committed -------------------------------------------------------------------------

    @property
    def version(self):
        """Updates so far: of the shard that has had the fewest."""
        return min(self.shard_version(shard) for shard in range(self.header.n_shards))

    def shard_version(self, uint32_t shard):
        """Updates of one shard so far."""
        return fps_commit_version(fps_commit_load(&self.domain(shard).commit))

    def committed(self, uint32_t shard=0):
        """(version, weights buffer, state buffer) of a shard's last commit. Only who holds the turn may rely on it.

        Raises ValueError for buffers that the arena has not.
        """
        cdef uint64_t commit = fps_commit_load(&self.domain(shard).commit)
        cdef fps_record *record = &self.domain(shard).records[fps_commit_record(commit)]
        return fps_commit_version(commit), *self._buffers_of(commit, record.state_buffer)

    cdef tuple _buffers_of(self, uint64_t commit, uint32_t state_buffer):
        """(weights buffer, state buffer) of a commit, checked: whoever reads there trusts these numbers."""
        if fps_commit_buffer(commit) >= self.header.n_buffers or state_buffer >= FPS_STATE_BUFFERS:
            raise ValueError(f"expected weights buffer 0 to {self.header.n_buffers - 1} and state buffer 0 to "
                             f"{FPS_STATE_BUFFERS - 1}, found {fps_commit_buffer(commit)} and {state_buffer}: the arena is "
                             "damaged")
        return fps_commit_buffer(commit), state_buffer

    def pins(self, uint32_t shard=0):
        """The buffer that each lane pins, or -1."""
        return [<int64_t> fps_pin_load(&self.seat(index, shard).pin) - 1 for index in range(self.header.n_lanes)]

    # -- membership --------------------------------------------------------------------------------

    def claim(self, uint32_t lane, int64_t process_id, bint rejoin=False):
        """Make the lane this process's own. Returns its new generation, or -1 if another has it, or had it.

        The first owner of a lane whose worker is counted from the beginning is live at once, as generation 0. Any other,
        which `rejoin` allows where there was one before, is JOINING until `joined`. The caller answers at the lane's name,
        so nobody else claims it, and whoever is said to own it has ended.
        """
        return self._claim(lane, process_id, rejoin)

    cdef int64_t _claim(self, uint32_t lane, int64_t process_id, bint rejoin) noexcept nogil:
        cdef fps_lane *words = self.lane(lane)
        cdef uint32_t member = fps_state_acquire(&words.state), shard, generation
        cdef bint is_counted = self._committed(lane, 0).live
        if fps_member_state(member) == FPS_LANE_FREE and is_counted:
            # The number is there before the state is, so that whoever sees the lane live can name its process.
            fps_plain_store()
            words.process_id = process_id
            return 0 if fps_state_change(&words.state, member, fps_member_pack(0, FPS_LANE_LIVE)) else -1
        if not rejoin and fps_member_state(member) != FPS_LANE_FREE:
            return -1
        fps_help_set(&words.helping, 0)
        fps_sleeping_set(&words.sleeping, 0)
        for shard in range(self.header.n_shards):
            fps_pin_exchange(&self.seat(lane, shard).pin, 0)
            fps_pin_exchange(&self.seat(lane, shard).next, 0)
        fps_plain_store()
        words.process_id = process_id
        words.message[0] = 0
        generation = (fps_member_generation(member) + 1) & 0xffffff
        while not fps_state_change(&words.state, member, fps_member_pack(generation, FPS_LANE_JOINING)):
            # A peer may bury the last owner just now; that is no other owner.
            member = fps_state_acquire(&words.state)
            if (fps_member_generation(member) + 1) & 0xffffff != generation:
                return -1
        return generation

    def clock(self, uint32_t lane, uint32_t shard=0):
        """Pushes of the lane's worker that a shard has received, as the slowest is told by."""
        return self._committed(lane, shard).clock

    def has_joined(self, uint32_t lane):
        """Whether every shard counts the lane's owner; who finds it so calls `joined`."""
        return bool(self._has_joined(lane))

    cdef bint _has_joined(self, uint32_t lane) noexcept nogil:
        cdef uint32_t shard, generation = fps_member_generation(fps_state_acquire(&self.lane(lane).state))
        for shard in range(self.header.n_shards):
            if fps_grant_acquire(&self.seat(lane, shard).generation) != generation:
                return False
        return True

    def joined(self, uint32_t lane):
        """The lane's owner may push from now on."""
        self._move(lane, FPS_LANE_JOINING, FPS_LANE_LIVE)

    cdef void _move(self, uint32_t lane, uint32_t seen, uint32_t state) noexcept nogil:
        """The lane's owner goes from one state to another."""
        self._change(lane, fps_member_generation(fps_state_acquire(&self.lane(lane).state)), seen, state)

    cdef bint _end(self, uint32_t lane, uint32_t generation, uint32_t state) noexcept nogil:
        """Whoever is present as that generation is not any more."""
        return (self._change(lane, generation, FPS_LANE_LIVE, state) or self._change(lane, generation, FPS_LANE_LEAVING, state)
                or self._change(lane, generation, FPS_LANE_JOINING, state))

    cdef bint _change(self, uint32_t lane, uint32_t generation, uint32_t seen, uint32_t state) noexcept nogil:
        return fps_state_change(&self.lane(lane).state, fps_member_pack(generation, seen), fps_member_pack(generation, state))

    cdef worker_t *_committed(self, uint32_t lane, uint32_t shard) noexcept nogil:
        """What a shard's last commit says of a lane. Only a hint, unless the turn is held."""
        return &roster_workers(self.scheduler(shard, fps_commit_record(fps_commit_load(&self.domain(shard).commit))))[lane]

    def finish(self, uint32_t lane, str failure=None):
        """The lane's worker has ended: in good order, or by the error that `failure` describes in one line."""
        cdef bytes message
        cdef uint32_t generation = fps_member_generation(fps_state_acquire(&self.lane(lane).state))
        cdef uint32_t state = FPS_LANE_LEFT if failure is None else FPS_LANE_FAILED
        if failure is not None:
            message = failure.encode("utf-8", "replace")[:FPS_MESSAGE_BYTES - 1]
            fps_plain_store()
            strncpy(self.lane(lane).message, message, FPS_MESSAGE_BYTES - 1)
        self._end(lane, generation, state)

    def leave(self, uint32_t lane):
        """The lane's worker has posted its last descriptor, LEAVE, and stays to take turns."""
        self._move(lane, FPS_LANE_LIVE, FPS_LANE_LEAVING)

    def bury(self, uint32_t lane, uint32_t generation):
        """That owner's process is proved to have ended: from the next commit on nobody waits for it. False: another owns it.

        An owner that has left in good order stays so. A reader's place that it held is given back.
        """
        return bool(self._bury(lane, generation))

    cdef bint _bury(self, uint32_t lane, uint32_t generation) noexcept nogil:
        cdef uint32_t shard
        cdef uint64_t reader
        for shard in range(self.header.n_shards):
            reader = fps_reader_load(&self.domain(shard).reader)
            if fps_reader_owner(reader) == (<uint64_t> generation << 16 | (lane + 1)):
                fps_reader_change(&self.domain(shard).reader, reader, 0)
        if fps_mutant(FPS_MUTANT_FORGET_GENERATION):
            generation = fps_member_generation(fps_state_acquire(&self.lane(lane).state))
        return (self._end(lane, generation, FPS_LANE_DEAD)
                or self._change(lane, generation, FPS_LANE_FAILED, FPS_LANE_DEAD))

    def lane_state(self, uint32_t lane):
        """One of the LANE_ constants."""
        return fps_member_state(fps_state_acquire(&self.lane(lane).state))

    def generation(self, uint32_t lane):
        """Of the lane's owner: how many there were before."""
        return fps_member_generation(fps_state_acquire(&self.lane(lane).state))

    def lane_states(self):
        """The state of every lane, as bytes: one look at all of them."""
        cdef uint32_t index
        cdef bytearray states = bytearray(self.header.n_lanes)
        for index in range(self.header.n_lanes):
            states[index] = fps_member_state(fps_state_acquire(&self.lane(index).state))
        return bytes(states)

    def members(self):
        """(generation, state) of every lane."""
        return [(fps_member_generation(member), fps_member_state(member))
                for member in [fps_state_acquire(&self.lane(index).state) for index in range(self.header.n_lanes)]]

    # -- copies of a whole version -----------------------------------------------------------------

    def pin_version(self, uint32_t lane, uint32_t shard):
        """Keep a shard's published weights and rule state as they are: (version, weights buffer, state buffer, clocks), or None
        while another lane does. `clocks`: of each lane the steps that are in this version, or -1 where no worker is live.

        Commits go on meanwhile. Call `unpin_version` soon after the copy. Raises ValueError for buffers that the arena has not.
        """
        cdef fps_domain *domain = self.domain(shard)
        cdef uint64_t commit, mine
        cdef uint32_t state_buffer, index
        cdef worker_t *worker
        while True:
            commit = fps_commit_load(&domain.commit)
            _, state_buffer = self._buffers_of(commit, domain.records[fps_commit_record(commit)].state_buffer)
            mine = fps_reader_pack(fps_member_generation(fps_state_acquire(&self.lane(lane).state)), lane, state_buffer,
                                   fps_commit_buffer(commit))
            if not fps_reader_change(&domain.reader, 0, mine):
                return None
            clocks = []
            for index in range(self.header.n_lanes):
                worker = &roster_workers(self.scheduler(shard, fps_commit_record(commit)))[index]
                clocks.append(worker.clock - (worker.consumed - worker.cursor) if worker.live else -1)
            if fps_commit_load(&domain.commit) == commit:
                return fps_commit_version(commit), fps_commit_buffer(commit), state_buffer, clocks
            fps_reader_change(&domain.reader, mine, 0)

    def unpin_version(self, uint32_t lane, uint32_t shard):
        """End what `pin_version` of this lane began."""
        cdef uint64_t reader = fps_reader_load(&self.domain(shard).reader)
        cdef uint32_t generation = fps_member_generation(fps_state_acquire(&self.lane(lane).state))
        if fps_reader_owner(reader) == (<uint64_t> generation << 16 | (lane + 1)):
            fps_reader_change(&self.domain(shard).reader, reader, 0)

    def draw(self, uint64_t samples):
        """Draw the next samples of an order that all workers share: the first one's place, counted from the job's beginning."""
        return fps_drawn_add(&self.domain(0).drawn, samples)

    @property
    def drawn(self):
        """Samples that were drawn so far."""
        return fps_drawn_load(&self.domain(0).drawn)

    # -- pushes that were rejected -----------------------------------------------------------------

    @property
    def rejections(self):
        """Pushes, counted in each shard, that were not folded since they or what they would have made was not finite."""
        cdef uint32_t shard
        cdef int64_t count = 0
        for shard in range(self.header.n_shards):
            count += fps_counter_get(&self.domain(shard).rejections)
        return count

    def rejected(self, uint32_t lane):
        """How many of a lane's, over all shards, and (step, parameter) of the last of them, or None."""
        cdef fps_seat *seat
        cdef uint32_t shard
        count, last = 0, None
        for shard in range(self.header.n_shards):
            seat = self.seat(lane, shard)
            if fps_counter_get(&seat.rejected):
                count += fps_counter_get(&seat.rejected)
                found = fps_counter_get(&seat.rejected_step), fps_counter_get(&seat.rejected_parameter)
                last = found if last is None else max(last, found)
        return count, last

    def failure(self, uint32_t lane):
        """What a failed lane's worker said."""
        cdef char *message = self.lane(lane).message
        return bytes(message[:FPS_MESSAGE_BYTES]).split(b"\0")[0].decode("utf-8", "replace")

    def process_id(self, uint32_t lane):
        """For messages only."""
        return self.lane(lane).process_id

    # -- what became of pushes ---------------------------------------------------------------------

    def record(self):
        """Let holders write down what becomes of every push that is posted from now on."""
        cdef uint32_t shard
        for shard in range(self.header.n_shards):
            fps_counter_set(&self.domain(shard).recorded, 1)

    def fates(self, uint32_t lane, uint32_t shard, uint64_t first, uint64_t last):
        """What became of the lane's descriptors [first, last) that the shard is done with; shorter if it is not with all.

        A list of (FATE_FOLDED, version that it is part of, time, staleness), (FATE_DROPPED, version that it was late for, time,
        0), or None for one that nobody wrote down: LEAVE, or posted before `record`. Only the lane's last `ring_size`
        descriptors are known, and only while the lane posts none.
        """
        cdef uint64_t position
        cdef fps_fate *fate
        last = min(last, fps_head_acquire(&self.seat(lane, shard).head))
        found = []
        for position in range(first, last):
            fate = self.fate(lane, shard, position)
            if fate.position != position + 1:
                found.append(None)
            else:
                found.append((<int> fate.kind, fate.version, fate.decided_ns, fate.staleness))
        return found

    # -- counters ----------------------------------------------------------------------------------

    def counters(self, uint32_t lane):
        """The lane's counters by name, over all shards; each is current, but they are not of one moment.

        `done` is the least of the shards, `folded` and `dropped` are sums over shards.
        """
        cdef fps_lane *words = self.lane(lane)
        cdef fps_seat *seat
        cdef int64_t loss_bits = fps_counter_get(&words.loss_bits)
        cdef double loss
        cdef uint32_t shard
        cdef uint64_t done = fps_head_acquire(&self.seat(lane, 0).head)
        cdef int64_t folded = 0, dropped = 0, staleness_sum = 0, staleness_max = 0
        memcpy(&loss, &loss_bits, sizeof(loss))
        for shard in range(self.header.n_shards):
            seat = self.seat(lane, shard)
            done = min(done, fps_head_acquire(&seat.head))
            folded += fps_counter_get(&seat.folded)
            dropped += fps_counter_get(&seat.dropped)
            staleness_sum += fps_counter_get(&seat.staleness_sum)
            staleness_max = max(staleness_max, fps_counter_get(&seat.staleness_max))
        return {
            "posted": fps_tail_acquire(&words.tail),
            "done": done,
            "steps": fps_counter_get(&words.steps),
            "wait_ns": fps_counter_get(&words.wait_ns),
            "compute_ns": fps_counter_get(&words.compute_ns),
            "samples": fps_counter_get(&words.samples),
            "stale_blocks": fps_counter_get(&words.stale_blocks),
            "folded": folded,
            "dropped": dropped,
            "rejected": self.rejected(lane)[0],
            "staleness_sum": staleness_sum,
            "staleness_max": staleness_max,
            "loss": loss,
        }

    def histograms(self, uint32_t shard=0):
        """What a shard has counted, as lists of (least value of the bucket, count), empty buckets left out.

        `gaps_ns` between two consecutive updates; `staleness` of folded pushes, in versions; `arrivals_ns`: for each k, when
        the k-th push of a version came, counted from its beginning; `updates`; `average_staleness`: mean over all updates of
        <sigma> (Rudra, equation 2).
        """
        cdef fps_statistics *found = self.statistics(shard)
        cdef int bucket
        cdef uint32_t k
        updates = fps_counter_get(&found.updates)
        return {
            "updates": updates,
            "average_staleness": fps_counter_get(&found.average_staleness_sum) / 1000.0 / max(1, updates),
            "gaps_ns": [(fps_bucket_time(bucket), found.gaps[bucket]) for bucket in range(FPS_GAP_BUCKETS)
                        if found.gaps[bucket]],
            "staleness": [(bucket, found.staleness[bucket]) for bucket in range(FPS_STALENESS_BUCKETS)
                          if found.staleness[bucket]],
            "arrivals_ns": [
                [(fps_bucket_time(bucket), found.arrivals[k][bucket]) for bucket in range(FPS_GAP_BUCKETS)
                 if found.arrivals[k][bucket]]
                for k in range(self.header.n_lanes)
            ],
        }
