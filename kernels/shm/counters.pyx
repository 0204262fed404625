"""What an arena counts: the lanes' counters, the shards' histograms, push outcomes, and pushes that were rejected.

Each value is current, but they are not of one moment.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastps.kernels.base.atomics cimport fps_counter_get, fps_counter_set, fps_head_acquire, fps_tail_acquire
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.shm.view cimport ArenaView


cdef class ArenaCounters(ArenaView):
    """The counters of an arena in `memory`, which is checked as ArenaView says."""

    # -- pushes that were rejected -----------------------------------------------------------------

    @property
    def rejections(self):
        """Pushes, counted in each shard, that were rejected because they or their results were non-finite."""
        cdef uint32_t shard
        cdef int64_t count = 0
        for shard in range(self.header.n_shards):
            count += fps_counter_get(&self.shard_header(shard).rejections)
        return count

    def rejected(self, uint32_t lane):
        """The number of a lane's rejections, over all shards, and (step, parameter) of the last, or None."""
        cdef fps_lane_shard *lane_shard
        cdef uint32_t shard
        count, last = 0, None
        for shard in range(self.header.n_shards):
            lane_shard = self.lane_shard(lane, shard)
            if fps_counter_get(&lane_shard.rejected):
                count += fps_counter_get(&lane_shard.rejected)
                found = fps_counter_get(&lane_shard.rejected_step), fps_counter_get(&lane_shard.rejected_parameter)
                last = found if last is None else max(last, found)
        return count, last

    # -- what became of pushes ---------------------------------------------------------------------

    def record(self):
        """Let combiners write an outcome for every push that is posted from now on."""
        cdef uint32_t shard
        for shard in range(self.header.n_shards):
            fps_counter_set(&self.shard_header(shard).recorded, 1)

    def push_outcomes(self, uint32_t lane, uint32_t shard, uint64_t first, uint64_t last):
        """The outcomes of the lane's descriptors [first, last) that the shard is done with; shorter if it is not with all.

        A list of (OUTCOME_FOLDED or OUTCOME_REJECTED, version that the push is part of, time, staleness), (OUTCOME_DROPPED,
        version that it was late for, time, 0), or None for a descriptor without an outcome: LEAVE, or posted before `record`.
        Only the lane's last `ring_size` descriptors are known, and only while the lane posts none.
        """
        cdef uint64_t position
        cdef fps_push_outcome *push_outcome
        last = min(last, fps_head_acquire(&self.lane_shard(lane, shard).head))
        found = []
        for position in range(first, last):
            push_outcome = self.push_outcome(lane, shard, position)
            if push_outcome.position != position + 1:
                found.append(None)
            else:
                found.append((<int> push_outcome.kind, push_outcome.version, push_outcome.decided_ns, push_outcome.staleness))
        return found

    # -- counters ----------------------------------------------------------------------------------

    def counters(self, uint32_t lane):
        """The lane's counters by name, over all shards; each is current, but they are not of one moment.

        `done` is the least of the shards, `folded`, `dropped` and `rows` (of tables, in folded pushes) are sums over shards.
        """
        cdef fps_lane *words = self.lane(lane)
        cdef fps_lane_shard *lane_shard
        cdef int64_t loss_bits = fps_counter_get(&words.loss_bits)
        cdef double loss
        cdef uint32_t shard
        cdef uint64_t done = fps_head_acquire(&self.lane_shard(lane, 0).head)
        cdef int64_t folded = 0, dropped = 0, staleness_sum = 0, staleness_max = 0, rows = 0
        memcpy(&loss, &loss_bits, sizeof(loss))
        for shard in range(self.header.n_shards):
            lane_shard = self.lane_shard(lane, shard)
            done = min(done, fps_head_acquire(&lane_shard.head))
            folded += fps_counter_get(&lane_shard.folded)
            dropped += fps_counter_get(&lane_shard.dropped)
            staleness_sum += fps_counter_get(&lane_shard.staleness_sum)
            staleness_max = max(staleness_max, fps_counter_get(&lane_shard.staleness_max))
            rows += fps_counter_get(&lane_shard.rows)
        return {
            "posted": fps_tail_acquire(&words.tail),
            "done": done,
            "steps": fps_counter_get(&words.steps),
            "wait_ns": fps_counter_get(&words.wait_ns),
            "compute_ns": fps_counter_get(&words.compute_ns),
            "push_ns": fps_counter_get(&words.push_ns),
            "samples": fps_counter_get(&words.samples),
            "stale_blocks": fps_counter_get(&words.stale_blocks),
            "folded": folded,
            "dropped": dropped,
            "rejected": self.rejected(lane)[0],
            "staleness_sum": staleness_sum,
            "staleness_max": staleness_max,
            "rows": rows,
            "loss": loss,
        }

    def histograms(self, uint32_t shard=0):
        """What a shard has counted, as lists of (least value of the bucket, count), empty buckets left out.

        `gaps_ns` between two consecutive updates; `staleness` of folded pushes, in versions; `arrivals_ns`: for each k, when
        the k-th push of a version came, counted from its beginning; `updates`; `average_staleness`: mean over all updates of
        <sigma> (Rudra, equation 2); `rows_written` of tables.
        """
        cdef fps_statistics *found = self.statistics(shard)
        cdef int bucket
        cdef uint32_t k
        updates = fps_counter_get(&found.updates)
        return {
            "updates": updates,
            "rows_written": fps_counter_get(&found.rows_written),
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
