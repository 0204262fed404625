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

from fastps.kernels.scheduling.decisions cimport ACTION_NONE, scheduler_join
from fastps.kernels.scheduling.policy cimport policy_from_values
from fastps.kernels.scheduling.state cimport GRANT_AT_ONCE, state_begin, state_workers, worker_t
from fastps.kernels.shm.arena_h cimport FPS_MAX_SHARDS
from fastps.kernels.simulation.compute_time cimport ComputeTimes
from fastps.kernels.simulation.cpu cimport Cores
from fastps.kernels.simulation.event_queue cimport *
from fastps.kernels.simulation.shards cimport *

cdef enum:
    _JOIN_AGAIN_NS = 1000000

KINDS = ("begin", "computed", "receive", "fold", "drop", "grant", "timer", "leave", "pull", "death", "join")

cdef struct player_t:
    int64_t steps           # steps pushed
    int64_t computed_ns     # time of its last gradient
    int64_t began_ns, compute_ns, wait_ns
    int64_t grant_wait_ns   # from a shard's receipt of a push to its grant, summed over shards
    int64_t timestamp       # newest version, over the shards, that it computes with
    int64_t batch
    int64_t granted_batch   # 0: not tuned
    int64_t resume_ns       # partial pull: when it begins with the answers it has, or -1
    int64_t stale_blocks
    int64_t ready_version   # overlap: newest weights that have arrived
    int32_t fresh           # shards that have answered for its next step
    int32_t sending         # overlap: shards that its last push has not reached yet
    int32_t computing
    int32_t blocked         # it lacks only a slot
    int32_t holding         # overlap: it holds a gradient until the one before is delivered
    int32_t left            # it makes no more pushes: RECORD_LEAVE, or RECORD_DEATH; 0: it lives
    int64_t consumed        # of its lane's pushes, those of workers before it
    int64_t first_step      # the clock at which it joined
    int64_t first_version   # what was answered to the one before it is older, or the same

