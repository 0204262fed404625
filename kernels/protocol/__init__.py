"""fastps.kernels.protocol: rings, shard locks, folds shared by workers, commits and pins: what workers do to one arena.

Arrows: it imports shm and what is below it.
"""
