"""fastps.kernels.combining: what the lane that holds a shard lock does: drain the lanes, decide, fold with helpers, commit.

Arrows: it imports shm and what is below it.
"""