# One worker's view of one shard.
cdef struct view_t:
    int64_t version         # version of the weights that it computes with
    int64_t step            # newest step that the shard has granted and answered


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

    cdef ComputeTimes compute
    cdef Cores cores
    cdef readonly int64_t events
    cdef readonly int32_t asked          # worker whose gradient `tell` has to describe before anything goes on; -1: none
    cdef player_t *players
    cdef view_t *views
    cdef int32_t[::1] idle               # overlap: workers without a pull in progress
    cdef int32_t n_idle
    cdef int64_t[::1] relaying           # version that each node of the broadcast tree sends its children, or -1
    cdef int64_t hop_ns                  # time of a hop of the broadcast tree; -1: none, each worker pulls for itself
    cdef int64_t pull_timeout_ns, slots, batch
    cdef int32_t needed
    cdef bint is_direct                  # messages take no time, so none is made

    def __cinit__(self, dict values not None, ComputeTimes compute not None, Network network not None,
                  int32_t[::1] link_of not None, *, int shards=1, double shard_bytes=0.0, int needed=0,
                  int64_t pull_timeout_ns=-1, int64_t slots=2, bint overlap=False, int64_t batch=1, int64_t steps=1,
                  bint leave=False, bint asks=False, bint trace=False, service_ns=None, double cores=0.0, int64_t slice_ns=1,
                  int64_t hop_ns=-1, int64_t[:, ::1] changes=np.zeros((0, 2), np.int64)):
        cdef int64_t worker, change
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
        self.hop_ns, self.links, self.tracing = hop_ns, link_of, trace
        self._make_shards()
        if service_ns is None:
            service_ns = np.zeros((shards, 3))
        if len(service_ns) != shards:
            raise ValueError(f"expected times of {shards} servers, found {len(service_ns)}")
        self.server_queue = ServerQueue(service_ns, network, self.n_workers, self.policy.groups)
        self.cores = Cores(cores, self.n_workers, slice_ns)
        self.is_direct = network.instant and shards == 1 and not self.server_queue.takes_time and not self.policy.combine
        self._make_workers()
        for change in range(changes.shape[0]):
            queue_add(&self.queue, changes[change, 0], EVENT_CHANGE, <int32_t> changes[change, 1])
        for worker in range(self.n_workers):
            self._begin(<int32_t> worker)

    def _make_workers(self):
        cdef int64_t i, n = self.n_workers
        self.players = <player_t *> calloc(n, sizeof(player_t))
        self.views = <view_t *> calloc(n * self.n_shards, sizeof(view_t))
        if not (self.players and self.views):
            raise MemoryError()
        for i in range(n):
            self.players[i].resume_ns, self.players[i].fresh = -1, self.n_shards
        for i in range(n * self.n_shards):
            self.views[i].step = 1
        self.idle = np.arange(n, dtype=np.int32)
        self.n_idle = <int32_t> n
        self.relaying = np.full(n + 1, -1)

    def __dealloc__(self):
        free(self.players)
        free(self.views)

    # -- running -----------------------------------------------------------------------------------

    def run(self, int64_t events):
        """Process up to `events` more events; return whether more are left. Releases the GIL.

        Raises RuntimeError if every worker waits forever, and MemoryError.
        """
        cdef int64_t last = self.events + events
        with nogil:
            while (self.events < last and self.queue.length and self.asked < 0 and not self.queue.no_memory
                   and not self._is_over()):
                self.events += 1
                self._play(queue_pop(&self.queue))
        if self.queue.no_memory:
            raise MemoryError("no memory for more events")
        if self._is_over():
            return False
        if self.queue.length == 0 and self.asked < 0:
            raise RuntimeError(f"after {self.received} pushes every worker waits, and no timer is set")
        return True

    cdef void _play(self, event_t event) noexcept nogil:
        if event.kind == EVENT_COMPUTED:
            self._computed(event.index)
        elif event.kind == EVENT_PUSHED:
            self._pushed(event.index)
        elif event.kind == EVENT_PULLED:
            self._pulled(event.index)
        elif event.kind == EVENT_LINK:
            self.network.run_link(&self.queue, event.index)
        elif event.kind == EVENT_TIMER:
            self._timed(event.index)
        elif event.kind == EVENT_CORES:
            self.cores.run(&self.queue, event.index)
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
        elif self.players[event.index].resume_ns == self.queue.now_ns:
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
            cursor = state_workers(self.servers[shard].state)[worker].cursor - player.consumed + player.first_step
            if cursor < player.steps + 1 - self.slots:
                player.blocked = 1
                return
        if self.pull_timeout_ns >= 0 and player.fresh < self.n_shards:
            # Also with a timeout of 0: answers of this very instant come first.
            if player.resume_ns < 0:
                player.resume_ns = self.queue.now_ns + self.pull_timeout_ns
                queue_add(&self.queue, player.resume_ns, EVENT_RESUME, worker)
            return
        self._begin(worker)

    cdef void _begin(self, int32_t worker) noexcept nogil:
        cdef player_t *player = &self.players[worker]
        cdef view_t *view = &self.views[worker * self.n_shards]
        cdef int32_t shard
        cdef int64_t took_ns
        if player.steps:
            player.wait_ns += self.queue.now_ns - player.computed_ns
        if self.overlap:
            view.version = player.ready_version
            if self.network.instant and self.hop_ns < 0:  # the pull has taken no time
                view.version = self.servers[0].state.version
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
        took_ns = self._for_batch(player, self.compute.draw_ns(worker, self.queue.now_ns))
        player.computing = 1
        player.began_ns = self.queue.now_ns
        self.cores.begin(&self.queue, worker, max(<int64_t> 1, took_ns),
                         self._for_batch(player, self.compute.blocked_ns(worker)))
        self.record(RECORD_BEGIN, worker, -1, player.timestamp, player.batch)

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
        player.computed_ns = self.queue.now_ns
        player.compute_ns += self.queue.now_ns - player.began_ns
        self.record(RECORD_COMPUTED, worker, -1, player.timestamp, self.queue.now_ns - player.began_ns)
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
            player.left = RECORD_LEAVE
            player.compute_ns -= self.queue.now_ns - player.began_ns
            self._leave_all(worker)
        elif player.sending:
            player.holding = 1  # Rudra-adv*: a gradient is never sent before the one before it was delivered
        else:
            self._push(worker)

    cdef void _push(self, int32_t worker) noexcept nogil:
        cdef player_t *player = &self.players[worker]
        cdef message_t direct
        cdef message_t *push = &direct
        cdef int32_t shard
        player.steps += 1
        if self.overlap:
            player.sending = self.n_shards
        for shard in range(self.n_shards):
            if not self.is_direct:
                push = self.network.make(&self.queue)
            if push == NULL:
                return
            push.kind, push.worker, push.shard = EVENT_PUSHED, worker, shard
            push.version, push.samples, push.bytes = player.timestamp, player.batch, self.shard_bytes
            push.read_version = self.views[worker * self.n_shards + shard].version
            if self.is_direct:
                self._receive(push)
            else:
                self._send(push)
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
        if message.version == self.servers[0].state.version:
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
        self.record(RECORD_PULL, worker, shard, version, step)
        self._try_begin(worker)

    # -- deaths, and workers that join ---------------------------------------------------------------

    cdef void _kill(self, int32_t worker) noexcept nogil:
        """End a worker here, unless it has left. What it has sent counts; its core is free when its step would have ended."""
        cdef player_t *player = &self.players[worker]
        if player.left:
            return
        player.left, player.resume_ns = RECORD_DEATH, -1
        if player.computing:
            player.compute_ns += self.queue.now_ns - player.began_ns
        self._leave_all(worker)

    cdef void _join(self, int32_t worker) noexcept nogil:
        """Let a worker join in the place of one that has ended, once all that was sent there is folded: soon, if not now."""
        cdef server_t *server = &self.servers[0]
        cdef worker_t *w = &state_workers(server.state)[worker]
        cdef player_t *player = &self.players[worker]
        if player.computing or w.live or w.cursor != w.consumed:
            queue_add(&self.queue, self.queue.now_ns + _JOIN_AGAIN_NS, EVENT_CHANGE, -1 - worker)
            return
        self._fire_due(0)
        state_begin(server.state)
        scheduler_join(server.state, worker, self.queue.now_ns, -1)
        player.steps = player.first_step = self.views[worker].step = w.clock
        player.consumed, player.first_version, player.computed_ns = w.consumed, server.state.version, self.queue.now_ns
        player.grant_wait_ns -= self.queue.now_ns  # its grant has no push before it
        player.left = player.fresh = player.granted_batch = 0
        self.views[worker].version = -1
        self.n_left -= 1
        self.record(RECORD_JOIN, worker, 0, server.state.version, w.clock)
        self._follow(0, ACTION_NONE)
        self._arm(0)

    # -- overlapped pulls (Rudra-adv*) ---------------------------------------------------------------

    cdef void _fetch(self, int32_t worker) noexcept nogil:
        """Begin the worker's pull of the newest version."""
        cdef message_t *pull = self.network.make(&self.queue)
        if pull == NULL:
            return
        pull.kind, pull.worker, pull.shard = EVENT_PULLED, worker, 0
        pull.version, pull.bytes = self.servers[0].state.version, self.shard_bytes
        self._record_pull(RECORD_GRANT, worker, pull.version, 0)
        self._send(pull)

    cdef void _record_pull(self, int kind, int32_t worker, int64_t version, int32_t node) noexcept nogil:
        """For a driver, record that a pull in the background from a node begins, as a grant, or that its weights arrive."""
        if self.tracing and self.asks:
            self.record(kind, worker, 0, version, node)

    cdef void _relay(self, int32_t node) noexcept nogil:
        """Let a node of the broadcast tree send its newest weights to its children, if it has any and sends nothing yet.

        Node 0 is the server, node k is worker k - 1, and the children of node k are nodes 2 k + 1 and 2 k + 2.
        """
        cdef int32_t child
        if self.relaying[node] >= 0 or 2 * <int64_t> node + 1 > self.n_workers:
            return
        self.relaying[node] = self.players[node - 1].ready_version if node else self.servers[0].state.version
        for child in range(2 * node + 1, min(2 * node + 2, self.n_workers) + 1):
            self._record_pull(RECORD_GRANT, child - 1, self.relaying[node], node)
        queue_add(&self.queue, self.queue.now_ns + self.hop_ns, EVENT_RELAYED, node)

    cdef void _relayed(self, int32_t node) noexcept nogil:
        """Give the children the version that was sent, and send what has come meanwhile. Versions in between are skipped."""
        cdef int64_t version = self.relaying[node]
        cdef int64_t newest = self.players[node - 1].ready_version if node else self.servers[0].state.version
        cdef int32_t child
        self.relaying[node] = -1
        for child in range(2 * node + 1, min(2 * node + 2, self.n_workers) + 1):
            self.players[child - 1].ready_version = version
            self._record_pull(RECORD_PULL, child - 1, version, node)
            self._relay(child)
        if newest > version:
            self._relay(node)

    # -- calls of the shards -------------------------------------------------------------------------

    cdef int _leaves(self, int32_t worker, int64_t clock) noexcept nogil:
        return self.players[worker].left if clock == self.players[worker].steps else 0

    cdef void _take(self, int32_t worker) noexcept nogil:
        if self.overlap:
            self.players[worker].sending -= 1

    cdef void _unblock(self, int32_t worker) noexcept nogil:
        if self.players[worker].blocked:
            self._try_begin(worker)

    cdef void _go_on(self, int32_t worker, bint is_new) noexcept nogil:
        """Overlap: push the gradient held back, now that the last was delivered; `is_new`: that push made a version."""
        cdef player_t *player = &self.players[worker]
        cdef int32_t i
        if is_new and self.hop_ns >= 0:
            self._relay(0)
        elif is_new and not self.network.instant:
            for i in range(self.n_idle):
                self._fetch(self.idle[i])
            self.n_idle = 0
        if player.holding and not player.sending:
            player.holding = 0
            self._push(worker)
        self._try_begin(worker)

    cdef void _answer(self, int32_t worker, int32_t shard) noexcept nogil:
        """Send the worker its grant with the shard's weights, or without them if it holds the newest version."""
        cdef server_t *server = &self.servers[shard]
        cdef worker_t *w = &state_workers(server.state)[worker]
        cdef player_t *player = &self.players[worker]
        cdef message_t *answer
        player.grant_wait_ns += self.queue.now_ns - w.push_ns[0]
        if w.batch > 0:
            player.granted_batch = w.batch
        if self.tracing and not (self.overlap and self.asks):
            self.record(RECORD_GRANT, worker, shard, server.state.version, w.granted)
        if self.overlap:
            self.views[worker].step = w.granted
            self._try_begin(worker)
            return
        if self.is_direct:
            self._arrive(worker, shard, w.granted, server.state.version)
            return
        answer = self.network.make(&self.queue)
        if answer == NULL:
            return
        answer.kind, answer.worker, answer.shard = EVENT_PULLED, worker, shard
        answer.step, answer.version = w.granted, server.state.version
        # Rudra, section 3.2: a pull is skipped when the version has not changed.
        answer.bytes = 0 if self.views[worker * self.n_shards + shard].version == answer.version else self.shard_bytes
        if self.server_queue.takes_time:
            self.server_queue.add(&self.queue, <int32_t> (answer - self.network.messages))
        else:
            self._send(answer)

    # -- statistics ----------------------------------------------------------------------------------

    def totals(self):
        """Return the sums so far over all workers, a dict of numbers: times in ns, and how often a step had an old block.

        A worker's time since its last event counts as computing or waiting, depending on its state.
        """
        cdef int32_t worker
        cdef player_t *player
        compute_ns = wait_ns = grant_wait_ns = stale_blocks = 0
        for worker in range(self.n_workers):
            player = &self.players[worker]
            compute_ns += player.compute_ns
            wait_ns += player.wait_ns
            if player.computing and not player.left:
                compute_ns += max(0, self.ended_ns - player.began_ns)
            elif player.steps and not player.left:
                wait_ns += max(0, self.ended_ns - player.computed_ns)
            grant_wait_ns += player.grant_wait_ns
            stale_blocks += player.stale_blocks
        return {"compute_ns": compute_ns, "wait_ns": wait_ns, "grant_wait_ns": grant_wait_ns, "stale_blocks": stale_blocks}
