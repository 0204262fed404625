"""fastps.kernels.shm: the arena in shared memory: its layout, its format, its mapping, and how processes find it.

It decides nothing. Arrows: it imports base, scheduling and update.
"""
