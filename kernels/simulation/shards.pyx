"""The shards of a simulated job: each of their events is one call of the scheduler's own compiled functions.

Every push, leave and timer goes to scheduler_push, scheduler_leave and scheduler_fire, the object code that the store's
combiner calls, and its outcome into the records. A subclass says what a worker does with a grant: `_take`, `_unblock`, `_go_on`
and `_answer`, and when it leaves: `_leaves`.
"""

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.simulation.records cimport RECORD_RECEIVE, RECORD_TIMER, server_t
from fastps.kernels.simulation.network cimport EVENT_DRAIN, EVENT_PULLED, EVENT_TIMER, fps_queue_push, message_t
from fastps.kernels.scheduling.state cimport NEVER_NS, state_begin, state_dirty, state_workers, scheduler_t, worker_t
from fastps.kernels.scheduling.decisions cimport (
    ACTION_FOLD_ALL,
    ACTION_FOLD_LIST,
    scheduler_close,
    scheduler_due,
    scheduler_fire,
    scheduler_leave,
    scheduler_push,
)


cdef class SimulatedShards:
    """The abstract base class of a simulator."""

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

    cdef void _check(self, int outcome) noexcept nogil:
        if outcome < 0:
            self.no_memory = True

    # -- pushes that arrive --------------------------------------------------------------------------

    cdef void _pushed(self, int32_t index) noexcept nogil:
        if self.server_queue.takes_time:
            self._check(self.server_queue.add(&self.queue, self.now_ns, index))
        else:
            self._handled(index)

    cdef void _served(self, int32_t station) noexcept nogil:
        cdef int32_t index = self.server_queue.take(station)
        cdef message_t *message = &self.network.messages[index]
        if message.kind == EVENT_PULLED:
            self._check(self.network.send(&self.queue, self.now_ns, index, self.links[message.worker] + message.shard))
        else:
            self._handled(index)
        if self.records.policy.combine:
            self._look_for_drain(station)
        self._check(self.server_queue.go_on(&self.queue, self.now_ns, station))

    cdef void _handled(self, int32_t index) noexcept nogil:
        """Give a push that the server has handled to the shard, or to its next drain."""
        cdef message_t message = self.network.messages[index]
        if self.records.policy.combine:
            self._post(index)
            return
        self.network.release(index)
        self._receive(message.worker, message.shard, message.version, message.read_version, message.samples)

    cdef void _post(self, int32_t index) noexcept nogil:
        """Add the push to its drain: all pushes of one instant, or those that waited while the server was busy."""
        cdef int32_t shard = self.network.messages[index].shard
        cdef server_t *server = &self.records.servers[shard]
        self.network.messages[index].next = -1
        if server.posted.first >= 0:
            self.network.messages[server.posted.last].next = index
            server.posted.last = index
            return
        server.posted.first = server.posted.last = index
        if self.server_queue.takes_time:
            server.n_ahead = 1 + self.server_queue.stations[shard].length  # this message and those in the queue behind it
        else:
            self._check(fps_queue_push(&self.queue, self.now_ns, EVENT_DRAIN, shard))

    cdef void _look_for_drain(self, int32_t shard) noexcept nogil:
        """Drain the shard if the message that its station has just handled is the last of a drain."""
        cdef server_t *server = &self.records.servers[shard]
        if server.posted.first >= 0:
            server.n_ahead -= 1
            if server.n_ahead == 0:
                self._drain(shard)

    # -- events --------------------------------------------------------------------------------------

    cdef void _receive(self, int32_t worker, int32_t shard, int64_t timestamp, int64_t read_version,
                       int64_t samples) noexcept nogil:
        cdef server_t *server = &self.records.servers[shard]
        cdef int64_t version
        cdef int action
        cdef bint relayed
        self._fire_due(shard)
        version = server.state.version
        state_begin(server.state)
        action = self._decide(worker, shard, timestamp, read_version, samples)
        relayed = self._keep(shard, worker, read_version, action)
        self._follow(shard, action)
        if relayed and self.server_queue.takes_time:
            self.server_queue.relay(self.now_ns, worker, shard, self.shard_bytes, not self.overlap)
        self._leave(worker, shard)
        self._arm(shard)
        if self.overlap:
            self._go_on(worker, server.state.version != version)

    cdef void _drain(self, int32_t shard) noexcept nogil:
        """Decide all posted pushes in one commit, as the combiner does: each in turn, then close their sum."""
        cdef server_t *server = &self.records.servers[shard]
        cdef int32_t first = server.posted.first, index = first
        cdef int64_t version
        cdef int action
        cdef message_t message  # by value: an answer may move the messages
        server.posted.first = server.posted.last = -1
        self._fire_due(shard)
        version = server.state.version
        state_begin(server.state)
        while index >= 0 and not self._is_over():
            message = self.network.messages[index]
            action = self._decide(message.worker, shard, message.version, message.read_version, message.samples)
            self._keep(shard, message.worker, message.read_version, action)
            if action == ACTION_FOLD_ALL:  # the sum is full
                self._follow(shard, action)
                state_begin(server.state)
            index = message.next
        self._follow(shard, scheduler_close(server.state))
        index = first
        while index >= 0:
            message = self.network.messages[index]
            self.network.release(index)
            self._leave(message.worker, shard)
            if self.overlap:
                self._go_on(message.worker, server.state.version != version)
            index = message.next
        self._arm(shard)

    cdef int _decide(self, int32_t worker, int32_t shard, int64_t timestamp, int64_t read_version,
                     int64_t samples) noexcept nogil:
        """Give the scheduler a push within the commit in progress."""
        cdef server_t *server = &self.records.servers[shard]
        state_workers(server.state)[worker].consumed += 1
        self.received += 1
        self.samples += samples if shard == 0 else 0
        self.ended_ns = self.now_ns
        if self.records.tracing:
            self.records.record(RECORD_RECEIVE, worker, shard, timestamp, samples)
        self._take(worker)
        return scheduler_push(server.state, worker, self.now_ns, timestamp, samples)

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
        cdef server_t *server = &self.records.servers[shard]
        cdef worker_t *w = &state_workers(server.state)[worker]
        cdef int action, kind
        if not w.live:
            return
        kind = self._leaves(worker, w.clock)
        if not kind:
            return
        state_begin(server.state)
        if self.records.tracing:
            self.records.record(kind, worker, shard, server.state.version, 0)
        action = scheduler_leave(server.state, worker, self.now_ns)
        self.records.relay(shard, worker)
        self._follow(shard, action)

    cdef void _fire_due(self, int32_t shard) noexcept nogil:
        """Fire every timer due by now, each stamped with its own deadline."""
        cdef server_t *server = &self.records.servers[shard]
        while server.due_ns != NEVER_NS and server.due_ns <= self.now_ns:
            state_begin(server.state)
            self.ended_ns = self.now_ns
            if self.records.tracing:
                self.records.record(RECORD_TIMER, -1, shard, server.state.version, 0)
            self._follow(shard, scheduler_fire(server.state))
            server.due_ns = scheduler_due(server.state)

    cdef void _arm(self, int32_t shard) noexcept nogil:
        """Schedule the event of the shard's timer, unless an earlier one is pending."""
        cdef server_t *server = &self.records.servers[shard]
        server.due_ns = scheduler_due(server.state)
        if server.due_ns == NEVER_NS or (0 <= server.armed_ns <= server.due_ns):
            return
        server.armed_ns = server.due_ns
        self._check(fps_queue_push(&self.queue, server.due_ns, EVENT_TIMER, shard))

    # -- outcomes of decisions -----------------------------------------------------------------------

    cdef bint _keep(self, int32_t shard, int32_t worker, int64_t read_version, int action) noexcept nogil:
        """Record the outcome of the received push; return whether its leaf has passed it on."""
        cdef bint relayed
        self.records.keep(shard, worker, read_version, action)
        relayed = self.records.relay(shard, worker)
        self._unblock(worker)  # a slot of it may be free now
        return relayed

    cdef void _follow(self, int32_t shard, int action) noexcept nogil:
        """Count what an event folded, and answer every worker that it granted a step."""
        cdef scheduler_t *state = self.records.servers[shard].state
        cdef int32_t i, worker
        if action == ACTION_FOLD_ALL:
            self._fold_sum(shard)
        elif action == ACTION_FOLD_LIST:
            self.records.fold_list(shard)
        if self.server_queue.takes_time:
            self.server_queue.update(self.now_ns, shard, state.version)
        for i in range(state.n_dirty_workers):
            worker = state_dirty(state)[i]
            if state_workers(state)[worker].granted_at == state.sequence:
                self._answer(worker, shard)

    cdef void _fold_sum(self, int32_t shard) noexcept nogil:
        """Fold all pushes of the sum, then unblock the workers that wait for one of their slots."""
        cdef int32_t node = self.records.servers[shard].sum.first
        cdef int32_t worker
        self.records.fold_sum(shard)
        while node >= 0:
            worker = self.records.pool.kept[node].worker
            self._unblock(worker)
            node = self.records.pool.kept[node].next
        self.records.forget_sum(shard)
