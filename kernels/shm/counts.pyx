"""The most lanes and shards that an arena can have, for values that are checked before any arena is made.

This module imports nothing, so that the command line reads the numbers without numpy.
"""

from fastps.kernels.shm.arena_h cimport FPS_MAX_LANES, FPS_MAX_SHARDS

MAX_LANES = FPS_MAX_LANES
MAX_SHARDS = FPS_MAX_SHARDS
