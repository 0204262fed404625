"""Totals of a simulation: sums over workers and shards, one shard's statistics, and the histogram of staleness.

Reading totals does not change the simulation.
"""

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.shm.arena_h cimport FPS_GAP_BUCKETS, fps_bucket_time
from fastps.kernels.simulation.records cimport server_t
from fastps.kernels.scheduling.state cimport state_workers, worker_t
from fastps.kernels.simulation.simulator cimport Simulator, player_t


def totals(Simulator simulator not None):
    """Return the sums so far over all workers and shards: a dict of numbers; times in ns.

    A worker's time since its last event counts as computing or waiting, depending on its state.
    """
    cdef int32_t worker, shard
    cdef worker_t *w
    cdef player_t *player
    compute_ns = wait_ns = grant_wait_ns = stale_blocks = folded = dropped = staleness_sum = 0
    cdef int64_t staleness_max = 0
    for worker in range(simulator.n_workers):
        player = &simulator.players[worker]
        compute_ns += player.compute_ns
        wait_ns += player.wait_ns
        if player.computing and not player.left:
            compute_ns += max(0, simulator.ended_ns - player.began_ns)
        elif player.steps and not player.left:
            wait_ns += max(0, simulator.ended_ns - player.computed_ns)
        grant_wait_ns += player.grant_wait_ns
        stale_blocks += player.stale_blocks
        for shard in range(simulator.n_shards):
            w = &state_workers(simulator.records.servers[shard].state)[worker]
            folded += w.folded
            dropped += w.dropped
            staleness_sum += w.staleness_sum
            staleness_max = max(staleness_max, w.staleness_max)
    return {
        "compute_ns": compute_ns, "wait_ns": wait_ns, "grant_wait_ns": grant_wait_ns, "stale_blocks": stale_blocks,
        "folded": folded, "dropped": dropped, "staleness_sum": staleness_sum, "staleness_max": staleness_max,
    }


def shard_totals(Simulator simulator not None, int32_t shard):
    """Return a shard's version, updates, their mean <sigma>, and the gaps between updates as (least ns, count)."""
    if not 0 <= shard < simulator.n_shards:
        raise IndexError(f"expected a shard of 0 to {simulator.n_shards - 1}, found {shard}")
    cdef server_t *server = &simulator.records.servers[shard]
    cdef int bucket
    return {
        "version": server.state.version,
        "updates": server.updates,
        "sigma_mean": server.sigma_sum / max(1, server.updates),
        "gaps_ns": [(fps_bucket_time(bucket), server.gaps[bucket]) for bucket in range(FPS_GAP_BUCKETS)
                    if server.gaps[bucket]],
    }


def staleness_counts(Simulator simulator not None):
    """Return the histogram of staleness over all shards as (versions, folded pushes); the last bucket is open-ended."""
    cdef int64_t index
    cdef int64_t *counts = simulator.records.staleness
    return [(index, counts[index]) for index in range(simulator.records.n_staleness) if counts[index]]
