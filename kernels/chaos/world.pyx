"""A simulated world: several workers in one thread that run the real lanes, shard locks and shared folds on a real arena.

One seed gives one history: it decides which worker runs when, which one is stopped or killed, and what each clock says. This
file makes a job, plays it, and reports its outcome.
"""

import mmap

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from fastps.kernels.shm.format import format_memory
from fastps.kernels.shm.plan import plan

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.chaos.machine cimport (
    BEGINNING_NS,
    DEAD,
    FAULT_CRASH,
    FAULT_PASS,
    FAULT_RESTART,
    FAULT_SKEW,
    FAULT_SLOW,
    FAULT_STALL,
    FAULT_WAKE,
    MOST_LIVES,
    Machine,
)
from fastps.kernels.chaos.workers cimport Workers
from fastps.kernels.update.fold cimport FPS_RULE_ADAGRAD, FPS_RULE_SGD
from fastps.kernels.rows.rows_h cimport FPS_ROWS_ADAGRAD, FPS_ROWS_SGD
from fastps.kernels.protocol.lane cimport Lane
from fastps.kernels.protocol.reader_pins cimport ReaderPins
from fastps.kernels.protocol.worker_lane cimport WorkerLane
from fastps.kernels.chaos.invariants cimport RING_SIZE, ROW_FLOATS, SHARD_FLOATS, InvariantChecker


