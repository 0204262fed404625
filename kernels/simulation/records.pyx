"""Simulation records: the shards' schedulers, pushes that wait for a fold, histograms of staleness, and the trace.

Records hold what the scheduler decided; they make no decision themselves.
"""

from libc.stdint cimport int16_t, int32_t, int64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.shm.arena_h cimport fps_time_bucket
from fastps.kernels.scheduling.state cimport (
    FOLD_IN_ORDER,
    policy_t,
    state_size,
    state_folds,
    state_initialise,
    state_workers,
    scheduler_t,
    worker_t,
)
from fastps.kernels.scheduling.decisions cimport ACTION_DROP, ACTION_FOLD

cdef enum:
    _MOST_STALENESS = 1 << 20


cdef Records begin_records(policy_t *policy, int32_t workers, int32_t shards, bint tracing):
    """Make the records of fresh shards; with `tracing` they keep a trace. Raises MemoryError."""
    cdef Records records = Records.__new__(Records)
    cdef server_t *server
    cdef int64_t shard, leaf
    records.n_workers, records.n_shards, records.tracing = workers, shards, tracing
    records.policy = policy[0]
    records.pool.first_free = -1
    records.n_staleness = min(<int64_t> _MOST_STALENESS, 4 * <int64_t> workers + 1024)
    records.servers = <server_t *> calloc(shards, sizeof(server_t))
    records.kept_version = <int64_t *> calloc(<size_t> workers * <size_t> shards, sizeof(int64_t))
    records.staleness = <int64_t *> calloc(records.n_staleness, sizeof(int64_t))
    if not (records.servers and records.kept_version and records.staleness):
        raise MemoryError()
    for shard in range(shards):
        server = &records.servers[shard]
        server.state = <scheduler_t *> calloc(1, state_size(workers))
        server.leaves = <fps_kept_list *> calloc(policy.groups + 1, sizeof(fps_kept_list))
        if not (server.state and server.leaves):
            raise MemoryError()
        state_initialise(server.state, workers, policy)
        server.due_ns = server.armed_ns = server.last_update_ns = -1
        server.sum.first = server.sum.last = server.posted.first = server.posted.last = -1
        for leaf in range(policy.groups + 1):
            server.leaves[leaf].first = server.leaves[leaf].last = -1
    return records


cdef class Records:
    def __dealloc__(self):
        cdef int64_t shard
        if self.servers:
            for shard in range(self.n_shards):
                free(self.servers[shard].state)
                free(self.servers[shard].leaves)
        free(self.servers)
        free(self.kept_version)
        free(self.staleness)
        free(self.pool.kept)
        free(self.events.records)

    cdef void record(self, int kind, int32_t worker, int32_t shard, int64_t version, int64_t detail) noexcept nogil:
        cdef fps_event_record found
        found.time_ns, found.version, found.detail = self.now_ns, version, detail
        found.worker, found.shard, found.kind = worker, <int16_t> shard, <int16_t> kind
        if fps_trace_add(&self.events, found) < 0:
            self.no_memory = True

    # -- pushes ------------------------------------------------------------------------------------

    cdef void keep(self, int32_t shard, int32_t worker, int64_t read_version, int action) noexcept nogil:
        """Record the outcome of the received push: folded, dropped, or kept in a sum."""
        cdef server_t *server = &self.servers[shard]
        cdef worker_t *w = &state_workers(server.state)[worker]
        cdef fps_kept_list *sum = &server.sum
        if action == ACTION_DROP:
            if w.cursor + 1 == w.consumed:
                w.cursor = w.consumed
            if self.tracing:
                self.record(RECORD_DROP, worker, shard, read_version, 0)
        elif action == ACTION_FOLD:
            w.cursor = w.consumed
            self._fold(server, shard, worker, read_version, server.state.version - 1)
            self._end_update(server)
        elif self.policy.fold == FOLD_IN_ORDER:
            self.kept_version[worker * self.n_shards + shard] = read_version
        else:
            if self.policy.groups:
                sum = &server.leaves[self.leaf_of(worker)]
            if fps_kept_add(&self.pool, sum, worker, read_version) < 0:
                self.no_memory = True

    cdef int64_t leaf_of(self, int32_t worker) noexcept nogil:
        return worker * self.policy.groups // self.n_workers

    cdef bint relay(self, int32_t shard, int32_t worker) noexcept nogil:
        """Move the leaf's pushes to the root's sum if the scheduler passed the leaf on; return whether there was any."""
        cdef server_t *server = &self.servers[shard]
        cdef int64_t leaf, first
        if not self.policy.groups:
            return False
        leaf = self.leaf_of(worker)
        first = (leaf * self.n_workers + self.policy.groups - 1) // self.policy.groups
        if server.leaves[leaf].first < 0 or state_workers(server.state)[first].leaf_kept:
            return False
        fps_kept_move(&self.pool, &server.sum, &server.leaves[leaf])
        return True

    # -- updates -----------------------------------------------------------------------------------

    cdef void fold_list(self, int32_t shard) noexcept nogil:
        """Fold the pushes that the scheduler listed, one update each."""
        cdef server_t *server = &self.servers[shard]
        cdef scheduler_t *state = server.state
        cdef int32_t i, worker
        for i in range(state.n_folds):
            worker = state_folds(state)[i]
            state_workers(state)[worker].cursor += 1
            self._fold(server, shard, worker, self.kept_version[worker * self.n_shards + shard],
                       state.version - state.n_folds + i)
            self._end_update(server)

    cdef void fold_sum(self, int32_t shard) noexcept nogil:
        """Fold all pushes of the sum in one update; the sum stays readable until forget_sum."""
        cdef server_t *server = &self.servers[shard]
        cdef int32_t node = server.sum.first
        cdef worker_t *w
        while node >= 0:
            w = &state_workers(server.state)[self.pool.kept[node].worker]
            w.cursor = w.cursor + 1 if self.policy.groups else w.consumed
            self._fold(server, shard, self.pool.kept[node].worker, self.pool.kept[node].read_version,
                       server.state.version - 1)
            node = self.pool.kept[node].next
        self._end_update(server)

    cdef void forget_sum(self, int32_t shard) noexcept nogil:
        fps_kept_clear(&self.pool, &self.servers[shard].sum)

    cdef void _fold(self, server_t *server, int32_t shard, int32_t worker, int64_t read_version,
                    int64_t version) noexcept nogil:
        """Count a folded push and its staleness: the versions published between its read and `version`."""
        cdef worker_t *w = &state_workers(server.state)[worker]
        cdef int64_t staleness = version - read_version
        w.folded += 1
        w.staleness_sum += staleness
        w.staleness_max = max(w.staleness_max, staleness)
        server.staleness_of_update += staleness
        server.pushes_of_update += 1
        self.staleness[min(max(staleness, 0), self.n_staleness - 1)] += 1
        if self.tracing:
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

    # -- the trace -----------------------------------------------------------------------------------

    cdef bytes trace(self, bint forget):
        """Return the trace so far, 32 bytes a record; with `forget` the next begins here."""
        cdef bytes found = b""
        if self.events.length:
            found = (<char *> self.events.records)[:self.events.length * sizeof(fps_event_record)]
        if forget:
            self.events.length = 0
        return found
