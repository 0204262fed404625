"""A simulated job whose only worker publishes, beside readers that come and go, sleep and die.

The publisher has no slots and folds nothing: it takes the spare buffer, writes it whole, and releases the shard lock with one
version more. It is the last process. Nobody takes its place, because the next trainer begins a job of its own.
"""

import mmap

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.shm.format import format_memory
from fastps.kernels.shm.plan import plan

from fastps.kernels.base.failpoints cimport *
from fastps.kernels.chaos.invariants cimport CARRIED_BYTES, MAX_WORKERS, RING_SIZE, InvariantChecker
from fastps.kernels.chaos.machine cimport DEAD, ENDED, Machine, process_t
from fastps.kernels.chaos.reading cimport Places, Reading
from fastps.kernels.combining.combiner cimport Combiner
from fastps.kernels.protocol.lane cimport Lane
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport FPS_RULE_SGD


cdef enum:
    PAUSE_NS = 20_000   # the longest, between two versions or two looks


cdef class PublishedChecker(InvariantChecker):
    """Versions rise one by one, and each carries its own number, in every word, from its flip on."""

    cdef void _watch_flip(self, uint32_t shard, uint64_t commit, int32_t runs) noexcept nogil:
        cdef uint64_t before = self.shards[shard].commit, version = fps_commit_version(commit)
        cdef fps_record *record = &self.arena.shard_header(shard).records[fps_commit_record(commit)]
        self.shards[shard].commit = commit
        self.flips += 1
        if version != fps_commit_version(before) + 1 or record.version != version \
                or record.weights_buffer != fps_commit_buffer(commit):
            self.fail(b"flip: version %ld follows version %ld, with a record of version %ld", version,
                      fps_commit_version(before), record.version)
        elif not self.is_carried(version, fps_commit_buffer(commit)):
            self.fail(b"flip: version %ld is not whole in buffer %ld (%ld runs)", version, fps_commit_buffer(commit), runs)

    cdef bint is_content(self, uint32_t shard, uint64_t version, uint64_t buffer) noexcept nogil:
        return True  # it has no weights

    cdef bint is_carried(self, uint64_t version, uint64_t buffer) noexcept nogil:
        cdef const uint64_t *words = <const uint64_t *> self.arena.carried(buffer)
        cdef int32_t i
        for i in range(FPS_LINE // 8, CARRIED_BYTES // 8):
            if words[i] != version:
                return False
        return words[0] == 1


cdef class Publishing(Machine):
    """The processes of one job: `readers` readers, which are replaced when they die, and the publisher behind them.

    Args:
        policy: the values of a publisher's. versions: how many it publishes.
        switch, crash, stall, wake, crashes, stalls, restarts, busy_factor: as Workers says.
    """

    cdef object memory
    cdef list readings                          # of each process; the publisher's only gives buffers back
    cdef PyObject *_readings[MAX_WORKERS]       # the same
    cdef Places places
    cdef Lane lane
    cdef int32_t n_versions

    def __cinit__(self, uint64_t seed, *, int readers, int versions, dict policy not None, double switch, double crash,
                  double stall, double wake, int crashes, int stalls, int restarts, int busy_factor):
        cdef int32_t index
        header, size, _ = plan(
            lanes=1, slots=0, ring_size=RING_SIZE, groups=1, parameters=0, buffer_floats=0, rule=FPS_RULE_SGD, state_planes=0,
            extra_bytes=0, buffers=2, readers=readers + 1, carried_bytes=CARRIED_BYTES)
        self.memory = mmap.mmap(-1, size)
        format_memory(self.memory, header, [], **policy)
        self.arena, self.random = Arena(self.memory), seed * <uint64_t> 0x9e3779b97f4a7c15 + 1
        (<uint64_t *> self.arena.carried(0))[0] = 1
        self.checker = PublishedChecker(self.arena, 1, 1, is_sum=False, is_mean=False, may_drop=False, bound=-1)
        self.n_places, self.n_processes, self.n_versions = readers, readers + 1, versions
        self.switch_share, self.busy_factor = <uint32_t> (switch * (1 << 16)), busy_factor
        self.crash_share, self.stall_share = <uint32_t> (crash * (1 << 24)), <uint32_t> (stall * (1 << 24))
        self.wake_share = <uint32_t> (wake * (1 << 24))
        self.crashes_left, self.stalls_left, self.restarts_left = crashes, stalls, restarts
        self.places, self.lane = Places(self), Lane(self.arena, 0)
        self.readings = [Reading(self, self.places, self.lane, index) for index in range(self.n_processes)]
        for index, reading in enumerate(self.readings):
            self._readings[index] = <PyObject *> reading

    def run(self, double skew_ns):
        """Play the job; returns what happened as a dict. The only call."""
        self.play(skew_ns, 0)
        self.readings.clear()  # they refer to this job
        return {**self.outcome(), **self.checker.outcome()}

    cdef void born(self, int32_t index) noexcept nogil:
        self.places.attached[index] = False

    cdef bint _is_busy(self, int32_t index) noexcept nogil:
        return index == self.n_places and fps_lock_owner(self.arena.shard_header(0).lock) != 0

    cdef bint _may_die(self, const process_t *me) noexcept nogil:
        return True

    cdef void live(self, int32_t index) noexcept nogil:
        if index == self.n_places:
            self._publish_all(<Combiner> self.lane._combiners[0])
        else:
            self._read_all(<Reading> self._readings[index], index)

    cdef void _read_all(self, Reading reading, int32_t index) noexcept nogil:
        """Come and go until the publisher has ended or died, and read its last version."""
        reading.attach()
        while self.processes[self.n_places].state not in (ENDED, DEAD):
            self.at_access()
            reading.look()
            if self.draw() % 8 == 0:
                self.pause(self.draw() % PAUSE_NS)
        reading.attach()
        if self.processes[self.n_places].state == ENDED and self.places.attached[index] \
                and reading.pins.versions[0] != <uint64_t> self.n_versions:
            self.checker.fail(b"end: reader %ld reads version %ld of %ld", index, reading.pins.versions[0], self.n_versions)
        reading.detach()

    cdef void _publish_all(self, Combiner combiner) noexcept nogil:
        self.arena.claim(0, 0)
        while fps_commit_version(self.arena.shard_header(0).commit) < <uint64_t> self.n_versions:
            if not combiner.take(FPS_BY_HAND):
                self.checker.fail(b"lock: the publisher finds it taken, by lane %ld",
                                  <int64_t> fps_lock_owner(self.arena.shard_header(0).lock) - 1, 0, 0)
                return
            self._publish(combiner)
            if self.draw() % 4 == 0 and (<Reading> self._readings[self.n_places]).hold(0):
                combiner.release(False, self.clock(self.n_places), False)
            if self.draw() % 2:
                self.pause(self.draw() % PAUSE_NS)
        self.arena._end(0, 0, FPS_LANE_LEFT)

    cdef void _publish(self, Combiner combiner) noexcept nogil:
        """While holding: publish the next version, unless an error leaves it half written now and then."""
        cdef uint64_t version = fps_commit_version(self.arena.shard_header(0).commit) + 1
        cdef int64_t buffer = combiner.commit.find_spare()
        cdef bint is_whole = self.draw() % 16 != 0
        if buffer < 0:
            self.checker.fail(b"buffer: none is left for version %ld", version, 0, 0)
        elif fps_mutant(FPS_MUTANT_PUBLISH_FIRST):
            combiner.release(True, self.clock(self.n_places), True)
            self._write(buffer, version, CARRIED_BYTES // 8)
        else:
            self._write(buffer, version, CARRIED_BYTES // 8 if is_whole else CARRIED_BYTES // 16)
            combiner.release(is_whole, self.clock(self.n_places), True)

    cdef void _write(self, int64_t buffer, uint64_t version, int32_t end) noexcept nogil:
        """Write the mark and the first words of a version."""
        cdef uint64_t *words = <uint64_t *> self.arena.carried(buffer)
        cdef int32_t i
        FPS_FAILPOINT()
        words[0] = 1
        for i in range(FPS_LINE // 8, end):
            FPS_FAILPOINT()
            words[i] = version