cdef class World:
    """Runs one simulated job after the other; keeps the machine and the arena's memory in between."""

    def __cinit__(self):
        self.machine = Machine()
        self.memory_bytes = 0

    def run(self, uint64_t seed, *, int workers, int steps, int shards, int slots, bint adagrad, bint is_sum, bint is_mean,
            bint may_drop, int64_t bound, bint partial, bint at_once, int helpers, int shared_least, int spins, double switch,
            double crash, double stall, double wake, double null, int crashes, int stalls, int restarts,
            int busy_factor, double skew_ns, dict policy not None, bint reads=False, bint tables=False,
            double passes=0.0, int wounds=0, bint server=False, bint fetches=False):
        """Play one seed; returns what happened as a dict.

        Args:
            workers, steps, shards, slots: measures; `adagrad`: a rule with state, else SGD.
            is_sum, is_mean, may_drop, bound: what the invariant checker must know of the policy.
            partial: a step waits for one shard only. at_once: a worker continues without waiting.
            helpers: how many waiting workers may be woken for a fold; 0: folds are not shared. shared_least: the shortest fold
                that is, in floats moved.
            spins: polls before a worker sleeps.
            switch: chance at an access that another worker runs next. crash, stall, wake: chances of such a fault at an access.
            busy_factor: by how much likelier crashes and stalls are for a worker that holds a lock or helps with a fold.
            null: share of null pushes. crashes, stalls, restarts: how many at most. skew_ns: how wrong clocks are at most.
            policy: the scheduler's values.
            reads: each process is a reader, too.
            passes: chance that a process which finds a lock taken goes on without its owner, if that one is stopped; now and
                then if it is not.
            tables: each shard has a table, of which every push has rows.
            wounds: lanes whose words are damaged, at most.
            server: one more process combines for the workers, until it dies.
            fetches: workers fetch the next weights while they compute.
        """
        cdef Machine machine = self.machine
        machine.random = seed * <uint64_t> 0x9e3779b97f4a7c15 + 1
        lanes = self._make(workers, shards, slots, adagrad, helpers, restarts, policy, reads, tables, server, fetches)
        servers = [Lane(self.arena, self.arena.server_lane)] if server else []
        if server:
            servers[0].share_folds(helpers)
            self.arena.serve(1)
        readers = [ReaderPins(self.arena, index) for index in range(workers)] if reads else []
        self.checker = InvariantChecker(
            self.arena, workers, steps, is_sum=is_sum, is_mean=is_mean, may_drop=may_drop, bound=bound)
        machine.switch_share = <uint32_t> (switch * (1 << 16))
        machine.crash_share = <uint32_t> (crash * (1 << 24))
        machine.stall_share = <uint32_t> (stall * (1 << 24))
        machine.pass_share = <uint32_t> (passes * (1 << 16))
        machine.wake_share = <uint32_t> (wake * (1 << 24))
        machine.crashes_left, machine.stalls_left, machine.restarts_left = crashes, stalls, restarts
        machine.busy_factor = busy_factor
        self.workers = Workers(machine, self.arena, self.checker, lanes, servers, readers, steps=steps, spins=spins,
                               at_once=at_once, is_partial=partial, null_share=<uint32_t> (null * (1 << 16)),
                               reads_rows=tables and bound == 0 and not may_drop and not partial and not at_once, wounds=wounds,
                               fetches=fetches)
        self.workers.play(skew_ns, shared_least)
        self._end()
        return self._outcome()

    def _make(self, int workers, int shards, int slots, bint adagrad, int helpers, int restarts, dict policy, bint reads,
              bint tables, bint server, bint fetches):
        """A fresh arena in the same memory; returns, for each lane, those of the processes that may have it."""
        described = [(SHARD_FLOATS + 1, ROW_FLOATS, shards + shard, 0, shard) for shard in range(shards if tables else 0)]
        header, size = plan(
            lanes=workers, slots=slots, ring_size=RING_SIZE, groups=1, parameters=shards + len(described),
            buffer_floats=shards * SHARD_FLOATS, rule=FPS_RULE_ADAGRAD if adagrad else FPS_RULE_SGD,
            state_planes=1 if adagrad else 0, extra_bytes=0,
            buffers=workers * (3 if fetches else 1) + 2, shards=shards, readers=workers if reads else 0, tables=described,
            servers=server,
            row_rule=FPS_ROWS_ADAGRAD if adagrad else FPS_ROWS_SGD)
        if size > self.memory_bytes:
            self.memory, self.memory_bytes = mmap.mmap(-1, 2 * size), 2 * size
        cdef unsigned char[::1] view = self.memory
        memset(&view[0], 0, size)
        segments = [(SHARD_FLOATS * i, SHARD_FLOATS, 0) for i in range(shards)]
        segments += [(SHARD_FLOATS * i, 0, 0) for i in range(len(described))]
        format_memory(self.memory, header, segments, tables=described,
                      shards=[(SHARD_FLOATS * i, SHARD_FLOATS * (i + 1)) for i in range(shards)], **policy)
        self.arena = Arena(self.memory)
        lanes = [[WorkerLane(self.arena, index) for _ in range(1 + min(restarts, MOST_LIVES - 1))] for index in range(workers)]
        for owners in lanes:
            for lane in owners:
                lane.share_folds(helpers)
        return lanes

    cdef void _end(self) noexcept:
        """Tell the invariant checker which processes are dead, and which deaths no survivor has handled."""
        cdef int32_t index
        cdef uint32_t dead = 0, unnoticed = 0
        for index in range(self.machine.n_processes):
            if self.machine.processes[index].state == DEAD:
                dead |= (<uint32_t> 1) << index
                self.checker.posted[index] = self.arena.lane(index).tail  # not what it was about to post
                if not self.machine.processes[index].settled:
                    unnoticed |= (<uint32_t> 1) << index
        if self.checker.message[0] == 0:
            self.checker.end(dead, unnoticed)

    def _outcome(self):
        return {
            "events": self.machine.events,
            "flips": self.checker.flips,
            "seconds": (self.machine.now_ns - BEGINNING_NS) / 1e9,
            "crashes": self.machine.faults[FAULT_CRASH],
            "damaged_lanes": self.checker.wounds,
            "stalls": self.machine.faults[FAULT_STALL],
            "spurious_wakes": self.machine.faults[FAULT_WAKE],
            "skewed_clocks": self.machine.faults[FAULT_SKEW],
            "slow_processes": self.machine.faults[FAULT_SLOW],
            "passed_by": self.machine.faults[FAULT_PASS],
            "restarts": self.machine.faults[FAULT_RESTART],
            "detection_s": self.machine.worst_detection_ns / 1e9,
            "violation": (<bytes> self.checker.message).decode() or None,
        }
