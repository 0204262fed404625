"""The simulator: N workers and K shards in virtual time, driven by the scheduler's own compiled functions.

The shards make every decision. This module simulates their environment: computing, messages, busy servers, and a worker's own
loop, which is that of a live worker: the step it waits for, its slots, partial and overlapped pulls. Times are whole ns, and
one seed determines a run bit by bit. The simulator has no gradients and reads no clock.

A step: compute; push to every shard (a transfer, then one event of its scheduler); the shard's grant sends the weights back, or
a message without weights if the worker holds the newest version; when enough shards have answered and a slot is free, the next
step begins.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.stdlib cimport calloc, free

import numpy as np

from fastps.kernels.simulation.compute_time cimport ComputeTimes
from fastps.kernels.simulation.cpu cimport Cores
from fastps.kernels.simulation.records cimport (
    RECORD_BEGIN, RECORD_COMPUTED, RECORD_DEATH, RECORD_GRANT, RECORD_JOIN, RECORD_LEAVE, RECORD_PULL, begin_records, server_t,
)
from fastps.kernels.simulation.network cimport (
    EVENT_CHANGE, EVENT_COMPUTED, EVENT_CORES, EVENT_DRAIN, EVENT_LINK, EVENT_PULLED, EVENT_PUSHED, EVENT_RELAYED, EVENT_RESUME,
    EVENT_SERVED, EVENT_TIMER, Network, fps_event, fps_queue_free, fps_queue_pop, fps_queue_push, message_t,
)
from fastps.kernels.scheduling.decisions cimport ACTION_NONE, scheduler_join
from fastps.kernels.scheduling.policy cimport policy_from_values
from fastps.kernels.scheduling.state cimport GRANT_AT_ONCE, state_begin, state_workers, worker_t
from fastps.kernels.shm.arena_h cimport FPS_MAX_SHARDS
from fastps.kernels.simulation.server_queue cimport ServerQueue
from fastps.kernels.simulation.shards cimport SimulatedShards

cdef enum:
    _JOIN_AGAIN_NS = 1000000

KINDS = ("begin", "computed", "receive", "fold", "drop", "grant", "timer", "leave", "pull", "death", "join")


cdef class Simulator(SimulatedShards):
    """A simulation, ready to run.

    values: the policy's, as returned by Policy.values. compute, network: the compute times and the links; link_of:
    int32[workers], each worker's first link, to which the shard's number is added. shard_bytes: size of one push or pull of one
    shard. needed: number of shards that a step waits for; pull_timeout_ns: how long it then waits for the rest (-1: a step
    waits for all). slots: gradients that a worker may have pending. overlap: push and pull while computing. batch: samples of a
    first step. steps: steps of each worker; the run ends when the shards have received workers x steps pushes, or with `leave`,
    when each worker has done its own and left, when a push more would come. asks: stop where a worker has computed until `tell`
    says what; the run ends when all have left. service_ns: float64[shards, 3], ns that a server takes for a message, for each
    byte of it, and for an update; default: none. cores, slice_ns: cores that the workers share, and their time slice; 0 cores:
    each worker has its own. hop_ns: time in which a node of Rudra-adv*'s broadcast tree sends weights to its two children; -1:
    no such tree. changes: int64[n, 2], times in ns, and workers that are killed then, or for one that joins in the place of an
    ended worker w, -1 - w; joins need one shard. trace: keep a record of every event.

    Raises ValueError for inconsistent values.
    """

    def __cinit__(self, dict values not None, ComputeTimes compute not None, Network network not None,
                  int32_t[::1] link_of not None, *, int shards=1, double shard_bytes=0.0, int needed=0,
                  int64_t pull_timeout_ns=-1, int64_t slots=2, bint overlap=False, int64_t batch=1, int64_t steps=1,
                  bint leave=False, bint asks=False, bint trace=False, service_ns=None, double cores=0.0, int64_t slice_ns=1,
                  int64_t hop_ns=-1, int64_t[:, ::1] changes=np.zeros((0, 2), np.int64)):
        cdef int64_t worker
        self.n_workers = <int32_t> compute.n_workers
        self.n_shards = shards
        if link_of.shape[0] != self.n_workers or self.n_workers < 1:
            raise ValueError(f"expected a link for each of {self.n_workers} workers, found {link_of.shape[0]}")
        if (not 1 <= shards <= FPS_MAX_SHARDS or steps < 1 or batch < 1 or slots < 1 or shard_bytes < 0
                or (overlap and shards > 1)):
            raise ValueError(f"expected 1 to {FPS_MAX_SHARDS} shards (1 with overlap), steps, batch and slots of at least 1 "
                             f"and no negative bytes, found {shards}, {steps}, {batch}, {slots} and {shard_bytes}")
        for worker in range(self.n_workers):
            if not 0 <= link_of[worker] <= network.n_links - shards:
                raise ValueError(f"expected links of 0 to {network.n_links - shards}, found {link_of[worker]}")
        policy_from_values(&self.policy, values, self.n_workers)
        self.compute, self.network = compute, network
        self.shard_bytes, self.needed = shard_bytes, needed or shards
        self.pull_timeout_ns, self.slots, self.overlap = pull_timeout_ns, slots, overlap
        self.batch, self.steps, self.leave = batch, steps, leave
        self.asks, self.asked = asks, -1
        self.hop_ns, self.changes = hop_ns, changes
        self.records = begin_records(&self.policy, self.n_workers, self.n_shards, trace)
        if service_ns is None:
            service_ns = np.zeros((shards, 3))
        if len(service_ns) != shards:
            raise ValueError(f"expected times of {shards} servers, found {len(service_ns)}")
        self.server_queue = ServerQueue(service_ns, network, self.n_workers, self.policy.groups)
        self.cores = Cores(cores, self.n_workers, slice_ns)
        self.is_direct = network.instant and shards == 1 and not self.server_queue.takes_time and not self.policy.combine
        self._allocate(link_of)

    cdef int _allocate(self, int32_t[::1] link_of) except -1:
        cdef int64_t worker, n = self.n_workers
        self.players = <player_t *> calloc(n, sizeof(player_t))
        self.views = <view_t *> calloc(n * self.n_shards, sizeof(view_t))
        self.links = <int32_t *> calloc(n, sizeof(int32_t))
        self.idle = <int32_t *> calloc(n, sizeof(int32_t))
        self.relaying = <int64_t *> calloc(n + 1, sizeof(int64_t))
        if not (self.players and self.views and self.links and self.idle and self.relaying):
            raise MemoryError()
        for worker in range(n + 1):
            self.relaying[worker] = -1
        for worker in range(n * self.n_shards):
            self.views[worker].step = 1
        for worker in range(n):
            self.links[worker] = link_of[worker]
            self.players[worker].resume_ns = -1
            self.idle[worker] = <int32_t> worker
        self.n_idle = <int32_t> n
        return 0

    def __dealloc__(self):
        free(self.players)
        free(self.views)
        free(self.links)
        free(self.idle)
        free(self.relaying)
        fps_queue_free(&self.queue)

    # -- running -----------------------------------------------------------------------------------

    def run(self, int64_t events):
        """Process up to `events` more events; return whether more are left. Releases the GIL.

        Raises RuntimeError if every worker waits forever, and MemoryError.
        """
        with nogil:
            self._run(events)
        if self.no_memory or self.records.no_memory:
            raise MemoryError("no memory for more events")
        if self.finished:
            return False
        if self.queue.length == 0 and self.asked < 0:
            raise RuntimeError(f"after {self.received} pushes every worker waits, and no timer is set")
        return True

    @property
    def finished(self):
        """Whether all steps are done."""
        return self._is_over()

    cdef int _leaves(self, int32_t worker, int64_t clock) noexcept nogil:
        cdef player_t *player = &self.players[worker]
        if not player.left or clock != player.steps:
            return 0
        return RECORD_DEATH if player.killed else RECORD_LEAVE

    cdef void _run(self, int64_t events) noexcept nogil:
        cdef int32_t worker
        cdef int64_t change, last = self.events + events
        if not self.begun:
            self.begun = True
            for change in range(self.changes.shape[0]):
                worker = <int32_t> self.changes[change, 1]
                self._check(fps_queue_push(&self.queue, self.changes[change, 0], EVENT_CHANGE, worker))
            for worker in range(self.n_workers):
                self.players[worker].fresh = self.n_shards
                self._begin(worker)
        while self.events < last and self.queue.length and self.asked < 0 and not self._is_over():
            if self.no_memory or self.records.no_memory:
                return
            self.events += 1
            self._play(fps_queue_pop(&self.queue))

    cdef void _play(self, fps_event event) noexcept nogil:
        cdef server_t *server
        self.now_ns = self.records.now_ns = event.key
        if event.kind == EVENT_COMPUTED:
            self._computed(event.index)
        elif event.kind == EVENT_PUSHED:
            self._pushed(event.index)
        elif event.kind == EVENT_PULLED:
            self._pulled(event.index)
        elif event.kind == EVENT_LINK:
            self._check(self.network.run_link(&self.queue, self.now_ns, event.index))
        elif event.kind == EVENT_TIMER:
            server = &self.records.servers[event.index]
            if server.armed_ns == self.now_ns:
                server.armed_ns = -1
                self._fire_due(event.index)
                self._arm(event.index)
        elif event.kind == EVENT_CORES:
            self._check(self.cores.run(&self.queue, self.now_ns, event.index))
        elif event.kind == EVENT_SERVED:
            self._served(event.index)
        elif event.kind == EVENT_DRAIN:
            self._drain(event.index)
        elif event.kind == EVENT_RELAYED:
            self._relayed(event.index)
        elif event.kind == EVENT_CHANGE:
            if event.index >= 0:
                self._kill(event.index)
            elif self.n_left < self.n_workers:  # else the job is over
                self._join(-1 - event.index)
        elif self.players[event.index].resume_ns == self.now_ns:
            self._begin(event.index)

    # -- a worker's own loop -----------------------------------------------------------------------

    cdef void _try_begin(self, int32_t worker) noexcept nogil:
        """Begin the next step if enough shards have answered and a slot is free for its gradient."""
        cdef player_t *player = &self.players[worker]
        cdef int32_t shard
        cdef int64_t cursor
        if player.computing or player.holding or player.left:
            return
        if self.overlap:
            if self.policy.grant != GRANT_AT_ONCE and self.views[worker].step <= player.steps:
                return
        elif player.fresh < self.needed:
            return
        player.blocked = 0
        for shard in range(self.n_shards):
            cursor = state_workers(self.records.servers[shard].state)[worker].cursor - player.consumed + player.first_step
            if cursor < player.steps + 1 - self.slots:
                player.blocked = 1
                return
        if self.pull_timeout_ns >= 0 and player.fresh < self.n_shards:
            # Also with a timeout of 0: answers of this very instant come first.
            if player.resume_ns < 0:
                player.resume_ns = self.now_ns + self.pull_timeout_ns
                self._check(fps_queue_push(&self.queue, player.resume_ns, EVENT_RESUME, worker))
            return
        self._begin(worker)

    cdef void _begin(self, int32_t worker) noexcept nogil:
        cdef player_t *player = &self.players[worker]
        cdef view_t *view = &self.views[worker * self.n_shards]
        cdef int32_t shard
        cdef int64_t took_ns
        if player.steps:
            player.wait_ns += self.now_ns - player.computed_ns
        if self.overlap:
            view.version = player.ready_version
            if self.network.instant and self.hop_ns < 0:  # the pull has taken no time
                view.version = self.records.servers[0].state.version
                self._record_pull(RECORD_GRANT, worker, view.version, 0)
                self._record_pull(RECORD_PULL, worker, view.version, 0)
        player.timestamp = view.version
        if self.n_shards > 1:
            player.timestamp = INT64_MAX
            for shard in range(self.n_shards):
                if view[shard].step > player.steps:  # a fresh block
                    player.timestamp = min(player.timestamp, view[shard].version)
        if not self.overlap:
            player.stale_blocks += self.n_shards - player.fresh
        player.fresh = 0
        player.resume_ns = -1
        player.batch = player.granted_batch if player.granted_batch > 0 else self.batch
        took_ns = self._for_batch(player, self.compute.draw_ns(worker, self.now_ns))
        player.computing = 1
        player.began_ns = self.now_ns
        self._check(self.cores.begin(
            &self.queue, self.now_ns, worker, max(<int64_t> 1, took_ns),
            self._for_batch(player, self.compute.blocked_ns(worker))))
        if self.records.tracing:
            self.records.record(RECORD_BEGIN, worker, -1, player.timestamp, player.batch)

    cdef int64_t _for_batch(self, const player_t *player, int64_t took_ns) noexcept nogil:
        """Scale the time of a default batch to the batch that the worker was granted."""
        if player.batch == self.batch:
            return took_ns
        return <int64_t> (<double> took_ns * <double> player.batch / <double> self.batch + 0.5)

    cdef void _computed(self, int32_t worker) noexcept nogil:
        cdef player_t *player = &self.players[worker]
        player.computing = 0
        if player.left:
            return  # killed meanwhile
        player.computed_ns = self.now_ns
        player.compute_ns += self.now_ns - player.began_ns
        if self.records.tracing:
            self.records.record(RECORD_COMPUTED, worker, -1, player.timestamp, self.now_ns - player.began_ns)
        if self.asks:
            self.asked = worker
        else:
            self._end_step(worker, self.leave and player.steps == self.steps)

    def tell(self, int64_t samples, bint leaves=False):
        """Say what the worker that is `asked` has computed: a push of so many samples, or that it leaves instead."""
        cdef int32_t worker = self.asked
        if worker < 0:
            raise RuntimeError("expected a worker that is asked, found none")
        self.asked = -1
        self.players[worker].batch = samples
        self._end_step(worker, leaves)

    cdef void _end_step(self, int32_t worker, bint leaves) noexcept nogil:
        """Push what the worker has computed, or hold it back; or let it leave, which has computed nothing then."""
        cdef player_t *player = &self.players[worker]
        if leaves:
            player.left = 1
            player.compute_ns -= self.now_ns - player.began_ns
            self._leave_all(worker)
        elif player.sending:
            player.holding = 1  # Rudra-adv*: a gradient is never sent before the one before it was delivered
        else:
            self._push(worker)

    cdef void _push(self, int32_t worker) noexcept nogil:
        cdef player_t *player = &self.players[worker]
        cdef int32_t shard, index
        cdef message_t *message
        player.steps += 1
        if self.overlap:
            player.sending = self.n_shards
        if self.is_direct:
            self._receive(worker, 0, player.timestamp, self.views[worker].version, player.batch)
            return
        for shard in range(self.n_shards):
            index = self.network.allocate()
            if index < 0:
                self.no_memory = True
                return
            message = &self.network.messages[index]
            message.kind, message.worker, message.shard = EVENT_PUSHED, worker, shard
            message.version, message.samples = player.timestamp, player.batch
            message.read_version = self.views[worker * self.n_shards + shard].version
            message.bytes = self.shard_bytes
            self._check(self.network.send(&self.queue, self.now_ns, index, self.links[worker] + shard))
        if self.overlap:
            self._try_begin(worker)

    cdef void _pulled(self, int32_t index) noexcept nogil:
        cdef message_t message = self.network.messages[index]
        self.network.release(index)
        if not self.overlap:
            self._arrive(message.worker, message.shard, message.step, message.version)
            return
        self._record_pull(RECORD_PULL, message.worker, message.version, 0)
        self.players[message.worker].ready_version = message.version
        if message.version == self.records.servers[0].state.version:
            self.idle[self.n_idle] = message.worker
            self.n_idle += 1
        else:
            self._fetch(message.worker)

    cdef void _arrive(self, int32_t worker, int32_t shard, int64_t step, int64_t version) noexcept nogil:
        """Take a shard's answer; ignore one to an older step (PSP-SGD, Algorithm 1, worker, line 4)."""
        cdef player_t *player = &self.players[worker]
        cdef view_t *view = &self.views[worker * self.n_shards + shard]
        if player.computing or step != player.steps + 1 or view.step >= step or version < player.first_version:
            return
        view.version = version
        view.step = step
        player.fresh += 1
        if self.records.tracing:
            self.records.record(RECORD_PULL, worker, shard, version, step)
        self._try_begin(worker)

    # -- deaths, and workers that join ---------------------------------------------------------------

    cdef void _kill(self, int32_t worker) noexcept nogil:
        """End a worker here, unless it has left. What it has sent counts; its core is free when its step would have ended."""
        cdef player_t *player = &self.players[worker]
        if player.left:
            return
        player.left = player.killed = 1
        player.resume_ns = -1
        if player.computing:
            player.compute_ns += self.now_ns - player.began_ns
        self._leave_all(worker)

    cdef void _join(self, int32_t worker) noexcept nogil:
        """Let a worker join in the place of one that has ended, once all that was sent there is folded: soon, if not now."""
        cdef server_t *server = &self.records.servers[0]
        cdef worker_t *w = &state_workers(server.state)[worker]
        cdef player_t *player = &self.players[worker]
        if player.computing or w.live or w.cursor != w.consumed:
            self._check(fps_queue_push(&self.queue, self.now_ns + _JOIN_AGAIN_NS, EVENT_CHANGE, -1 - worker))
            return
        self._fire_due(0)
        state_begin(server.state)
        scheduler_join(server.state, worker, self.now_ns, -1)
        player.steps = player.first_step = self.views[worker].step = w.clock
        player.consumed, player.first_version, player.computed_ns = w.consumed, server.state.version, self.now_ns
        player.grant_wait_ns -= self.now_ns  # its grant has no push before it
        player.left = player.killed = player.fresh = 0
        player.granted_batch = 0
        self.views[worker].version = -1
        self.n_left -= 1
        if self.records.tracing:
            self.records.record(RECORD_JOIN, worker, 0, server.state.version, w.clock)
        self._follow(0, ACTION_NONE)
        self._arm(0)

    # -- overlapped pulls (Rudra-adv*) ---------------------------------------------------------------

    cdef void _fetch(self, int32_t worker) noexcept nogil:
        """Begin the worker's pull of the newest version."""
        cdef int32_t index = self.network.allocate()
        cdef message_t *message
        if index < 0:
            self.no_memory = True
            return
        message = &self.network.messages[index]
        message.kind, message.worker, message.shard = EVENT_PULLED, worker, 0
        message.version, message.bytes = self.records.servers[0].state.version, self.shard_bytes
        self._record_pull(RECORD_GRANT, worker, message.version, 0)
        self._check(self.network.send(&self.queue, self.now_ns, index, self.links[worker]))

    cdef void _record_pull(self, int kind, int32_t worker, int64_t version, int32_t node) noexcept nogil:
        """For a driver, record that a pull in the background from a node begins, as a grant, or that its weights arrive."""
        if self.records.tracing and self.asks:
            self.records.record(kind, worker, 0, version, node)

    cdef void _fetch_all(self) noexcept nogil:
        """Begin a pull of the new version for every worker without a pull in progress."""
        cdef int32_t i
        for i in range(self.n_idle):
            self._fetch(self.idle[i])
        self.n_idle = 0

    cdef void _relay(self, int32_t node) noexcept nogil:
        """Let a node of the broadcast tree send its newest weights to its children, if it has any and sends nothing yet.

        Node 0 is the server, node k is worker k - 1, and the children of node k are nodes 2 k + 1 and 2 k + 2.
        """
        cdef int32_t child
        if self.relaying[node] >= 0 or 2 * <int64_t> node + 1 > self.n_workers:
            return
        self.relaying[node] = self.players[node - 1].ready_version if node else self.records.servers[0].state.version
        for child in range(2 * node + 1, min(2 * node + 2, self.n_workers) + 1):
            self._record_pull(RECORD_GRANT, child - 1, self.relaying[node], node)
        self._check(fps_queue_push(&self.queue, self.now_ns + self.hop_ns, EVENT_RELAYED, node))

    cdef void _relayed(self, int32_t node) noexcept nogil:
        """Give the children the version that was sent, and send what has come meanwhile. Versions in between are skipped."""
        cdef int64_t version = self.relaying[node]
        cdef int64_t newest = self.players[node - 1].ready_version if node else self.records.servers[0].state.version
        cdef int32_t child
        self.relaying[node] = -1
        for child in range(2 * node + 1, min(2 * node + 2, self.n_workers) + 1):
            self.players[child - 1].ready_version = version
            self._record_pull(RECORD_PULL, child - 1, version, node)
            self._relay(child)
        if newest > version:
            self._relay(node)

    # -- calls of the shards -------------------------------------------------------------------------

    cdef void _take(self, int32_t worker) noexcept nogil:
        if self.overlap:
            self.players[worker].sending -= 1

    cdef void _unblock(self, int32_t worker) noexcept nogil:
        if self.players[worker].blocked:
            self._try_begin(worker)

    cdef void _go_on(self, int32_t worker, bint is_new) noexcept nogil:
        """Overlap: push the gradient held back, now that the last was delivered; `is_new`: that push made a version."""
        cdef player_t *player = &self.players[worker]
        if is_new and self.hop_ns >= 0:
            self._relay(0)
        elif is_new and not self.network.instant:
            self._fetch_all()
        if player.holding and not player.sending:
            player.holding = 0
            self._push(worker)
        self._try_begin(worker)

    cdef void _answer(self, int32_t worker, int32_t shard) noexcept nogil:
        """Send the worker its grant with the shard's weights, or without them if it holds the newest version."""
        cdef server_t *server = &self.records.servers[shard]
        cdef worker_t *w = &state_workers(server.state)[worker]
        cdef player_t *player = &self.players[worker]
        cdef int32_t index
        cdef message_t *message
        player.grant_wait_ns += self.now_ns - w.push_ns[0]
        if w.batch > 0:
            player.granted_batch = w.batch
        if self.records.tracing and not (self.overlap and self.asks):
            self.records.record(RECORD_GRANT, worker, shard, server.state.version, w.granted)
        if self.overlap:
            self.views[worker].step = w.granted
            self._try_begin(worker)
            return
        if self.is_direct:
            self._arrive(worker, shard, w.granted, server.state.version)
            return
        index = self.network.allocate()
        if index < 0:
            self.no_memory = True
            return
        message = &self.network.messages[index]
        message.kind, message.worker, message.shard = EVENT_PULLED, worker, shard
        message.step, message.version = w.granted, server.state.version
        # Rudra, section 3.2: a pull is skipped when the version has not changed.
        message.bytes = 0 if self.views[worker * self.n_shards + shard].version == message.version else self.shard_bytes
        if self.server_queue.takes_time:
            self._check(self.server_queue.add(&self.queue, self.now_ns, index))
        else:
            self._check(self.network.send(&self.queue, self.now_ns, index, self.links[worker] + shard))

    # -- the trace -----------------------------------------------------------------------------------

    def trace(self, bint forget=False):
        """Return the trace, 32 bytes a record: int64 time_ns, version, detail, int32 worker, int16 shard, kind; `forget` it."""
        return self.records.trace(forget)
