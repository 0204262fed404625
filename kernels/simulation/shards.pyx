"""The shards of a simulated job: each of their events is one call of the scheduler's own compiled functions.

Every push, leave and timer goes to scheduler_push, scheduler_leave and scheduler_fire, the object code that the store's
combiner calls. The shards keep the pushes that wait for a fold, count what the scheduler decided, and record it in the trace.
A subclass says what a worker does with a grant: `_take`, `_unblock`, `_go_on` and `_answer`, and when it leaves: `_leaves`.
"""

from libc.stdint cimport int16_t, int32_t, int64_t
from libc.stdlib cimport calloc, free, realloc

import numpy as np

from fastps.kernels.scheduling.decisions cimport *
from fastps.kernels.scheduling.state cimport *
from fastps.kernels.shm.arena_h cimport fps_bucket_time, fps_time_bucket
from fastps.kernels.simulation.event_queue cimport EVENT_DRAIN, EVENT_PULLED, EVENT_TIMER, queue_add

cdef enum:
    _MOST_STALENESS = 1 << 20


cdef class SimulatedShards:
    """The abstract base class of a simulator."""

    def _make_shards(self):
        """Make fresh shards of the policy. Raises MemoryError."""
        cdef server_t *server
        cdef int64_t shard
        self.kept_version = np.zeros((self.n_workers, self.n_shards), np.int64)
        self.staleness = np.zeros(min(_MOST_STALENESS, 4 * self.n_workers + 1024), np.int64)
        self.servers = <server_t *> calloc(self.n_shards, sizeof(server_t))
        if not self.servers:
            raise MemoryError()
        for shard in range(self.n_shards):
            server = &self.servers[shard]
            server.state = <scheduler_t *> calloc(1, state_size(self.n_workers))
            server.leaves = <list_t *> calloc(self.policy.groups + 1, sizeof(list_t))
            if not (server.state and server.leaves):
                raise MemoryError()
            state_initialise(server.state, self.n_workers, &self.policy)
            server.due_ns = server.armed_ns = server.last_update_ns = -1

    def __dealloc__(self):
        cdef int64_t shard
        if self.servers:
            for shard in range(self.n_shards):
                free(self.servers[shard].state)
                free(self.servers[shard].leaves)
        free(self.servers)
        free(self.records)
        free(self.queue.events)

    # -- for a subclass to override ------------------------------------------------------------------

    cdef void _take(self, int32_t worker) noexcept nogil:
        """Called when a shard has received the worker's push."""

    cdef void _unblock(self, int32_t worker) noexcept nogil:
        """Called when a slot of the worker may be free."""

    cdef void _go_on(self, int32_t worker, bint is_new) noexcept nogil:
        """Overlap: called when the worker's push was delivered; `is_new`: it made a version."""

    cdef void _answer(self, int32_t worker, int32_t shard) noexcept nogil:
        """Called when the shard grants the worker a step."""

    cdef int _leaves(self, int32_t worker, int64_t clock) noexcept nogil:
        """0, or if `clock` pushes are all that the worker made: RECORD_LEAVE or RECORD_DEATH, as it has ended."""
        return 0

    cdef bint _is_over(self) noexcept nogil:
        if self.n_left == self.n_workers:
            return self.queue.length == 0
        return not (self.leave or self.asks) and self.received >= self.n_workers * self.steps * self.n_shards

    @property
    def now_ns(self):
        """The virtual time."""
        return self.queue.now_ns

    # -- messages --------------------------------------------------------------------------------

    cdef void _send(self, const message_t *message) noexcept nogil:
        """Send a message over its worker's link to the shard."""
        self.network.send(&self.queue, <int32_t> (message - self.network.messages), self.links[message.worker] + message.shard)

    cdef void _pushed(self, int32_t index) noexcept nogil:
        if self.server_queue.takes_time:
            self.server_queue.add(&self.queue, index)
        else:
            self._handled(index)

    cdef void _served(self, int32_t station) noexcept nogil:
        cdef int32_t index = self.server_queue.take(station)
        cdef message_t *message = &self.network.messages[index]
        if message.kind == EVENT_PULLED:
            self._send(message)
        else:
            self._handled(index)
        if self.policy.combine and self.servers[station].posted.length:
            self.servers[station].n_ahead -= 1
            if self.servers[station].n_ahead == 0:  # this message was the last of a drain
                self._drain(station)
        self.server_queue.begin(&self.queue, station)

    cdef void _handled(self, int32_t index) noexcept nogil:
        """Give a push that the server has handled to the shard, or to its next drain.

        A drain is all pushes of one instant, or those that waited while the server was busy.
        """
        cdef message_t push = self.network.messages[index]
        cdef server_t *server = &self.servers[push.shard]
        if not self.policy.combine:
            self.network.release(index)
            self._receive(&push)
            return
        self.network.append(&server.posted, index)
        if server.posted.length == 1 and self.server_queue.takes_time:
            server.n_ahead = 1 + self.server_queue.stations[push.shard].messages.length  # this one, and those behind it
        elif server.posted.length == 1:
            queue_add(&self.queue, self.queue.now_ns, EVENT_DRAIN, push.shard)

    # -- events --------------------------------------------------------------------------------------

    cdef void _receive(self, const message_t *push) noexcept nogil:
        cdef scheduler_t *state = self.servers[push.shard].state
        cdef int64_t version
        cdef int action
        cdef bint relayed
        self._fire_due(push.shard)
        version = state.version
        state_begin(state)
        action = self._decide(push)
        relayed = self._keep(push, action)
        self._follow(push.shard, action)
        if relayed and self.server_queue.takes_time:
            self.server_queue.relay(self.queue.now_ns, push.worker, push.shard, self.shard_bytes, not self.overlap)
        self._leave(push.worker, push.shard)
        self._arm(push.shard)
        if self.overlap:
            self._go_on(push.worker, state.version != version)

    cdef void _drain(self, int32_t shard) noexcept nogil:
        """Decide all posted pushes in one commit, as the combiner does: each in turn, then close their sum."""
        cdef server_t *server = &self.servers[shard]
        cdef int32_t first = server.posted.first, index = first
        cdef int64_t version
        cdef int action
        cdef message_t push  # by value: an answer may move the messages
        server.posted.length = 0
        self._fire_due(shard)
        version = server.state.version
        state_begin(server.state)
        while index >= 0 and not self._is_over():
            push = self.network.messages[index]
            action = self._decide(&push)
            self._keep(&push, action)
            if action == ACTION_FOLD_ALL:  # the sum is full
                self._follow(shard, action)
                state_begin(server.state)
            index = push.next
        self._follow(shard, scheduler_close(server.state))
        index = first
        while index >= 0:
            push = self.network.messages[index]
            self.network.release(index)
            self._leave(push.worker, shard)
            if self.overlap:
                self._go_on(push.worker, server.state.version != version)
            index = push.next
        self._arm(shard)

    cdef int _decide(self, const message_t *push) noexcept nogil:
        """Give the scheduler a push within the commit in progress."""
        cdef scheduler_t *state = self.servers[push.shard].state
        state_workers(state)[push.worker].consumed += 1
        self.received += 1
        self.samples += push.samples if push.shard == 0 else 0
        self.ended_ns = self.queue.now_ns
        self.record(RECORD_RECEIVE, push.worker, push.shard, push.version, push.samples)
        self._take(push.worker)
        return scheduler_push(state, push.worker, self.queue.now_ns, push.version, push.samples)

    cdef void _leave_all(self, int32_t worker) noexcept nogil:
        """Let the worker leave every shard, after what is on its way there."""
        cdef int32_t shard
        self.n_left += 1
        for shard in range(self.n_shards):
            self._fire_due(shard)
            self._leave(worker, shard)
            self._arm(shard)

    cdef void _leave(self, int32_t worker, int32_t shard) noexcept nogil:
        """Let the worker leave the shard, if it has left and the shard has received all its pushes."""
        cdef scheduler_t *state = self.servers[shard].state
        cdef worker_t *w = &state_workers(state)[worker]
        cdef int action, kind = self._leaves(worker, w.clock) if w.live else 0
        if kind:
            state_begin(state)
            self.record(kind, worker, shard, state.version, 0)
            action = scheduler_leave(state, worker, self.queue.now_ns)
            self._relay_leaf(worker, shard)
            self._follow(shard, action)

    cdef void _timed(self, int32_t shard) noexcept nogil:
        """Handle the event of the shard's timer."""
        if self.servers[shard].armed_ns == self.queue.now_ns:  # else it is void: an earlier event replaced it
            self.servers[shard].armed_ns = -1
            self._fire_due(shard)
            self._arm(shard)

    cdef void _fire_due(self, int32_t shard) noexcept nogil:
        """Fire every timer due by now, each stamped with its own deadline."""
        cdef server_t *server = &self.servers[shard]
        while server.due_ns != NEVER_NS and server.due_ns <= self.queue.now_ns:
            state_begin(server.state)
            self.ended_ns = self.queue.now_ns
            self.record(RECORD_TIMER, -1, shard, server.state.version, 0)
            self._follow(shard, scheduler_fire(server.state))
            server.due_ns = scheduler_due(server.state)

    cdef void _arm(self, int32_t shard) noexcept nogil:
        """Schedule the event of the shard's timer, unless an earlier one is pending."""
        cdef server_t *server = &self.servers[shard]
        server.due_ns = scheduler_due(server.state)
        if server.due_ns != NEVER_NS and not 0 <= server.armed_ns <= server.due_ns:
            server.armed_ns = server.due_ns
            queue_add(&self.queue, server.due_ns, EVENT_TIMER, shard)

    # -- outcomes of decisions -----------------------------------------------------------------------

    cdef bint _keep(self, const message_t *push, int action) noexcept nogil:
        """Note whether the received push is folded, dropped, or kept in a sum; return whether its leaf has passed it on."""
        cdef server_t *server = &self.servers[push.shard]
        cdef worker_t *w = &state_workers(server.state)[push.worker]
        cdef list_t *sum = &server.sum
        cdef message_t *kept
        cdef bint relayed
        if action == ACTION_DROP:
            if w.cursor + 1 == w.consumed:
                w.cursor = w.consumed
            self.record(RECORD_DROP, push.worker, push.shard, push.read_version, 0)
        elif action == ACTION_FOLD:
            w.cursor = w.consumed
            self._fold(push.shard, push.worker, push.read_version, server.state.version - 1)
            self._end_update(server)
        elif self.policy.fold == FOLD_IN_ORDER:
            self.kept_version[push.worker, push.shard] = push.read_version
        else:
            if self.policy.groups:
                sum = &server.leaves[push.worker * self.policy.groups // self.n_workers]
            kept = self.network.make(&self.queue)
            if kept != NULL:
                kept.worker, kept.read_version = push.worker, push.read_version
                self.network.append(sum, <int32_t> (kept - self.network.messages))
        relayed = self._relay_leaf(push.worker, push.shard)
        self._unblock(push.worker)  # a slot of it may be free now
        return relayed

    cdef bint _relay_leaf(self, int32_t worker, int32_t shard) noexcept nogil:
        """Move the leaf's pushes to the root's sum if the scheduler passed the leaf on; return whether there was any."""
        cdef server_t *server = &self.servers[shard]
        cdef list_t *leaf = &server.leaves[worker * self.policy.groups // self.n_workers]
        cdef const worker_t *workers = state_workers(server.state)
        if not self.policy.groups or leaf.length == 0 or workers[workers[worker].leader].leaf_kept:
            return False
        while leaf.length:
            self.network.append(&server.sum, self.network.take_first(leaf))
        return True

    cdef void _follow(self, int32_t shard, int action) noexcept nogil:
        """Count what an event folded, and answer every worker that it granted a step."""
        cdef scheduler_t *state = self.servers[shard].state
        cdef int32_t i, worker
        if action == ACTION_FOLD_ALL:
            self._fold_sum(shard)
        elif action == ACTION_FOLD_LIST:
            for i in range(state.n_folds):  # one update each
                worker = state_folds(state)[i]
                state_workers(state)[worker].cursor += 1
                self._fold(shard, worker, self.kept_version[worker, shard], state.version - state.n_folds + i)
                self._end_update(&self.servers[shard])
        if self.server_queue.takes_time:
            self.server_queue.update(self.queue.now_ns, shard, state.version)
        for i in range(state.n_dirty_workers):
            worker = state_dirty(state)[i]
            if state_workers(state)[worker].granted_at == state.sequence:
                self._answer(worker, shard)

    cdef void _fold_sum(self, int32_t shard) noexcept nogil:
        """Fold all pushes of the sum in one update, then unblock the workers that wait for one of their slots."""
        cdef server_t *server = &self.servers[shard]
        cdef int32_t worker, index = server.sum.first if server.sum.length else -1
        cdef worker_t *w
        while index >= 0:
            worker = self.network.messages[index].worker
            w = &state_workers(server.state)[worker]
            w.cursor = w.cursor + 1 if self.policy.groups else w.consumed
            self._fold(shard, worker, self.network.messages[index].read_version, server.state.version - 1)
            index = self.network.messages[index].next
        self._end_update(server)
        while server.sum.length:
            index = self.network.take_first(&server.sum)
            worker = self.network.messages[index].worker
            self.network.release(index)
            self._unblock(worker)

    cdef void _fold(self, int32_t shard, int32_t worker, int64_t read_version, int64_t version) noexcept nogil:
        """Count a folded push and its staleness: the versions published between its read and `version`."""
        cdef server_t *server = &self.servers[shard]
        cdef worker_t *w = &state_workers(server.state)[worker]
        cdef int64_t staleness = version - read_version
        w.folded += 1
        w.staleness_sum += staleness
        w.staleness_max = max(w.staleness_max, staleness)
        server.staleness_of_update += staleness
        server.pushes_of_update += 1
        self.staleness[min(max(staleness, 0), self.staleness.shape[0] - 1)] += 1
        self.record(RECORD_FOLD, worker, shard, read_version, staleness)

    cdef void _end_update(self, server_t *server) noexcept nogil:
        """Count one version: its <sigma> (Rudra, equation 2), and the gaps between updates, one of each push."""
        if server.pushes_of_update == 0:
            return
        if server.last_update_ns >= 0:
            server.gaps[fps_time_bucket(server.state.folded_ns - server.last_update_ns)] += 1
        server.gaps[0] += server.pushes_of_update - 1
        server.updates += 1
        server.sigma_sum += <double> server.staleness_of_update / <double> server.pushes_of_update
        server.last_update_ns = server.state.folded_ns
        server.pushes_of_update = server.staleness_of_update = 0

    def shard_totals(self, int32_t shard):
        """Return a shard's updates, their mean <sigma>, the gaps between them as (least ns, count), and sums over workers."""
        if not 0 <= shard < self.n_shards:
            raise IndexError(f"expected a shard of 0 to {self.n_shards - 1}, found {shard}")
        cdef server_t *server = &self.servers[shard]
        cdef worker_t *w
        cdef int32_t worker
        cdef int bucket
        folded = dropped = staleness_sum = staleness_max = 0
        for worker in range(self.n_workers):
            w = &state_workers(server.state)[worker]
            folded += w.folded
            dropped += w.dropped
            staleness_sum += w.staleness_sum
            staleness_max = max(staleness_max, w.staleness_max)
        return {
            "folded": folded, "dropped": dropped, "staleness_sum": staleness_sum, "staleness_max": staleness_max,
            "updates": server.updates,
            "sigma_mean": server.sigma_sum / max(1, server.updates),
            "gaps_ns": [(fps_bucket_time(bucket), server.gaps[bucket]) for bucket in range(FPS_GAP_BUCKETS)
                        if server.gaps[bucket]],
        }

    def staleness_counts(self):
        """Return the histogram of staleness over all shards as (versions, folded pushes); the last bucket is open-ended."""
        counts = np.asarray(self.staleness)
        return [(int(index), int(counts[index])) for index in np.flatnonzero(counts)]

    # -- the trace -----------------------------------------------------------------------------------

    cdef void record(self, int kind, int32_t worker, int32_t shard, int64_t version, int64_t detail) noexcept nogil:
        """Add a record to the trace, if one is kept."""
        cdef int64_t room
        cdef record_t *records
        if not self.tracing:
            return
        if self.n_records == self.records_room:
            room = 2 * self.records_room if self.records_room else 1024
            records = <record_t *> realloc(self.records, room * sizeof(record_t))
            if records == NULL:
                self.queue.no_memory = True
                return
            self.records, self.records_room = records, room
        self.records[self.n_records] = record_t(
            self.queue.now_ns, version, detail, worker, <int16_t> shard, <int16_t> kind)
        self.n_records += 1

    def trace(self, bint forget=False):
        """Return the trace, 32 bytes a record: int64 time_ns, version, detail, int32 worker, int16 shard, kind; `forget` it."""
        cdef bytes found = (<char *> self.records)[:self.n_records * sizeof(record_t)] if self.n_records else b""
        if forget:
            self.n_records = 0
        return found
